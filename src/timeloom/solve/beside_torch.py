"""An LSTM's layer on a CPU beside torch's own, which is one fused primitive: which of the two runs one chunk faster
depends on machine, threads and sizes, so both are rehearsed where calls are long enough for that; and time is cut,
layer by layer, where that is faster still.

A decision may cost no more than a part of the call that it serves: where torch's layer runs in the end, all that was
spent is lost.
"""

from __future__ import annotations

import math
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
from timeloom.solve.look import PLACES
from timeloom.solve.plan import Direction, Plan, Planner
from timeloom.torch_state.saved_tensors import saved_through_hooks

SHARE, FEWEST, MOST = 1 / 16, 64, 512
"""Steps of a rehearsal: this share of a call's, but no fewer, where there are so many, and no more."""
SHORTER = 4
"""So many times shorter is the other rehearsal, by which what a call costs beside its steps is told from them."""
TURNS = 2
"""Of each side and length, of which the faster one counts: of a new length torch's first one is slower."""
WORTH_REHEARSING = {True: 1792, False: 4096}
"""Steps of one sequence, with gradients and without, from which a rehearsal takes half a call or less."""
AS_LONG = 4
"""Sequences more than one that make steps so much as twice as long."""
AMORTISED = 20
"""Calls of so many steps that must have been run before shorter ones are rehearsed."""
SIDE_BY_SIDE, SIDE_BY_SIDE_WIDE = 1.25, 0.75
"""What rows gain that a thread runs side by side, which the cost of a step does not tell; where a layer is not one
call, its products over all of time gain nothing. The first one is measured by `python -m benchmarks.calibrate`."""
LOOK_SHARE = 1 / 6
"""Part of torch's time that a look at the network's memory may take."""
UNKNOWN = math.inf
"""In place of a ratio of times."""
MOST_REHEARSED = 512
"""Sizes of which rehearsals are kept at a time."""

Run = Callable[[Inputs], Tensor]
"""Outputs of a layer, on autograd's tape where that is on."""


class Took(NamedTuple):
    """Seconds of a call by one side: beside its steps, and of each step."""

    once: float
    each: float

    def over(self, steps: int) -> float:
        return self.once + steps * self.each


_REHEARSED: dict[tuple[int, ...], tuple[Took, Took]] = {}
"""What torch's and our own one chunk took, by sizes, threads and whether gradients are asked for."""


class Beside(NamedTuple):
    """Who runs a call: torch's own layer, for the reason `why`, or ours, by these plans where it took plans to tell."""

    why: str | None = None
    plans: tuple[Plan, ...] = ()
    """Of the forward pass, and of the backward pass where there is one."""


def is_rival(cell: Cell, inputs: Inputs) -> bool:
    """Whether torch's own layer may run this call, and may be the fastest one chunk."""
    x = inputs.x
    fused = cell.kernel == "lstm" and x.device.type == "cpu" and x.dtype == torch.float32
    fused = fused and bool(torch.backends.mkldnn.enabled)
    return fused and inputs.whole and not inputs.masked and not saved_through_hooks()


def choose(cell: Cell, inputs: Inputs, solver: Planner, experience: LayerExperience, ratio: float) -> Beside:
    """Torch's own layer where our own one chunk takes `ratio` of its time, which is more, and either pass would gain
    too little by being cut.
    """
    if ratio == UNKNOWN:
        return Beside(f"auto: too few steps so far, {len(inputs.x)} a call, to find out whose are faster")
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
        if not gains(plan, sizes, inputs, ratio):
            side.rest()
            chunks = f"{-(-steps // plan.chunk)} chunks after warm-ups of {plan.warmup} steps"
            return Beside(f"auto: {chunks} gain too little")
    return Beside(plans=tuple(plans))


