"""CUDA's kernels that cannot be compiled or launched, by faults put in: no GPU is needed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from module_zoo import results
from torch import Tensor, nn

import timeloom as tl
from timeloom import kernels
from timeloom.auto.costs import register_cost
from timeloom.auto.layer_experience import LayerExperience
from timeloom.kernels import faults, layer_kinds
from timeloom.kernels.cuda import chain, nvrtc, programs
from timeloom.kernels.cuda import sweeper as cuda
from timeloom.kernels.cuda.driver import LaunchError
from timeloom.kernels.cuda.layer import CUDALayer
from timeloom.scan import gpu as gpu_scan
from timeloom.solve.inputs import Inputs
from timeloom.solve.trunk import LayerSolve
from timeloom.solvers import Shooting

pytestmark = pytest.mark.usefixtures("one_thread", "auto_takes_sweeps")
NAMES = ("GRU", "LSTM", "RNN")
SOLVERS = ["auto", Shooting(chunk=8), Shooting(chunk=8, warmup=0, correction="diag")]


class Calls:
    """A function that fails, and how often it was asked."""

    def __init__(self, error: Exception) -> None:
        self.error, self.count = error, 0

    def __call__(self, *_: Any, **__: Any) -> Any:
        self.count += 1
        raise self.error


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tensors on the CPU are taken for a GPU's, as far as the launch of a kernel."""
    monkeypatch.setattr(layer_kinds, "KINDS", (CUDALayer,))
    monkeypatch.setattr(kernels, "KINDS", (cuda.CUDASweeper, kernels.ReferenceSweeper))
    monkeypatch.setattr(CUDALayer, "supports", lambda *_: True)
    monkeypatch.setattr(CUDALayer, "recordable", lambda *_: False)  # which would ask for a real GPU
    monkeypatch.setattr(cuda, "fits", lambda *_: True)
    monkeypatch.setattr(cuda, "most_single", lambda *_: 1000)
    for file in (cuda, chain):
        monkeypatch.setattr(file, "on_device", lambda _: nullcontext())
    monkeypatch.setattr(chain, "has_clusters", lambda _: True)
    monkeypatch.setattr(programs, "architecture", lambda _: "sm_999")
    monkeypatch.setattr(programs, "shared_room", lambda _: 227 << 10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))
    yield
    register_cost.cache_clear()
    faults._broken.clear()


def refuse(monkeypatch: pytest.MonkeyPatch, where: str) -> Calls:
    """The compiler takes no source, or the driver no machine code."""
    if where == "compiler":
        failing = Calls(nvrtc.CompileError("NVRTC 13.0 did not compile with --gpu-architecture=sm_999:\nlong text"))
        monkeypatch.setattr(programs, "compile_source", failing)
    else:
        failing = Calls(LaunchError("CUDA's driver refused cuModuleLoadData: no kernel image is available (209)"))
        monkeypatch.setattr(programs, "compile_source", lambda *_: b"")
        monkeypatch.setattr(programs, "Function", failing)
    return failing


