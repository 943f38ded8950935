"""How long a network remembers, looked at along a few sequences before time is cut: on a CPU, where sweeps after a
warm-up that is too short take longer than one chunk does.
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
"""Stretches that are looked at, of several sequences where there are."""
GROWTH = 1.5
"""States are compared after so many times the steps of the time before."""
ENOUGH, MET = TOLERANCE[torch.float32] / 4, TOLERANCE[torch.float32]
"""What a warm-up is made for; and what is looked for: closer than that, rounding tells nothing of memory."""

SHARE_OF_WIDE = 1 / 16
"""Part of all steps that is looked at, in one place, where rows side by side cost as much as one after the other."""

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
    """Tell the experience of each pass how fast a network forgets, where it does not know and time may be cut:
    gradients are forgotten as states are.

    needed: how many times as fast as one chunk several must be to be run at all.
    most: steps to look at, at most. What they do not show is not trusted then: a sweep behind a warm-up that is too
        short costs more than a longer one gains.
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
    """Steps after which states have met, by how far apart they are after ever more steps; what lies beyond these
    follows from how fast they came together at last.
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
    """How far apart two states of a network are after `first` steps and after ever more, up to `longest`, relative to
    each part's size and at most over so many places: one of them is the initial one at first, the other one where the
    network has been elsewhere.
    """
    (steps, batch), place = inputs.x.shape[:2], torch.arange(places)
    sequences = place * (batch - 1) // max(places - 1, 1)
    begins = (steps - longest) * (place + 1) // places
    starts = inputs.initial[sequences]

    def after(begin: int, end: int, moved: Tensor, states: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        """The states behind these steps of each place, counted from where it begins, and their parts."""
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
