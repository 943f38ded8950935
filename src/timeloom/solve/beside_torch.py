"""An LSTM's layer on a CPU beside torch's own, which is one fused primitive: which of the two runs one chunk faster
depends on machine, threads and sizes, so both are rehearsed where ours is one call, too; and time is cut, layer by
layer, where that is faster still.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from timeloom.auto.costs import cost_of, step_cost
from timeloom.auto.layer_experience import LayerExperience
from timeloom.cells.base import Cell
from timeloom.kernels.cpu.layer import CPULayer
from timeloom.problem import Recurrence
from timeloom.solve.inputs import Inputs, sizes_of
from timeloom.solve.plan import Direction, Plan, Planner
from timeloom.torch_state.saved_tensors import saved_through_hooks

SHARE, FEWEST, MOST = 1 / 16, 64, 512
"""Steps of a rehearsal: this share of a call's, but no fewer, where there are so many, and no more."""
TURNS = 2
"""Of each side, of which the faster one counts, after one that does not."""
WIDE = {True: 1.4, False: 1.25}
"""Time of our own one chunk beside torch's where it is not one call, with gradients and without, as `python -m
benchmarks.calibrate` measures it."""
SIDE_BY_SIDE = 1.25
"""What rows gain that a thread runs side by side, which the cost of a step does not tell; measured there, too."""

Run = Callable[[Inputs], Tensor]
"""Outputs of a layer, on autograd's tape where that is on."""
_RATIOS: dict[tuple[int, ...], float] = {}
"""What was found, by sizes, threads and whether gradients are asked for."""
MOST_RATIOS = 512
"""Sizes of which that is kept at a time."""


class Beside(NamedTuple):
    """Who runs a call: torch's own layer, for the reason `why`, or ours, by these plans where it took plans to tell."""

    why: str | None = None
    plans: tuple[Plan, ...] = ()
    """Of the forward pass, and of the backward pass where there is one."""


def is_rival(cell: Cell, inputs: Inputs) -> bool:
    """Whether torch's own layer may run this call, and may be the fastest one chunk."""
    x = inputs.x
    fused = cell.kernel == "lstm" and x.device.type == "cpu" and x.dtype == torch.float32
    return fused and inputs.whole and not inputs.masked and not saved_through_hooks()


def choose(cell: Cell, inputs: Inputs, solver: Planner, experience: LayerExperience, in_one_chunk: Run) -> Beside:
    """Torch's own layer where either pass would gain too little by being cut, and our own one chunk is slower."""
    ratio = own_beside_torchs(inputs, in_one_chunk)
    return Beside() if ratio <= 1 else _cut_or_torchs(cell, inputs, solver, experience, ratio)


def _cut_or_torchs(cell: Cell, inputs: Inputs, solver: Planner, experience: LayerExperience, ratio: float) -> Beside:
    steps, sizes = len(inputs.x), sizes_of(cell, inputs)
    sides = [experience.forward, experience.backward][: 1 + inputs.taped]
    if any(side.resting for side in sides):
        for side in sides:  # both passes are torch's, or none
            side.rest_once()
    directions: tuple[Direction, ...] = ("forward", "backward")
    plans = [solver.plan(sizes, side, way) for side, way in zip(sides, directions, strict=False)]
    for plan, side in zip(plans, sides, strict=True):
        if plan.chunk >= steps:
            return Beside(plan.reason)
        if not gains(plan, sizes, ratio):
            side.rest()
            chunks = f"{-(-steps // plan.chunk)} chunks after warm-ups of {plan.warmup} steps"
            return Beside(f"auto: {chunks} gain too little")
    return Beside(plans=tuple(plans))


def gains(plan: Plan, sizes: Recurrence, ratio: float) -> bool:
    """Whether a plan is likely to be faster than torch's one chunk; ours takes `ratio` of its time."""
    steps, batch = sizes.steps, max(sizes.batch, 1)
    cost, rows = step_cost(sizes), -(-steps // plan.chunk) * batch
    gain = cost_of(steps, batch, steps, 0, cost) / cost_of(steps, batch, plan.chunk, plan.warmup, cost)
    several = rows >= 2 * torch.get_num_threads()
    return gain > (max(ratio / SIDE_BY_SIDE, 1.0) if several else ratio)


def own_beside_torchs(inputs: Inputs, in_one_chunk: Run) -> float:
    """Time of our own one chunk as a share of torch's, with gradients where they are asked for: measured on the first
    call of its size, over a part of its steps.
    """
    (steps, batch, width), units, taped = inputs.x.shape, inputs.w_hh.shape[1], inputs.taped
    if not CPULayer.fits(units, width):
        return WIDE[taped]
    if torch.are_deterministic_algorithms_enabled():  # no clock is to decide
        return 1.0
    rehearsed = min(max(int(SHARE * steps), FEWEST), MOST, steps)
    rehearsed = 1 << (rehearsed.bit_length() - 1)  # so that lengths that vary share a rehearsal
    key = (rehearsed, batch, width, units, taped, torch.get_num_threads())
    ratio = _RATIOS.get(key)
    if ratio is None:
        part = _apart(inputs, rehearsed)
        torchs, own = (_seconds(run, part, taped) for run in (lambda given: lstm(given)[0], in_one_chunk))
        ratio = own / torchs
        if len(_RATIOS) >= MOST_RATIOS:
            _RATIOS.clear()  # of sizes that come once, most are not asked for again
        _RATIOS[key] = ratio
    return ratio


def _apart(inputs: Inputs, steps: int) -> Inputs:
    """The first steps, as leaves of a graph of their own."""
    part = inputs._replace(x=inputs.x[:steps])
    return part.with_live(
        None if tensor is None else tensor.detach().requires_grad_(tensor.requires_grad) for tensor in part.live
    )


def _seconds(run: Run, inputs: Inputs, taped: bool) -> float:
    """The least time of a call, and of its backward pass where there is one."""
    found = []
    for _ in range(1 + TURNS):
        began = time.perf_counter()
        output = run(inputs)
        if taped:
            wanted = [tensor for tensor in inputs.live if tensor is not None and tensor.requires_grad]
            torch.autograd.grad(output.sum(), wanted)  # given gradients would import sympy, 0.3 s
        found.append(time.perf_counter() - began)
    return min(found[1:])


def lstm(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Torch's layer: outputs `(T, B, n)` and final state `(B, 2n)`, on autograd's tape."""
    held = [weight for weight in inputs.weights if weight is not None]
    start = [part.unsqueeze(0).contiguous() for part in inputs.initial.chunk(2, -1)]
    output, h, c = torch.lstm(inputs.x, start, held, len(held) > 2, 1, 0.0, torch.is_grad_enabled(), False, False)
    return output, torch.cat([h[0], c[0]], -1)
