"""Kernels that cannot be launched, by faults put in: told once, and the call is finished another way."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import pytest
import torch
from module_zoo import results
from torch import nn

import timeloom as tl
from timeloom.kernels import faults, replay
from timeloom.kernels.cpu import build
from timeloom.solvers import Shooting

pytestmark = [
    pytest.mark.usefixtures("one_thread", "auto_takes_sweeps"),
    pytest.mark.skipif(build.unavailable() is not None, reason=f"no C kernels: {build.unavailable()}"),
]
NAMES = ("GRU", "LSTM", "RNN")


class Faulty:
    """The compiled library without some kernels."""

    def __init__(self, missing: str, error: Exception) -> None:
        self._library, self._missing, self._error, self.asked = build.library(), missing, error, 0

    def __getattr__(self, name: str) -> Any:
        if self._missing in name:
            self.asked += 1
            raise self._error
        return getattr(self._library, name)


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    faults._broken.clear()


def put_in(monkeypatch: pytest.MonkeyPatch, missing: str, error: Exception | None = None) -> Faulty:
    library = Faulty(missing, error or AttributeError(f"undefined symbol: {missing}\nand more"))
    monkeypatch.setattr(build, "library", lambda: library)
    return library


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("solver", ["auto", Shooting(chunk=8), Shooting(chunk=8, warmup=0, correction="diag")])
@pytest.mark.parametrize("direction", ["forward", "adjoint"])
@pytest.mark.parametrize("name", NAMES)
def test_training_goes_on(
    monkeypatch: pytest.MonkeyPatch, name: str, direction: str, solver: Any, ragged: bool
) -> None:
    torch.manual_seed(0)
    ours = getattr(tl, name)(3, 5, 2, bidirectional=True, solver=solver)
    exact = getattr(nn, name)(3, 5, 2, bidirectional=True).double()
    exact.load_state_dict(ours.state_dict())
    x = torch.randn(100, 2, 3)
    given = {"lengths": torch.tensor([100, 100])} if ragged else {}
    library = put_in(monkeypatch, f"_{direction}")
    with pytest.warns(RuntimeWarning, match=f"timeloom: the cpu {name.lower()} kernel cannot run") as told:
        first = results(ours, x, **given)
    assert len(told) == 1
    assert len(str(told[0].message).splitlines()) == 1
    asked = library.asked
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = results(ours, x, **given)
    assert (asked, library.asked) == (1, 1)  # what is broken is not tried again
    for found in (first, again):
        for value, right in zip(found, results(exact, x.double()), strict=True):
            torch.testing.assert_close(value.double(), right, rtol=1e-5, atol=1e-5)


def test_other_kernels_run_on(monkeypatch: pytest.MonkeyPatch) -> None:
    library = put_in(monkeypatch, "gru_forward")
    with pytest.warns(RuntimeWarning, match="the cpu gru kernel"):
        results(tl.GRU(3, 4), torch.randn(60, 2, 3))
    assert faults.broken("cpu lstm") is None
    results(tl.LSTM(3, 4), torch.randn(60, 2, 3))
    assert library.asked == 1


@pytest.mark.parametrize(
    "error", [MemoryError("no memory"), torch.OutOfMemoryError("CUDA out of memory"), KeyboardInterrupt()]
)
def test_a_lack_of_memory_is_not_the_kernels_fault(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    put_in(monkeypatch, "gru_forward", error)
    with pytest.raises(type(error)):
        tl.GRU(3, 4)(torch.randn(60, 2, 3))
    assert faults.broken("cpu gru") is None


def test_a_lost_device_is_told_by_its_own_error() -> None:
    def launch() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        faults.guarded("cuda gru", launch)
    assert faults.broken("cuda gru") is None


def test_a_fault_is_told_once_and_remembered() -> None:
    calls: list[int] = []

    def launch() -> None:
        calls.append(1)
        raise ValueError("'arith.andi' op requires the same encoding\nlong text")

    with (
        pytest.warns(
            RuntimeWarning, match=r"timeloom: the cuda gru kernel cannot run \(ValueError: 'arith.andi'"
        ) as told,
        pytest.raises(faults.KernelFault),
    ):
        faults.guarded("cuda gru", launch)
    with pytest.raises(faults.KernelFault, match="same encoding"):
        faults.guarded("cuda gru", launch)
    assert (len(calls), len(told)) == (1, 1)
    assert faults.guarded("cuda lstm", lambda: 3) == 3


def test_copies_know_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    put_in(monkeypatch, "gru_forward")
    module = tl.GRU(3, 4, solver=Shooting(chunk=8))
    with pytest.warns(RuntimeWarning):
        module(torch.randn(60, 2, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        deepcopy(module)(torch.randn(60, 2, 3))


@pytest.mark.parametrize("error", [RuntimeError("not allowed in a capture"), torch.OutOfMemoryError("out of memory")])
def test_calls_that_cannot_be_recorded_are_launched(monkeypatch: pytest.MonkeyPatch, error: RuntimeError) -> None:
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(replay, "record", fails)
    told = nullcontext() if "memory" in str(error) else pytest.warns(RuntimeWarning, match="not allowed in a capture")
    with told:
        assert replay._recorded([torch.ones(1)], 4, lambda given: given) is None
