"""Set-up that tests share."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from timeloom.auto import thresholds
from timeloom.solve import beside_torch


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
    monkeypatch.setattr(beside_torch, "is_rival", lambda *_: False)
