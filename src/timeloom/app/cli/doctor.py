"""`timeloom doctor`: what this machine has, what of timeloom runs on it, and a short self-test with a speedup."""

from __future__ import annotations

import importlib.metadata
import platform
import statistics
import time
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass

import torch
import tyro
from rich.table import Table
from torch import Tensor, nn

import timeloom
from timeloom.app.cli.display import CONSOLE
from timeloom.app.machine import LoadMeter, counted
from timeloom.app.train.comparison import synchronize
from timeloom.app.train.config import at_least
from timeloom.kernels.cpu import build, packaged
from timeloom.kernels.cuda import nvrtc
from timeloom.kernels.cuda.sweeper import usable
from timeloom.kernels.launch import has_triton
from timeloom.nn import parallelize
from timeloom.nn.base import Recurrent
from timeloom.report import describe

LIBRARIES = ("numpy", "triton", "rich", "safetensors", "tyro", "pyarrow", "tensorboard", "aeon", "matplotlib")
STEPS, UNITS, BATCH = 4096, 32, 1
SECONDS = 4.0
"""Of measuring on a device; with its set-up the whole test takes less than ten."""
LARGEST_ERROR = {"cpu": 1e-4, "cuda": 5e-3}
"""Relative difference from torch's layer in float32 that rounding explains; cuDNN rounds products to tf32."""


@dataclass(frozen=True)
class Options:
    """Options of `timeloom doctor`."""

    steps: int = STEPS
    """Steps of the sequence of the self-test."""


@dataclass(frozen=True)
class SelfTest:
    """torch's GRU and timeloom's on the same weights and input."""

    device: str
    torch_seconds: float
    timeloom_seconds: float
    error: float
    """Largest relative difference of outputs and all gradients."""
    what: str
    """What the solver did, in words."""

    @property
    def passed(self) -> bool:
        return self.error <= LARGEST_ERROR[self.device]


def main(arguments: Sequence[str]) -> int:
    options = tyro.cli(
        Options,
        args=list(arguments),
        prog="timeloom doctor",
        description="Checks this machine, with a short self-test.",
    )
    at_least("steps", options.steps, 1)
    shown = Table("", "", show_header=False)
    for name, value in facts():
        shown.add_row(name, value)
    CONSOLE.print(shown)
    passed, meter = True, LoadMeter()
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        test = self_test(device, options.steps)
        passed &= test.passed
        CONSOLE.print(
            f"{device}: a GRU of {UNITS} units over {options.steps:,} steps, forward and backward: torch "
            f"{1e3 * test.torch_seconds:.1f} ms, timeloom {1e3 * test.timeloom_seconds:.1f} ms, "
            f"{test.torch_seconds / test.timeloom_seconds:.1f}x faster; outputs and gradients differ by at most "
            f"{test.error:.1e} ({'as rounding explains' if test.passed else 'TOO MUCH'})\n{device}: {test.what}",
            markup=False,
        )
    CONSOLE.print(f"Meanwhile: {meter.read().words()}", markup=False)
    CONSOLE.print("All is well." if passed else "The results differ: please report this, with what is printed above.")
    return 0 if passed else 1


def facts() -> list[tuple[str, str]]:
    """Versions, devices and kernels."""
    rows = [
        ("timeloom", timeloom.__version__),
        ("python", platform.python_version()),
        ("torch", str(torch.__version__)),
    ]
    rows += [(name, _version(name)) for name in LIBRARIES]
    kind, threads = torch.backends.cpu.get_cpu_capability(), counted(torch.get_num_threads(), "thread")
    rows.append(("CPU", f"{platform.machine()}, {threads}, {kind}"))
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        rows.append((f"GPU {index}", f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"))
    reason = build.unavailable()
    source = "of the wheel" if packaged.library() is not None else "built here"
    rows.append(
        ("CPU kernels", f"usable, {source}" if reason is None else f"not usable, sweeps run in torch: {reason}")
    )
    rows.append(("GPU kernels", _gpu_kernels()))
    return rows


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _gpu_kernels() -> str:
    if not torch.cuda.is_available():
        return "no GPU that torch can use"
    if usable(torch.device("cuda", torch.cuda.current_device())):
        return "usable, for cells of your own too" + (
            "" if has_triton() else "; scans need Triton: pip install 'timeloom[triton]'"
        )
    reason = nvrtc.unavailable() or "they are for NVIDIA's GPUs from the A100's generation on"
    return f"not usable, torch's own layers run, and cells of your own as they are written: {reason}"


def self_test(device: str, steps: int) -> SelfTest:
    """Time both in turn, and compare what they return."""
    torch.manual_seed(0)
    layer = nn.GRU(UNITS, UNITS, device=device)
    ours = parallelize(deepcopy(layer))
    assert isinstance(ours, Recurrent)
    x = torch.randn(steps, BATCH, UNITS, device=device)
    for each in (layer, ours, ours):  # libraries load, kernels are built, auto learns
        _pass(each, x)
    seconds: dict[nn.Module, list[float]] = {layer: [], ours: []}
    results: dict[nn.Module, list[Tensor]] = {}
    begin = time.perf_counter()
    while len(seconds[ours]) < 3 or time.perf_counter() - begin < SECONDS:
        for each in (layer, ours):
            started = time.perf_counter()
            results[each] = _pass(each, x)
            seconds[each].append(time.perf_counter() - started)
        if len(seconds[ours]) == 200:
            break
    pairs = zip(results[ours], results[layer], strict=True)
    error = max(((one - other).abs().max() / other.abs().max()).item() for one, other in pairs)
    theirs, own = statistics.median(seconds[layer]), statistics.median(seconds[ours])
    return SelfTest(device, theirs, own, error, describe(ours.reports[0], steps))


def _pass(layer: nn.Module, x: Tensor) -> list[Tensor]:
    """Outputs and the gradients of the input and of every parameter."""
    layer.zero_grad()
    x = x.detach().requires_grad_()
    y = layer(x)[0]
    y.square().mean().backward()
    synchronize(x.device)
    return [y.detach(), *[p.grad for p in (x, *layer.parameters()) if p.grad is not None]]
