"""Setup shared by all tests."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
import torch

from timeloom.auto import thresholds
from timeloom.compile import remember
from timeloom.solve import beside_torch

LONG = {
    f"test_{name}.py" for name in ("experiments", "ranks", "rank_restart", "app_ranks", "video", "gpu_scan", "examples")
}
"""Files with few tests, or slow ones."""


def pytest_configure() -> None:
    """Divide the cores among workers, and programs that tests start, so that threads do not wait for each other."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1 and "OMP_NUM_THREADS" not in os.environ:
        threads = max(1, torch.get_num_threads() // workers)
        torch.set_num_threads(threads)
        os.environ["OMP_NUM_THREADS"] = str(threads)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run slow files first, so that no worker is left alone with one."""
    items.sort(key=lambda item: item.path.name not in LONG)


def pytest_collection_finish() -> None:
    """Freeze the objects of imports and collection, so that the garbage collector does not traverse them every time."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()


@pytest.fixture
def threads_as_before() -> Iterator[None]:
    """Set torch's number of threads back at the end."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def one_thread(threads_as_before: None) -> None:
    """Run on one thread: for problems so small that more threads would only wait for one another."""
    torch.set_num_threads(1)


@pytest.fixture
def auto_takes_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `auto` run our sweeps on any sequence, even on short ones, for which torch's layer is faster."""
    monkeypatch.setattr(thresholds, "why_faster", lambda *_: None)
    monkeypatch.setattr(thresholds, "fewest_on_cpu", lambda *_: thresholds.Fewest())
    monkeypatch.setattr(beside_torch, "is_rival", lambda *_: False)


@pytest.fixture
def settings_stay(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore settings after programs that are written for separate processes."""
    monkeypatch.setattr(remember, "FEWEST_STEPS", remember.FEWEST_STEPS)
    rounds = torch.backends.cudnn.allow_tf32
    yield
    torch.backends.cudnn.allow_tf32 = rounds
