"""Launches of Triton's kernels: which ones Triton is to look at, and what the others pass. No GPU is needed.

That Triton's own look would find the same compiled kernels is in test_kernels_compile.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")  # as other tests of this process want it

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton.knobs")

from triton import knobs

from timeloom.kernels import launch as launches
from timeloom.kernels.launch import launch

GRID = (3, 1, 1)
X = torch.zeros(65)
Tensors = tuple[Tensor | None, ...]


class Kernel:
    """Writes down how it was launched."""

    arg_names = ("x", "y", "rows", "scale", "KEEP", "ROWS")

    def __init__(self, compiles: Any = None) -> None:
        self.compiles = compiles or Compiled
        self.pre_run_hooks: list[Any] = []
        self.calls: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*given: Any, num_warps: int = 4, **named: Any) -> Any:
            in_order = (*given, *(named[name] for name in self.arg_names[len(given) :]))
            self.calls.append(("plain", grid, *in_order, num_warps))
            return self.compiles(self, num_warps)

        return run

    def ways(self) -> list[str]:
        return [call[0] for call in self.calls]


class Compiled:
    def __init__(self, kernel: Kernel, num_warps: int) -> None:
        self.kernel, self.num_warps = kernel, num_warps

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *given: self.kernel.calls.append(("prepared", grid, *given, self.num_warps))


class Future:
    """What Triton's asynchronous mode returns: it looks like what is not compiled yet, but is not."""

    def __init__(self, *given: Any) -> None:
        self.compiled = Compiled(*given)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.compiled, name)


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(launches, "_known", {})
    monkeypatch.setattr(torch.version, "hip", None)
    launches._knobs.cache_clear()
    yield
    launches._knobs.cache_clear()


def go(kernel: Kernel, tensors: Tensors = (X, X), numbers: tuple[float, ...] = (5, 0.5), **changed: Any) -> Any:
    return launch(kernel, GRID, tensors, numbers, **{"ROWS": 16, "KEEP": True, "num_warps": 1, **changed})


def test_a_second_launch_passes_the_same_arguments_in_order() -> None:
    kernel = Kernel()
    go(kernel)
    again = launch(kernel, (7, 2, 1), (X[16:], X[32:]), (6, 0.25), ROWS=16, KEEP=True, num_warps=1)
    again(X, X, 9, 0.125)
    assert kernel.ways() == ["plain", "prepared", "prepared"]
    (_, *first), (_, *second), (_, *third) = kernel.calls
    assert first == [GRID, X, X, 5, 0.5, True, 16, 1]
    assert second[0] == (7, 2, 1)
    assert [given.data_ptr() for given in second[1:3]] == [X[16:].data_ptr(), X[32:].data_ptr()]
    assert second[3:] == [6, 0.25, True, 16, 1]
    assert third == [(7, 2, 1), X, X, 9, 0.125, True, 16, 1]


def test_what_the_first_launch_returns_launches_without_a_look() -> None:
    kernel = Kernel()
    go(kernel)(X, X, 6, 0.25)
    assert kernel.ways() == ["plain", "prepared"]


OTHERS: list[dict[str, Any]] = [
    {"tensors": (X.double(), X)},
    {"tensors": (X[1:], X)},
    {"tensors": (X, X[2:])},
    {"tensors": (X, None)},
    {"tensors": (torch.zeros(4, device="meta"), X)},
    {"numbers": (1, 0.5)},
    {"numbers": (32, 0.5)},
    {"numbers": (2**31, 0.5)},
    {"numbers": (-(2**31) - 1, 0.5)},
    {"numbers": (True, 0.5)},
    {"numbers": (5, 3)},
    {"ROWS": 32},
    {"KEEP": False},
    {"num_warps": 2},
]


@pytest.mark.parametrize("other", OTHERS)
def test_other_kinds_of_arguments_are_looked_at(other: dict[str, Any]) -> None:
    kernel = Kernel()
    go(kernel)
    go(kernel, **other)
    go(kernel, **other)
    go(kernel)
    assert kernel.ways() == ["plain", "plain", "prepared", "prepared"]
    assert kernel.calls[1][1:] == kernel.calls[2][1:]


def test_kernels_do_not_mix() -> None:
    first, second = Kernel(), Kernel()
    for kernel in (first, second, first, second):
        go(kernel)
    assert first.ways() == second.ways() == ["plain", "prepared"]


@pytest.mark.parametrize("compiles", [lambda *_: None, Future])
def test_nothing_is_remembered_of_a_kernel_that_is_interpreted_or_not_ready(compiles: Any) -> None:
    kernel = Kernel(compiles)
    again = go(kernel)
    go(kernel)
    again(X, X, 6, 0.25)
    assert kernel.ways() == ["plain"] * 3
    assert kernel.calls[2] == ("plain", GRID, X, X, 6, 0.25, True, 16, 1)
    assert not launches._known


def test_a_launch_that_fails_is_not_remembered() -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("out of resources")

    kernel = Kernel(fail)
    with pytest.raises(RuntimeError, match="out of resources"):
        go(kernel)
    assert not launches._known
    kernel.compiles = Compiled
    go(kernel)
    go(kernel)
    assert kernel.ways() == ["plain", "plain", "prepared"]


@pytest.mark.parametrize(
    ("holder", "name", "value"),
    [
        (knobs.runtime, "debug", True),
        (knobs.compilation, "instrumentation_mode", "consan"),
        (knobs.runtime, "add_stages_inspection_hook", lambda *_: ("", "")),
    ],
)
def test_triton_looks_itself_while_its_settings_are_unusual(
    holder: Any, name: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, early = Kernel(), Kernel()
    go(kernel)
    with monkeypatch.context() as changed:
        changed.setattr(holder, name, value, raising=False)
        go(kernel)
        go(early)
    for late in (kernel, early):
        go(late)
    assert kernel.ways() == ["plain", "plain", "prepared"]
    assert early.ways() == ["plain", "plain"]  # what was compiled under other settings is not taken


def test_triton_looks_itself_while_somebody_watches_a_kernel() -> None:
    kernel = Kernel()
    go(kernel)
    kernel.pre_run_hooks.append(print)
    go(kernel)
    assert kernel.ways() == ["plain", "plain"]


def test_on_amd_gpus_triton_looks_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    kernel = Kernel()
    go(kernel)
    go(kernel)
    assert kernel.ways() == ["plain", "plain"]


def test_only_so_many_kernels_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "MOST_KNOWN", 3)
    kernel = Kernel()
    for rows in (1, 2, 4, 8, 16):
        go(kernel, ROWS=rows)
        assert len(launches._known) <= 3
    go(kernel, ROWS=16)
    assert kernel.ways() == ["plain"] * 5 + ["prepared"]
