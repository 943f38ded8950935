"""A process does not end while torch's threads hold tensors of an exchange: to give them back then would abort it."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from timeloom.distributed import lent_tensors


def test_an_ending_process_waits_for_what_it_lent() -> None:
    held = [lent_tensors.lend(torch.ones(3)), lent_tensors.lend(torch.ones(2))]
    threading.Timer(0.2, held.clear).start()
    lent_tensors.settle()
    assert not held


def test_it_waits_for_all_exchanges_and_forgets_those_that_are_over() -> None:
    lent_tensors.lend(torch.ones(3))
    first = [lent_tensors.lend(torch.ones(3))]
    second = [lent_tensors.lend(torch.ones(3))]
    assert [name() for name in lent_tensors._lent] == [first[0], second[0]]
    second.clear()
    threading.Timer(0.2, first.clear).start()
    lent_tensors.settle()
    assert not first


def test_it_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lent_tensors, "PATIENCE", 0.1)
    held = [lent_tensors.lend(torch.ones(3))]
    began = time.monotonic()
    lent_tensors.settle()
    assert time.monotonic() - began >= 0.1
    held.clear()


def test_what_was_lent_is_the_same_memory() -> None:
    tensor = torch.zeros(3)
    name = lent_tensors.lend(tensor)
    name += 1
    assert tensor.tolist() == [1, 1, 1]
