"""Whether torch's own layer, which is one fused primitive of oneDNN, runs an LSTM layer on a CPU.

Which of the two runs a single chunk faster depends on machine, threads and sizes. So both are timed in a rehearsal if
calls are long enough for that, and time is cut into chunks, layer by layer, where that is faster still.

A decision may cost only a fraction of the call that it serves: if torch's layer runs in the end, that time is lost.
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
"""Steps of a rehearsal: their share of the call's steps, their minimum (if the call has so many) and their maximum."""
SHORTER = 4
"""Factor by which a second rehearsal is shorter; the two separate the fixed cost of a call from that of its steps."""
TURNS = 2
"""Timed runs of each side and length, of which the fastest counts: torch's first run of a new length is slower."""
WORTH_REHEARSING = {True: 1792, False: 4096}
"""Steps of one sequence, with and without gradients, from which a rehearsal takes at most half the time of a call."""
AS_LONG = 4
"""Additional sequences in a batch that double the time of a step."""
AMORTISED = 20
"""Calls of `WORTH_REHEARSING` steps, or as many steps in shorter calls, after which short calls are rehearsed, too."""
SIDE_BY_SIDE, SIDE_BY_SIDE_WIDE = 1.25, 0.75
"""Speed-up of rows that a thread runs side by side, which the cost model of a step leaves out; the second for layers
that are not one kernel call, since their products over all of time gain nothing. `python -m benchmarks.calibrate`
measures the first."""
LOOK_SHARE = 1 / 6
"""Share of torch's time that a look at the network's memory may take."""
UNKNOWN = math.inf
"""Stands for a ratio of times that has not been measured."""
MOST_REHEARSED = 512
"""Number of sizes for which rehearsals are kept at a time."""

Run = Callable[[Inputs], Tensor]
"""Computes the outputs of a layer, on autograd's tape if gradients are enabled."""


class Took(NamedTuple):
    """Seconds of a call: a fixed part (`once`), and the time of each step (`each`)."""

    once: float
    each: float

    def over(self, steps: int) -> float:
        return self.once + steps * self.each


_REHEARSED: dict[tuple[int, ...], tuple[Took, Took]] = {}
"""Times of torch's layer and of our own single chunk, by sizes, threads and whether gradients are needed."""


class Beside(NamedTuple):
    """Which layer runs a call: torch's own if there is a reason `why`, else ours, by `plans` if the choice made any."""

    why: str | None = None
    plans: tuple[Plan, ...] = ()
    """The plan of the forward pass, and that of the backward pass if there is one."""


def is_rival(cell: Cell, inputs: Inputs) -> bool:
    """Whether torch's own layer can run this call, and may be the fastest way to run a single chunk."""
    x = inputs.x
    fused = cell.kernel == "lstm" and x.device.type == "cpu" and x.dtype == torch.float32
    fused = fused and bool(torch.backends.mkldnn.enabled)
    return fused and inputs.whole and not inputs.masked and not saved_through_hooks()


def choose(cell: Cell, inputs: Inputs, solver: Planner, experience: LayerExperience, ratio: float) -> Beside:
    """Choose torch's own layer if our single chunk is slower and cutting either pass into chunks would gain too little.

    ratio: the time of our single chunk over that of torch's layer.
    """
    if ratio == UNKNOWN:
        return Beside(f"auto: too few steps so far, {len(inputs.x)} a call, to find out whose are faster")
    return Beside() if ratio <= 1 else _cut_or_torchs(cell, inputs, solver, experience, ratio)


