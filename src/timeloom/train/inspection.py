"""How every solver does on a trained model and one batch: sweeps, residuals, time, and what `auto` makes of it."""

from __future__ import annotations

import math
import statistics
import time
from copy import deepcopy
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from timeloom.nn import parallelize, sequentialize
from timeloom.report import SolveReport
from timeloom.solvers import MGRIT, Auto, Sequential, Shooting, Solver
from timeloom.solvers.base import Correction
from timeloom.solvers.planning import names, resolve
from timeloom.train.comparison import synchronize
from timeloom.train.model import SequenceModel
from timeloom.train.trainer import reports_of
from timeloom.words import of_reports

REPEATS = 3
PATIENCE = 3.0
"""Seconds after which a slow solver is not run again."""
FEWEST_CHUNKS = 16
"""Chunks to look at where `auto` would take less: with few, every solver is exact after as few sweeps."""


@dataclass(frozen=True)
class Trial:
    """One solver on the batch."""

    name: str
    reports: list[tuple[str, SolveReport]]
    """Of each layer and direction, in the last of several passes."""
    seconds: float
    """Median of a forward and backward pass."""
    difference: float
    """Largest difference of answers and gradients from those of torch's layers, relative to the largest."""

    def sweeps(self) -> tuple[int, int]:
        """Most sweeps of a layer, forward and backward."""
        backward = [report.backward.iterations for _, report in self.reports if report.backward is not None]
        return max(report.iterations for _, report in self.reports), max(backward, default=0)

    @property
    def fell_back(self) -> bool:
        return any(r.fell_back or (r.backward is not None and r.backward.fell_back) for _, r in self.reports)


@dataclass(frozen=True)
class Inspection:
    """What was found."""

    steps: int
    batch: int
    chunk: int
    """Steps in a chunk of the trials that fix it."""
    trials: list[Trial]
    """torch's own layers first, `auto` second."""
    memory: list[tuple[str, int | None]]
    """Of each layer and direction, the steps after which it has forgotten where it started; None where not known."""

    def words(self) -> list[str]:
        """What `auto` does and why, and what the others would take."""
        torchs, auto, *others = self.trials
        told = [f"auto, {where}: {text}" for where, text in of_reports(auto.reports, self.steps)]
        told += [
            f"{where} forgets: after about {steps:,} of {self.steps:,} steps a state no longer depends on where it "
            f"started, to within the tolerance. The shorter this is beside a chunk, the less a warm-up costs."
            for where, steps in self.memory
            if steps is not None
        ]
        slow = [trial.name for trial in others if trial.fell_back]
        if slow:
            told.append(f"Did not converge in time and finished sequentially: {', '.join(slow)}.")
        fastest = min(self.trials, key=lambda trial: trial.seconds)
        told.append(
            f"Fastest on this batch: {fastest.name}, {1e3 * fastest.seconds:.1f} ms a forward and backward pass; "
            f"torch's own layers take {1e3 * torchs.seconds:.1f} ms, auto {1e3 * auto.seconds:.1f} ms."
        )
        return told


def inspect_model(model: SequenceModel, inputs: Tensor, lengths: Tensor | None, every: bool = False) -> Inspection:
    """Try solvers on one batch `(T, B, D)`, on copies of the model.

    every: also the published methods over single steps (DEER, ELK, …), which take minutes on long series.
    """
    steps = len(inputs)
    truth = _pass(sequentialize(deepcopy(model)), inputs, lengths)
    copied = parallelize(deepcopy(model), Auto())
    auto = _trial(copied, "auto", inputs, lengths, truth)
    memory = _memory(copied)
    reason = SolveReport.sequential(steps, "torch's own layer")
    torchs = _trial(sequentialize(deepcopy(model)), "torch", inputs, lengths, truth)
    torchs = replace(torchs, reports=[(where, reason) for where, _ in auto.reports])
    chunk = min(auto.reports[0][1].chunk, max(1, math.ceil(steps / FEWEST_CHUNKS)))
    others = [
        _trial(parallelize(deepcopy(model), solver), name, inputs, lengths, truth)
        for name, solver in _others(chunk, every)
    ]
    return Inspection(steps, inputs.shape[1], chunk, [torchs, auto, *others], memory)


def _others(chunk: int, every: bool) -> list[tuple[str, Solver]]:
    """Shooting with each correction from plain guesses, and further solvers with their own defaults."""
    corrections: tuple[Correction, ...] = ("none", "diag", "newton")
    shooting = [(f"shooting {c}", Shooting(chunk=chunk, correction=c, warmup=0)) for c in corrections]
    known = (Sequential, Auto, Shooting)
    more = [kind for kind in map(type, map(resolve, names())) if kind not in known and (every or kind is MGRIT)]
    return [*shooting, *((kind.__name__, kind()) for kind in more)]


def _trial(model: SequenceModel, name: str, inputs: Tensor, lengths: Tensor | None, truth: list[Tensor]) -> Trial:
    seconds, found = list[float](), truth
    for _ in range(1 + REPEATS):
        begin = time.perf_counter()
        found = _pass(model, inputs, lengths)
        synchronize(inputs.device)
        seconds.append(time.perf_counter() - begin)
        if sum(seconds) > PATIENCE:
            break
    seconds = seconds[1:] or seconds  # what is learned or built on first use is off the clock
    difference = max(_apart(one, other) for one, other in zip(found, truth, strict=True))
    return Trial(name, reports_of(model), statistics.median(seconds), difference)


def _pass(model: SequenceModel, inputs: Tensor, lengths: Tensor | None) -> list[Tensor]:
    """Answers and the gradients of their mean square."""
    model.zero_grad()
    answers: Tensor = model(inputs, lengths)
    answers.square().mean().backward()
    return [answers.detach(), *[p.grad.clone() for p in model.parameters() if p.grad is not None]]


def _apart(one: Tensor, other: Tensor) -> float:
    return ((one - other).abs().max() / other.abs().max().clamp_min(torch.finfo(other.dtype).tiny)).item()


def _memory(model: SequenceModel) -> list[tuple[str, int | None]]:
    """What `auto` has learned about how long each layer remembers."""
    memories = [layer._memories.get(i) for layer in model.recurrent_layers() for i in range(len(layer.reports))]
    found: list[tuple[str, int | None]] = []
    for (where, report), memory in zip(reports_of(model), memories, strict=True):
        known = memory is not None and memory.forward.forgetting is not None
        found.append((where, memory.forward.warmup(report.tolerance) if known and memory is not None else None))
    return found
