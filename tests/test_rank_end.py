"""A process does not end while torch's threads hold tensors of an exchange: to give them back then would abort it."""

from __future__ import annotations

import threading
import time
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

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


class Exchanging(torch.autograd.Function):
    """Lends a tensor in its backward pass, and holds the context of that pass as an exchange begun there does."""

    held: ClassVar[list[Any]] = []

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, grad: Tensor) -> Tensor:
        lent_tensors.lend(grad)
        Exchanging.held.append(torch._C._get_obj_in_tls("context"))
        return grad


def test_it_waits_for_the_context_of_a_backward_pass() -> None:
    Exchanging.apply(torch.ones(2, requires_grad=True)).sum().backward()
    assert len(Exchanging.held) == 1
    threading.Timer(0.2, Exchanging.held.clear).start()
    lent_tensors.settle()
    assert not Exchanging.held


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