def gains(plan: Plan, sizes: Recurrence, inputs: Inputs, ratio: float) -> bool:
    """Whether a plan is likely to be faster than torch's one chunk; ours takes `ratio` of its time."""
    steps, batch, cost = sizes.steps, max(sizes.batch, 1), step_cost(sizes)
    gain = cost_of(steps, batch, steps, 0, cost) / cost_of(steps, batch, plan.chunk, plan.warmup, cost)
    several = -(-steps // plan.chunk) * batch >= 2 * torch.get_num_threads()
    return gain > (needed_gain(inputs, ratio) if several else ratio)


def needed_gain(inputs: Inputs, ratio: float) -> float:
    """How many times as fast as our one chunk, by the costs of steps, several rows a thread must be to beat torch's."""
    return max(ratio / (SIDE_BY_SIDE if _in_one_call(inputs) else SIDE_BY_SIDE_WIDE), 1.0)


def bounds_of_look(cell: Cell, inputs: Inputs, ratio: float) -> tuple[float, int]:
    """What several chunks must gain to be run, and how many steps may be looked at for it."""
    if ratio == UNKNOWN:
        return ratio, 0
    sizes = sizes_of(cell, inputs)
    steps, batch, cost = sizes.steps, max(sizes.batch, 1), step_cost(sizes)
    most = LOOK_SHARE / ratio * cost_of(steps, batch, steps, 0, cost) / cost.of(2 * PLACES)
    return needed_gain(inputs, ratio), int(most)


def own_beside_torchs(inputs: Inputs, in_one_chunk: Run, experience: LayerExperience) -> float:
    """Time of our own one chunk as a share of torch's, with gradients where they are asked for: as a rehearsal over a
    part of the steps of the first call of its size foretells it. UNKNOWN where that would take too much of the calls
    so far.
    """
    (steps, batch, width), units, taped = inputs.x.shape, inputs.w_hh.shape[1], inputs.taped
    if torch.are_deterministic_algorithms_enabled():  # no clock is to decide
        return 1.0 if _in_one_call(inputs) else UNKNOWN
    calls = AS_LONG * WORTH_REHEARSING[taped] / (steps * (batch + AS_LONG - 1))
    if calls > 1 and not experience.pays_for(math.ceil(AMORTISED * calls)):
        return 1.0 if _in_one_call(inputs) else UNKNOWN
    rehearsed = min(max(int(SHARE * steps), FEWEST), MOST, steps)
    rehearsed = 1 << (rehearsed.bit_length() - 1)  # so that lengths that vary share a rehearsal
    key = (rehearsed, batch, width, units, taped, torch.get_num_threads())
    if key not in _REHEARSED:
        by_torch = _took(lambda given: lstm(given)[0], inputs, rehearsed)
        if len(_REHEARSED) >= MOST_REHEARSED:
            _REHEARSED.clear()  # of sizes that come once, most are not asked for again
        _REHEARSED[key] = by_torch, _took(in_one_chunk, inputs, rehearsed)
    torchs, own = _REHEARSED[key]
    return own.over(steps) / torchs.over(steps)


def _in_one_call(inputs: Inputs) -> bool:
    return CPULayer.fits(inputs.w_hh.shape[1], inputs.x.shape[-1])


def _took(run: Run, inputs: Inputs, steps: int) -> Took:
    """What a side takes, by rehearsals of two lengths."""
    fewer = max(steps // SHORTER, 1)
    short, long = (_seconds(run, _apart(inputs, length), inputs.taped) for length in (fewer, steps))
    each = max(long - short, 0.0) / max(steps - fewer, 1)
    return Took(max(short - fewer * each, 0.0), each)


def _apart(inputs: Inputs, steps: int) -> Inputs:
    """The first steps, as leaves of a graph of their own."""
    part = inputs._replace(x=inputs.x[:steps])
    return part.with_live(
        None if tensor is None else tensor.detach().requires_grad_(tensor.requires_grad) for tensor in part.live
    )


def _seconds(run: Run, inputs: Inputs, taped: bool) -> float:
    """The least time of a call, and of its backward pass where there is one."""
    found = []
    for _ in range(TURNS):
        began = time.perf_counter()
        output = run(inputs)
        if taped:
            wanted = [tensor for tensor in inputs.live if tensor is not None and tensor.requires_grad]
            torch.autograd.grad(output.sum(), wanted)  # given gradients would import sympy, 0.3 s
        found.append(time.perf_counter() - began)
    return min(found)


def lstm(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Torch's layer: outputs `(T, B, n)` and final state `(B, 2n)`, on autograd's tape."""
    held = [weight for weight in inputs.weights if weight is not None]
    start = [part.unsqueeze(0).contiguous() for part in inputs.initial.chunk(2, -1)]
    output, h, c = torch.lstm(inputs.x, start, held, len(held) > 2, 1, 0.0, torch.is_grad_enabled(), False, False)
    return output, torch.cat([h[0], c[0]], -1)