def told(run: Callable[[], list[Tensor]]) -> tuple[list[Tensor], list[str]]:
    """What a run returns, and what timeloom told meanwhile."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = run()
    return found, [str(entry.message) for entry in caught if "timeloom" in str(entry.message)]


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("solver", SOLVERS, ids=str)
@pytest.mark.parametrize("where", ["compiler", "driver"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("on_gpu")
def test_training_goes_on(monkeypatch: pytest.MonkeyPatch, name: str, where: str, solver: Any, ragged: bool) -> None:
    torch.manual_seed(0)
    ours = getattr(tl, name)(3, 5, 2, bidirectional=True, solver=solver)
    exact = getattr(nn, name)(3, 5, 2, bidirectional=True).double()
    exact.load_state_dict(ours.state_dict())
    x = torch.randn(60, 2, 3)
    given = {"lengths": torch.tensor([60, 60])} if ragged else {}
    failing = refuse(monkeypatch, where)
    first, said = told(lambda: results(ours, x, **given))
    assert len(said) == 1
    assert len(said[0].splitlines()) == 1
    assert f"the cuda {name.lower()}" in said[0]
    assert "n=5 float32 kernel cannot run" in said[0]
    again, more = told(lambda: results(ours, x, **given))
    assert (failing.count, more) == (1, [])  # what is broken is not tried again
    for found in (first, again):
        for value, right in zip(found, results(exact, x.double()), strict=True):
            torch.testing.assert_close(value.double(), right, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("on_gpu")
def test_other_widths_run_on(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = refuse(monkeypatch, "driver")
    for width in (4, 6):
        _, said = told(lambda width=width: results(tl.GRU(3, width, solver=Shooting(chunk=8)), torch.randn(60, 2, 3)))
        assert len(said) == 1
    assert failing.count == 2


@pytest.mark.usefixtures("on_gpu")
def test_a_driver_without_memory_is_torchs_error(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = refuse(monkeypatch, "driver")
    failing.error = LaunchError("CUDA's driver refused cuModuleLoadData: out of memory (2)")
    module = tl.GRU(3, 4, solver=Shooting(chunk=8))
    for count in (1, 2):  # it is tried again: memory comes back
        with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
            module(torch.randn(60, 2, 3))
        assert failing.count == count
    assert not faults._broken


@pytest.mark.usefixtures("on_gpu")
def test_half_precision_goes_on_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, "compiler")
    torch.manual_seed(0)
    ours, exact = tl.GRU(3, 5).half(), nn.GRU(3, 5)
    exact.load_state_dict(ours.state_dict())
    exact = exact.double()
    solve = LayerSolve(ours._bare, ours._cell, Shooting(chunk=7, warmup=30), LayerExperience())
    x, incoming = torch.randn(40, 2, 3).half().requires_grad_(), torch.randn(40, 2, 5).half()

    def run() -> list[Tensor]:
        y, _ = solve.run(Inputs(x, torch.zeros(2, 5), *ours._weights_of(0)), lambda _: None)
        y.backward(incoming)
        return [y, x.grad, *(weight.grad for weight in ours.parameters())]  # type: ignore[list-item]

    found, said = told(run)
    assert {text.split(" kernel cannot run")[0] for text in said} <= {
        f"timeloom: the cuda gru n=5 {dtype}" for dtype in ("float16", "float32")
    }
    twin = x.detach().double().requires_grad_()
    y, _ = exact(twin)
    y.backward(incoming.double())
    right = [y, twin.grad, *(weight.grad for weight in exact.parameters())]
    for value, truth in zip(found, right, strict=True):
        assert value.dtype == torch.float16
        torch.testing.assert_close(value.double(), truth, rtol=0.0, atol=1e-3 * float(truth.detach().abs().max()))


def test_scans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_scan, "supports", lambda *_: True)
    for name in ("scan", "diagonal_adjoint"):
        monkeypatch.setattr(gpu_scan, name, Calls(RuntimeError("no binary for this GPU")))
    a, b = (torch.rand(50, 2, 3).requires_grad_() for _ in range(2))
    (_, said) = told(lambda: [tl.linear_scan(a, b).sum().backward()])  # type: ignore[list-item]
    faults._broken.clear()
    assert len(said) == 1
    assert "the triton diagonal scan kernel cannot run" in said[0]
    found = [a.grad.clone(), b.grad.clone()]  # type: ignore[union-attr]
    a.grad = b.grad = None
    tl.linear_scan(a, b, method="reference").sum().backward()
    torch.testing.assert_close(found, [a.grad, b.grad])


def test_a_missing_compiler_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "unavailable", lambda: "no NVRTC library found")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for remembered in (cuda._usable, cuda._compiler_is_there):
        remembered.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match=r"timeloom: no CUDA kernels \(no NVRTC library found\)") as caught:
            assert not any(cuda.fits("gru", units, torch.device("cuda", 0)) for units in (8, 16))
        assert len(caught) == 1
    finally:
        for remembered in (cuda._usable, cuda._compiler_is_there):
            remembered.cache_clear()
