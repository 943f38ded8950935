"""`inspect`: how solvers do on a model and an input, side by side, and what `auto` chooses."""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from timeloom.inspection.memory import memories
from timeloom.inspection.outcome import Inspection, Trial
from timeloom.nn import parallelize, sequentialize
from timeloom.nn.base import Recurrent
from timeloom.nn.swap import holds_recurrent_layers
from timeloom.nn.torch_layer import size
from timeloom.options import check_number
from timeloom.report import SolveReport
from timeloom.solve.plan import Correction
from timeloom.solvers import MGRIT, Auto, Shooting, Solver
from timeloom.solvers.base import names, resolve
from timeloom.solvers.stepwise import Stepwise

REPEATS = 3
PATIENCE = 3.0
"""Seconds after which a slow solver is not run again."""
SHORTEST, GROWTH, LONGEST = 128, 4, 8192
"""Steps that a method over single steps begins with, the factor by which they grow in the time given, and the most."""
FEWEST_CHUNKS = 16
"""Fewest chunks to try, even if `auto` would take fewer: with few, every solver is exact after as few sweeps."""


def inspect(
    model: nn.Module,
    *inputs: Any,
    solvers: Mapping[str, str | Solver] | None = None,
    every: bool = False,
    seconds: float | None = None,
    **named: Any,
) -> Inspection:
    """Run a model's forward and backward pass with each of several solvers, on copies: the model is left as it is.

    model: one of timeloom's or torch's recurrent layers, or any model that holds some.
    inputs, named: its arguments. The loss is the mean square of its output (the first one, where there are several).
    solvers: those to try beside torch's layers and `auto`, by the name to show; by default shooting with each
        correction, from plain guesses, and multigrid.
    every: try the methods over single steps (DEER, ELK, …) and multigrid's other settings too. On long sequences these
        take minutes: give a short stretch of the input, or `seconds`.
    seconds: try the methods over single steps, each on the first steps of the first sequence, as many as it can do in
        about that time. The first input must then be a padded tensor `(T, B, D)`, or `(B, T, D)` if the layers are
        batch_first; the others are left out.
    """
    check_number("seconds", seconds)
    if not holds_recurrent_layers(model):
        raise TypeError(f"{type(model).__name__} holds no GRU, LSTM or RNN layer to inspect")

    def run(copied: nn.Module) -> Tensor:
        return _first(copied(*inputs, **named))

    serial = sequentialize(_copied(model))
    truth = _pass(serial, run)
    own = parallelize(_copied(model), Auto())
    steps, batch = _size(own, run)
    auto = _trial(own, "auto", run, truth)
    theirs = _trial(serial, "torch", run, truth)
    by_torch = SolveReport.sequential(steps, "torch's own layer")
    torchs = Trial("torch", [(where, by_torch) for where, _ in auto.reports], theirs.seconds, theirs.difference)
    chunk = min(auto.reports[0][1].chunk, max(1, math.ceil(steps / FEWEST_CHUNKS)))
    tried = usual(model, chunk, every) if solvers is None else solvers
    others = [_trial(parallelize(_copied(model), solver), name, run, truth) for name, solver in tried.items()]
    if seconds is not None:
        series, time = _first_series(own, inputs)
        slow = over_single_steps().items()
        others = [trial for trial in others if trial.name not in dict(slow)]
        others += [_on_a_stretch(model, series, time, name, solver, seconds) for name, solver in slow]
    places = [where for where, _ in auto.reports]
    remembered = memories(_layers(own), lambda: run(own), [report.tolerance for _, report in auto.reports])
    return Inspection(steps, batch, chunk, [torchs, auto, *others], list(zip(places, remembered, strict=True)))


def _first_series(model: nn.Module, inputs: tuple[Any, ...]) -> tuple[Tensor, int]:
    """The first sequence of the first input, as a batch of one, and its dimension of time."""
    x = inputs[0] if inputs else None
    if not isinstance(x, Tensor) or x.dim() != 3:
        given = f"{x.dim()} dimensions" if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"seconds= cuts the first input, which must be a padded tensor of 3 dimensions; got {given}")
    time = 1 if _layers(model)[0].batch_first else 0
    return x.narrow(1 - time, 0, 1), time


