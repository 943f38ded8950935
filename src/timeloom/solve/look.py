"""How long a network remembers, looked at along a few sequences before time is cut: on a CPU, where sweeps after a
warm-up that is too short take longer than one chunk does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from timeloom.auto.costs import cost_of, longest_warmup, step_cost
from timeloom.auto.experience import NEVER, NOISE, Experience, assumed_warmup
from timeloom.kernels import in_compiled_code, sweeper
from timeloom.problem import Recurrence, Segments
from timeloom.solve.inputs import Inputs
from timeloom.solve.residual import by_part
from timeloom.solve.tolerance import TOLERANCE

PLACES = 2
"""Stretches that are looked at, of several sequences where there are."""
GROWTH = 1.5
"""States are compared after so many times the steps of the time before."""
ENOUGH, MET = TOLERANCE[torch.float32] / 4, TOLERANCE[torch.float32]
"""What a warm-up is made for; and what is looked for: closer than that, rounding tells nothing of memory."""

ProblemOf = Callable[[Inputs], Recurrence]
"""Makes the recurrence of some inputs."""


def look(inputs: Inputs, sizes: Recurrence, sides: Sequence[Experience], problem_of: ProblemOf) -> None:
    """Tell the experience of each pass how fast a network forgets, where it does not know and time may be cut:
    gradients are forgotten as states are.
    """
    steps, batch = sizes.steps, max(sizes.batch, 1)
    first = assumed_warmup(TOLERANCE[torch.float32])
    asking = [side for side in sides if side.forgetting is None and not side.resting]
    if not asking or not inputs.whole or 2 * first >= steps:
        return
    if inputs.x.dtype != torch.float32 or not in_compiled_code(sizes):
        return
    cost = step_cost(sizes)
    longest = longest_warmup(steps, batch, cost.worth * cost_of(steps, batch, steps, 0, cost), cost)
    if longest < first:
        return
    with torch.no_grad():
        memory = steps_to_forget(inputs, problem_of, sizes.cell.parts, first, longest)
    for side in asking:
        side.note_look(memory, ENOUGH)


def steps_to_forget(inputs: Inputs, problem_of: ProblemOf, parts: tuple[int, ...], first: int, longest: int) -> int:
    """Steps after which states have met that were apart: one of them the initial one, the other one where the network
    has been elsewhere. They are compared after `first` steps and later, up to `longest`; what lies beyond follows from
    how fast they came together at last.
    """
    seen = [(0, 1.0)]
    for steps, jump in apart(inputs, problem_of, parts, first, longest):
        seen.append((steps, min(max(jump, NOISE), 1.0) if math.isfinite(jump) else 1.0))
        if jump <= MET:
            break
    (begin, before), (end, after) = seen[-2:]
    if before <= after:  # no closer
        return NEVER
    needed = begin + math.ceil((end - begin) * math.log(ENOUGH / before) / math.log(after / before))
    return min(needed, end) if after <= MET else needed


def apart(
    inputs: Inputs, problem_of: ProblemOf, parts: tuple[int, ...], first: int, longest: int
) -> Iterator[tuple[int, float]]:
    """Steps, ever more of them, and how far apart such states still are behind them, relative to each part's size."""
    (steps, batch), places = inputs.x.shape[:2], torch.arange(PLACES)
    sequences = places * (batch - 1) // (PLACES - 1)
    begins = (steps - longest) * (places + 1) // PLACES
    starts = inputs.initial[sequences]

    def after(begin: int, end: int, moved: Tensor, states: Tensor) -> Tensor:
        """The states behind these steps of each place, counted from where it begins."""
        x = torch.stack([inputs.x[at + begin : at + end, row] for at, row in zip(moved, sequences, strict=True)], 1)
        x = x.repeat(1, len(states) // PLACES, 1)
        problem = problem_of(inputs._replace(x=x, initial=states)).detach()
        rows = torch.arange(len(states))
        whole = Segments(rows, torch.zeros_like(rows), torch.full_like(rows, end - begin))
        return sweeper(problem).forward(whole, states)[0]

    states = torch.cat([starts, after(0, first, torch.zeros_like(begins), starts)])
    looked, until = 0, first
    while looked < longest:
        states = after(looked, until, begins, states)
        one, other = states.chunk(2)
        yield until, _jump(one, other, parts)
        looked, until = until, min(math.ceil(GROWTH * until), longest)


def _jump(one: Tensor, other: Tensor, parts: tuple[int, ...]) -> float:
    """The largest relative difference of two states."""
    scale = by_part(torch.maximum(one.abs(), other.abs()), parts).clamp(min=torch.finfo(one.dtype).tiny)
    return float((by_part((one - other).abs(), parts) / scale).amax())
