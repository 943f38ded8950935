"""How long a network remembers, measured on a few stretches of the inputs before time is cut into chunks.

Only on a CPU, where sweeps after a warm-up that is too short take longer than a single chunk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from timeloom.auto.costs import cheapest, cost_of, longest_warmup, step_cost
from timeloom.auto.experience import NEVER, NOISE, Experience, assumed_warmup
from timeloom.kernels import in_compiled_code, sweeper
from timeloom.kernels.cpu.layer import CPULayer
from timeloom.problem import Recurrence, Segments
from timeloom.solve.inputs import Inputs
from timeloom.solve.residual import by_part
from timeloom.solve.tolerance import TOLERANCE

PLACES = 2
"""Number of stretches to look at, from different sequences if there are several."""
GROWTH = 1.5
"""Factor between the numbers of steps after which states are compared."""
ENOUGH, MET = TOLERANCE[torch.float32] / 4, TOLERANCE[torch.float32]
"""Difference of states that a warm-up should leave, and the one at which a look ends: less is mostly rounding."""

SHARE_OF_WIDE = 1 / 16
"""Share of all steps to look at, in one place, for wide layers, which gain nothing from rows that run side by side."""

ProblemOf = Callable[[Inputs], Recurrence]
"""Makes the recurrence of some inputs."""


def look(
    inputs: Inputs,
    sizes: Recurrence,
    sides: Sequence[Experience],
    problem_of: ProblemOf,
    needed: float = 1.0,
    most: int | None = None,
) -> None:
    """Measure how fast a network forgets, and note it in the experience of each pass that does not know it yet.

    Nothing is measured where time would not be cut anyway. Gradients are assumed to fade as fast as states.

    needed: speed-up over a single chunk that several chunks must reach to be used at all.
    most: largest number of steps to look at. A memory far beyond it is then not extrapolated but taken for endless: a
        sweep after a warm-up that is too short costs more than chunks gain.
    """
    steps, batch = sizes.steps, max(sizes.batch, 1)
    first = assumed_warmup(TOLERANCE[torch.float32])
    asking = [side for side in sides if side.forgetting is None and not side.resting]
    if not asking or not inputs.whole or 2 * first >= steps:
        return
    if inputs.x.dtype != torch.float32 or not in_compiled_code(sizes):
        return
    cost = step_cost(sizes)
    if cheapest(steps, batch, first, cost)[0] >= steps:
        return
    places, memory = PLACES, NEVER
    whole = cost_of(steps, batch, steps, 0, cost)
    longest = longest_warmup(steps, batch, min(cost.worth, 1 / needed) * whole, cost)
    if not CPULayer.fits(sizes.cell.parts[0], inputs.x.shape[-1]):
        places, longest = 1, min(longest, int(SHARE_OF_WIDE * steps))
    longest = max(longest, first) if most is None else min(longest, most)
    if longest >= first:
        with torch.no_grad():
            memory = steps_to_forget(apart(inputs, problem_of, places, first, longest))
    if most is not None and memory > GROWTH * longest:
        memory = NEVER
    for side in asking:
        side.note_look(memory, ENOUGH)


def steps_to_forget(found: Iterable[tuple[int, float]]) -> int:
    """Steps after which two states agree, from their differences after ever more steps.

    If they do not agree within these steps, the number is extrapolated from the last rate.
    """
    seen = [(0, 1.0)]
    for steps, jump in found:
        seen.append((steps, min(max(jump, NOISE), 1.0) if math.isfinite(jump) else 1.0))
        if jump <= MET:
            break
    (begin, before), (end, after) = seen[-2:]
    if before <= after:  # no closer
        return NEVER
    needed = begin + math.ceil((end - begin) * math.log(ENOUGH / before) / math.log(after / before))
    return min(needed, end) if after <= MET else needed


def apart(inputs: Inputs, problem_of: ProblemOf, places: int, first: int, longest: int) -> Iterator[tuple[int, float]]:
    """Differences of two states after `first` and ever more steps, up to `longest`: the largest over some places.

    They are relative to the size of each part of the state. One of the two starts as the initial state, the other one
    as a state that the network has reached on inputs from elsewhere.
    """
    (steps, batch), place = inputs.x.shape[:2], torch.arange(places)
    sequences = place * (batch - 1) // max(places - 1, 1)
    begins = (steps - longest) * (place + 1) // places
    starts = inputs.initial[sequences]

    def after(begin: int, end: int, moved: Tensor, states: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        """The states after steps begin ≤ t < end of each place, which starts at step `moved`, and their parts."""
        x = torch.stack([inputs.x[at + begin : at + end, row] for at, row in zip(moved, sequences, strict=True)], 1)
        x = x.repeat(1, len(states) // places, 1)
        problem = problem_of(inputs._replace(x=x, initial=states)).detach()
        rows = torch.arange(len(states))
        whole = Segments(rows, torch.zeros_like(rows), torch.full_like(rows, end - begin))
        return sweeper(problem).forward(whole, states)[0], problem.cell.parts

    states = torch.cat([starts, after(0, first, torch.zeros_like(begins), starts)[0]])
    looked, until = 0, first
    while looked < longest:
        states, parts = after(looked, until, begins, states)
        one, other = states.chunk(2)
        yield until, _jump(one, other, parts)
        looked, until = until, min(math.ceil(GROWTH * until), longest)


def _jump(one: Tensor, other: Tensor, parts: tuple[int, ...]) -> float:
    """The largest relative difference of two states."""
    scale = by_part(torch.maximum(one.abs(), other.abs()), parts).clamp(min=torch.finfo(one.dtype).tiny)
    return float((by_part((one - other).abs(), parts) / scale).amax())
