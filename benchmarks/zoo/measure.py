"""One trained network at one size: times and errors compared with torch's layer, its memory, and its sweeps."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import timeloom as tl
from benchmarks.zoo.layers import OWN_CELLS, outputs, own_layer, torch_layer
from benchmarks.zoo.memory import remembered, sweeps, told
from benchmarks.zoo.networks import Model, Network
from benchmarks.zoo.tasks import TASKS

WARM_UP = 30
"""Calls before `auto`, which learns from them, is timed; others get SETTLED calls."""
SETTLED = 3
ROUNDS, BLOCK = 3, 8
"""Turns of each side, and consecutive calls in a turn, as in training, if they are quick."""
QUICK, SLOW = 0.2, 1.0
"""Seconds of a call up to which it counts as quick, and above which it is timed once, by the second call, since the
first one may compile kernels.
"""
CHUNK, TOLERANCE, STRETCH = 256, 1e-4, 16384
"""Chunk and tolerance for the sweeps by correction; and the most steps, of one sequence, for these and the memory."""
ONE_CHUNK = tl.solvers.Shooting(chunk=2**40, warmup=0)


@dataclass(frozen=True)
class Subject:
    """A layer's weights and an input to measure it on."""

    name: str
    layer: str
    units: int
    weights: dict[str, Tensor]
    x: Tensor
    """`(T, B, D)`"""
    resets: Tensor | None = None

    @classmethod
    def of(cls, network: Network, model: Model, steps: int, batch: int, device: torch.device) -> Subject:
        """A model of the zoo on an input it has not seen."""
        drawn = TASKS[network.task].draw(steps, batch, torch.Generator().manual_seed(1)).to(device)
        with torch.no_grad():
            x = model.features(drawn.x)
        return cls(network.name, network.layer, network.units, model.layer.state_dict(), x, drawn.resets)

    def torchs(self) -> nn.Module:
        return self._loaded(torch_layer(self.layer, self.x.shape[-1], self.units))

    def own(self, solver: Any = "auto") -> nn.Module:
        return self._loaded(own_layer(self.layer, self.x.shape[-1], self.units, solver))

    def _loaded(self, module: nn.Module) -> nn.Module:
        module.load_state_dict(self.weights)
        return module.to(self.x.device)


def measured(subject: Subject, brief: bool = False, torch_too: bool = True) -> dict[str, Any]:
    """Milliseconds of torch's layer, of one chunk and of `auto`, and their errors against float64.

    Also the network's memory, unless `brief`. Without torch's layer, which takes minutes on a CPU, there are no errors.
    """
    (steps, batch), device = subject.x.shape[:2], subject.x.device
    pull = torch.randn(steps, batch, subject.units, generator=torch.Generator().manual_seed(2)).to(device)
    contenders = {"torch": subject.torchs()} if torch_too else {}
    contenders |= {"one chunk": subject.own(ONE_CHUNK), "auto": subject.own()}
    row: dict[str, Any] = {"network": subject.name, "T": steps, "B": batch, "units": subject.units}
    truth: list[Tensor] | None = None
    if torch_too:
        truth = results(subject.torchs().double(), subject.x.double(), pull.double(), subject.resets)
    calls = {name: partial(results, each, subject.x, pull, subject.resets) for name, each in contenders.items()}
    in_turn = {}
    for name, call in calls.items():
        row[f"{name} first ms"], _ = clock(call)
        took, found = clock(call)
        again = WARM_UP if name == "auto" else SETTLED if took <= 1e3 * SLOW else 1
        for _ in range(again - 1):
            took, found = clock(call)
        if truth is not None:
            row[f"{name} error"] = error(found, truth)
        in_turn[name] = 0 if again == 1 else BLOCK if took <= 1e3 * QUICK else 1
        row[f"{name} ms"] = took
    rounds: dict[str, list[float]] = {name: [] for name in contenders if in_turn[name]}
    for _ in range(ROUNDS):  # in turns: each side in every round
        for name, times in rounds.items():
            times.append(clock(partial(in_a_row, calls[name], in_turn[name]))[0] / in_turn[name])
    row |= {f"{name} ms": statistics.median(times) for name, times in rounds.items()}
    if subject.layer not in OWN_CELLS and not brief:
        alone = subject.x[:STRETCH, :1]  # episodes run through
        row |= remembered(contenders["auto"], alone)
        row["sweeps"] = told(sweeps(contenders["auto"], alone, CHUNK, TOLERANCE))
    report = contenders["auto"].reports[0]  # type: ignore[index]
    row["forward"], row["backward"] = str(report).split("\n")[0], str(report.backward)
    return row


def results(module: nn.Module, x: Tensor, pull: Tensor, resets: Tensor | None = None) -> list[Tensor]:
    """Outputs, and the gradients of x and of every parameter."""
    x = x.detach().requires_grad_()
    y = outputs(module, x, resets)
    return [y.detach(), *torch.autograd.grad(y, [x, *module.parameters()], pull)]


def in_a_row(call: Callable[[], list[Tensor]], times: int) -> list[Tensor]:
    """Repeat a call; returns the result of the last one."""
    for _ in range(times - 1):
        call()
    return call()


def error(found: list[Tensor], truth: list[Tensor]) -> float:
    """The largest of relative norms."""
    return max(float((ours.double() - exact).norm() / exact.norm()) for ours, exact in zip(found, truth, strict=True))


def clock(call: Callable[[], list[Tensor]]) -> tuple[float, list[Tensor]]:
    """Milliseconds of a call, including the GPU's work, and its result."""
    wait()
    began = time.perf_counter()
    found = call()
    wait()
    return 1e3 * (time.perf_counter() - began), found


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