def _on_a_stretch(
    model: nn.Module, series: Tensor, time: int, name: str, solver: str | Solver, seconds: float
) -> Trial:
    """One solver on as many steps as it can do in `seconds`, compared with a single untimed pass of torch's layers."""
    whole = series.shape[time]
    steps = min(SHORTEST, whole)
    while True:
        stretch = series.narrow(time, 0, steps)

        def run(copied: nn.Module, stretch: Tensor = stretch) -> Tensor:
            return _first(copied(stretch))

        truth = _pass(sequentialize(_copied(model)), run)
        trial = _trial(parallelize(_copied(model), solver), name, run, truth)
        longer = min(GROWTH * steps, whole, LONGEST)
        if longer == steps or trial.seconds * longer / steps > seconds:
            return replace(trial, stretch=steps)
        steps = longer


def usual(model: nn.Module, chunk: int, every: bool) -> dict[str, str | Solver]:
    """Solvers to try, by the name to show."""
    tried: dict[str, str | Solver] = {
        f"shooting {name}": Shooting(chunk=chunk, correction=name, warmup=0)
        for name in get_args(Correction)
        if name != "auto"
    }
    tried["mgrit"] = MGRIT()
    if every:
        all_gru = all(module.mode == "GRU" for module in model.modules() if isinstance(module, nn.RNNBase))
        paper = MGRIT.paper() if all_gru else MGRIT.paper(coarse="frozen")
        tried |= {"mgrit, 4 a level": MGRIT(coarsening=4), "mgrit as published": paper, **over_single_steps()}
    return tried


def over_single_steps() -> dict[str, str | Solver]:
    """The solvers whose chunks are single steps."""
    return {name: name for name in names() if isinstance(resolve(name), Stepwise)}


def reports_of(model: nn.Module) -> list[tuple[str, SolveReport]]:
    """The reports of a model's last call, each with its layer and direction."""
    found = []
    first = 1
    for module in _layers(model):
        directions = 2 if module.bidirectional else 1
        for index, report in enumerate(module.reports):
            layer, reverse = divmod(index, directions)
            found.append((f"layer {first + layer}" + (" reversed" if reverse else ""), report))
        first += module.num_layers
    return found


def _copied(model: nn.Module) -> nn.Module:
    """A deterministic copy; its recurrent layers are in training mode, or cuDNN would refuse the backward pass."""
    copied = copy.deepcopy(model).eval()
    for module in copied.modules():
        if isinstance(module, nn.RNNBase):
            module.train()
            module.dropout = 0.0
    return copied


def _layers(model: nn.Module) -> list[Recurrent]:
    return [module for module in model.modules() if isinstance(module, Recurrent)]


def _trial(model: nn.Module, name: str, run: Callable[[nn.Module], Tensor], truth: list[Tensor]) -> Trial:
    seconds, found = list[float](), truth
    for _ in range(1 + REPEATS):
        begin = time.perf_counter()
        found = _pass(model, run)
        if found[0].is_cuda:
            torch.cuda.synchronize(found[0].device)
        seconds.append(time.perf_counter() - begin)
        if sum(seconds) > PATIENCE:
            break
    seconds = seconds[1:] or seconds  # without the first pass, which builds and learns
    difference = max(_apart(one, other) for one, other in zip(found, truth, strict=True))
    return Trial(name, reports_of(model), statistics.median(seconds), difference)


def _pass(model: nn.Module, run: Callable[[nn.Module], Tensor]) -> list[Tensor]:
    """The output and the parameters' gradients of its mean square."""
    model.zero_grad()
    with torch.enable_grad():
        output = run(model)
        output.square().mean().backward()
    return [output.detach(), *[p.grad.clone() for p in model.parameters() if p.grad is not None]]


def _first(output: Any) -> Tensor:
    """The tensor that the loss is computed from."""
    while isinstance(output, tuple) and not isinstance(output, PackedSequence):
        output = output[0]
    data: Tensor = output.data if isinstance(output, PackedSequence) else output
    return data


def _size(model: nn.Module, run: Callable[[nn.Module], Tensor]) -> tuple[int, int]:
    """Steps and batch size of the first recurrent layer's input."""
    seen, first = list[tuple[int, int]](), _layers(model)[0]

    def look(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        seen.append(size(first, given[0] if given else named["input"]))

    hook = first.register_forward_pre_hook(look, with_kwargs=True)
    with torch.no_grad():
        run(model)
    hook.remove()
    return seen[0]


def _apart(one: Tensor, other: Tensor) -> float:
    return ((one - other).abs().max() / other.abs().max().clamp_min(torch.finfo(other.dtype).tiny)).item()
