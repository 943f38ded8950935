"""Set-up that tests share."""

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
"""Files of few tests, or slow ones."""


def pytest_configure() -> None:
    """Workers share the cores: threads of one would wait for another's, those of the programs that tests start, too."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1 and "OMP_NUM_THREADS" not in os.environ:
        threads = max(1, torch.get_num_threads() // workers)
        torch.set_num_threads(threads)
        os.environ["OMP_NUM_THREADS"] = str(threads)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes long begins first, so that no worker is left alone with it."""
    items.sort(key=lambda item: item.path.name not in LONG)


def pytest_collection_finish() -> None:
    """What importing and collecting has left stays: Python's collector need not walk through it again and again."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Problems too small to share: more threads would only wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def auto_takes_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` runs our sweeps on any sequence, where it would leave short ones to torch's layer as the faster one."""
    monkeypatch.setattr(thresholds, "why_faster", lambda *_: None)
    monkeypatch.setattr(thresholds, "fewest_on_cpu", lambda *_: thresholds.Fewest())
    monkeypatch.setattr(beside_torch, "is_rival", lambda *_: False)


@pytest.fixture
def settings_stay(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Programs that are written for processes of their own leave settings as they were."""
    monkeypatch.setattr(remember, "FEWEST_STEPS", remember.FEWEST_STEPS)
    rounds = torch.backends.cudnn.allow_tf32
    yield
    torch.backends.cudnn.allow_tf32 = rounds
