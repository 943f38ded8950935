"""One trained network at one size: times and errors beside torch's layer, its memory, and the sweeps that it needs."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor, nn

import timeloom as tl
from benchmarks.zoo.layers import outputs, own_layer, torch_layer
from benchmarks.zoo.networks import Model, Network
from benchmarks.zoo.tasks import TASKS
from timeloom.solve.plan import Correction

WARM_UP = 6
"""Calls before anything is timed: `auto` learns from the first ones."""
ROUNDS = 5
SLOW = 1.0
"""Seconds of a call beyond which it is not repeated before it is timed, and timed once."""
FORGOTTEN = 1e-6
"""Part of a difference between two starts that counts as nothing."""
VISIBLE = 1e-12
"""Part of it down to which float64 shows how fast it fades."""
CHUNK, MOST_SWEEPS, STRETCH = 256, 64, 8192
"""Of the count of sweeps by correction: steps in a chunk, sweeps at most, steps at most."""
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


def measured(subject: Subject) -> dict[str, Any]:
    """Milliseconds of torch's layer, of one chunk and of `auto`, and their errors against float64."""
    (steps, batch), device = subject.x.shape[:2], subject.x.device
    pull = torch.randn(steps, batch, subject.units, generator=torch.Generator().manual_seed(2)).to(device)
    contenders = {"torch": subject.torchs(), "one chunk": subject.own(ONE_CHUNK), "auto": subject.own()}
    exact = subject.torchs().double()
    truth = results(exact, subject.x.double(), pull.double(), subject.resets)
    row: dict[str, Any] = {"network": subject.name, "T": steps, "B": batch, "units": subject.units}
    row |= memory(exact, subject.x.double())
    calls = {name: partial(results, each, subject.x, pull, subject.resets) for name, each in contenders.items()}
    for name, call in calls.items():
        first, found = clock(call)
        for _ in range(0 if first > 1e3 * SLOW else WARM_UP - 1):
            found = call()
        row[f"{name} first ms"], row[f"{name} error"] = first, error(found, truth)
    rounds: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(ROUNDS):  # side by side: one after the other in every round
        for name, call in calls.items():
            if turn == 0 or row[f"{name} first ms"] <= 1e3 * SLOW:
                rounds[name].append(clock(call)[0])
    row |= {f"{name} ms": statistics.median(times) for name, times in rounds.items()}
    report = contenders["auto"].reports[0]  # type: ignore[index]
    row["forward"], row["backward"] = str(report).split("\n")[0], str(report.backward)
    return row


def results(module: nn.Module, x: Tensor, pull: Tensor, resets: Tensor | None = None) -> list[Tensor]:
    """Outputs, and the gradients of x and of every parameter."""
    x = x.detach().requires_grad_()
    y = outputs(module, x, resets)
    return [y.detach(), *torch.autograd.grad(y, [x, *module.parameters()], pull)]


def error(found: list[Tensor], truth: list[Tensor]) -> float:
    """The largest of relative norms."""
    return max(float((ours.double() - exact).norm() / exact.norm()) for ours, exact in zip(found, truth, strict=True))


def memory(layer: nn.Module, x: Tensor) -> dict[str, Any]:
    """Steps after which it does not matter where the first sequence began, and the exponent with which a difference
    fades, a step, as float64 shows it; episodes run through here. Nothing of cells that torch has no layer of.
    """
    if not isinstance(layer, nn.RNNBase):
        return {}
    x = x[:STRETCH, :1]
    with torch.no_grad():
        one, last = layer(x)
        other, _ = layer(x, last)
    apart = (one - other).abs().amax((1, 2))
    part = (apart / apart.max().clamp_min(1e-300)).tolist()
    lasting = 1 + max((step for step, left in enumerate(part) if left > FORGOTTEN), default=0)
    seen = 1 + max((step for step, left in enumerate(part) if left > VISIBLE), default=0)
    half = seen // 2
    fades = (math.log(part[seen - 1]) - math.log(part[half])) / (seen - 1 - half) if seen > half + 1 else -math.inf
    return {"memory": lasting if lasting < len(x) else None, "exponent": fades}


def sweeps_by_correction(subject: Subject) -> dict[str, int | None]:
    """Sweeps of chunks of CHUNK steps, from zeros, until the jumps are below the tolerance, the first STRETCH steps of
    one sequence, forward; None where it is more than MOST_SWEEPS.
    """
    counts: dict[str, int | None] = {}
    for correction in (each for each in get_args(Correction) if each != "auto"):
        options = {"correction": correction, "max_iters": MOST_SWEEPS, "on_divergence": "ignore"}
        layer = subject.own(tl.solvers.Shooting(chunk=CHUNK, warmup=0, **options))
        resets = None if subject.resets is None else subject.resets[:STRETCH, :1]
        with torch.no_grad():
            outputs(layer, subject.x[:STRETCH, :1], resets)
        report: tl.SolveReport = layer.reports[0]  # type: ignore[index, assignment]
        counts[correction] = report.iterations if report.converged else None
    return counts


def clock(call: Callable[[], list[Tensor]]) -> tuple[float, list[Tensor]]:
    """Milliseconds of a call, the GPU's work included, and what it found."""
    wait()
    began = time.perf_counter()
    found = call()
    wait()
    return 1e3 * (time.perf_counter() - began), found


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