def _cut_or_torchs(cell: Cell, inputs: Inputs, solver: Planner, experience: LayerExperience, ratio: float) -> Beside:
    steps, sizes = len(inputs.x), sizes_of(cell, inputs)
    sides = [experience.forward, experience.backward][: 1 + inputs.taped]
    if any(side.resting for side in sides):
        for side in sides:  # torch runs both passes or none
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
    """Whether a plan is likely to be faster than torch's layer; our single chunk takes `ratio` times as long."""
    steps, batch, cost = sizes.steps, max(sizes.batch, 1), step_cost(sizes)
    gain = cost_of(steps, batch, steps, 0, cost) / cost_of(steps, batch, plan.chunk, plan.warmup, cost)
    several = -(-steps // plan.chunk) * batch >= 2 * torch.get_num_threads()
    return gain > (needed_gain(inputs, ratio) if several else ratio)


def needed_gain(inputs: Inputs, ratio: float) -> float:
    """The speed-up over our single chunk, by the cost model, that several rows a thread need to beat torch's layer."""
    return max(ratio / (SIDE_BY_SIDE if _in_one_call(inputs) else SIDE_BY_SIDE_WIDE), 1.0)


def bounds_of_look(cell: Cell, inputs: Inputs, ratio: float) -> tuple[float, int]:
    """The speed-up that several chunks need, and the number of steps that a look at the network's memory may take."""
    if ratio == UNKNOWN:
        return ratio, 0
    sizes = sizes_of(cell, inputs)
    steps, batch, cost = sizes.steps, max(sizes.batch, 1), step_cost(sizes)
    most = LOOK_SHARE / ratio * cost_of(steps, batch, steps, 0, cost) / cost.of(2 * PLACES)
    return needed_gain(inputs, ratio), int(most)


def own_beside_torchs(inputs: Inputs, in_one_chunk: Run, experience: LayerExperience) -> float:
    """Time of our own single chunk over that of torch's layer, with the backward pass if gradients are needed.

    It is predicted from a rehearsal over some of the steps of the first call of its size; UNKNOWN as long as a
    rehearsal would cost too much compared with the calls so far.
    """
    (steps, batch, width), units, taped = inputs.x.shape, inputs.w_hh.shape[1], inputs.taped
    if torch.are_deterministic_algorithms_enabled():  # timings must not decide
        return 1.0 if _in_one_call(inputs) else UNKNOWN
    calls = AS_LONG * WORTH_REHEARSING[taped] / (steps * (batch + AS_LONG - 1))
    if calls > 1 and not experience.pays_for(math.ceil(AMORTISED * calls)):
        return 1.0 if _in_one_call(inputs) else UNKNOWN
    rehearsed = min(max(int(SHARE * steps), FEWEST), MOST, steps)
    rehearsed = 1 << (rehearsed.bit_length() - 1)  # a power of two, so that similar lengths share a rehearsal
    key = (rehearsed, batch, width, units, taped, torch.get_num_threads())
    if key not in _REHEARSED:
        by_torch = _took(lambda given: lstm(given)[0], inputs, rehearsed)
        if len(_REHEARSED) >= MOST_REHEARSED:
            _REHEARSED.clear()  # most of so many sizes will not occur again
        _REHEARSED[key] = by_torch, _took(in_one_chunk, inputs, rehearsed)
    torchs, own = _REHEARSED[key]
    return own.over(steps) / torchs.over(steps)


def _in_one_call(inputs: Inputs) -> bool:
    return CPULayer.fits(inputs.w_hh.shape[1], inputs.x.shape[-1])


def _took(run: Run, inputs: Inputs, steps: int) -> Took:
    """Times of one side, from rehearsals of two lengths."""
    fewer = max(steps // SHORTER, 1)
    short, long = (_seconds(run, _apart(inputs, length), inputs.taped) for length in (fewer, steps))
    each = max(long - short, 0.0) / max(steps - fewer, 1)
    return Took(max(short - fewer * each, 0.0), each)


def _apart(inputs: Inputs, steps: int) -> Inputs:
    """The inputs of the first steps, as leaves of a new graph."""
    part = inputs._replace(x=inputs.x[:steps])
    return part.with_live(
        None if tensor is None else tensor.detach().requires_grad_(tensor.requires_grad) for tensor in part.live
    )


def _seconds(run: Run, inputs: Inputs, taped: bool) -> float:
    """The shortest time of a call, with its backward pass if `taped`."""
    found = []
    for _ in range(TURNS):
        began = time.perf_counter()
        output = run(inputs)
        if taped:
            wanted = [tensor for tensor in inputs.live if tensor is not None and tensor.requires_grad]
            torch.autograd.grad(output.sum(), wanted)  # grad_outputs= would import sympy, 0.3 s
        found.append(time.perf_counter() - began)
    return min(found)


def lstm(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Torch's layer: outputs `(T, B, n)` and final state `(B, 2n)`, on autograd's tape."""
    held = [weight for weight in inputs.weights if weight is not None]
    start = [part.unsqueeze(0).contiguous() for part in inputs.initial.chunk(2, -1)]
    output, h, c = torch.lstm(inputs.x, start, held, len(held) > 2, 1, 0.0, torch.is_grad_enabled(), False, False)
    return output, torch.cat([h[0], c[0]], -1)
