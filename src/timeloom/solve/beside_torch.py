"""An LSTM's layer on a CPU beside torch's own: with several threads, or wide, oneDNN runs one chunk faster than our
kernels do, so that cutting time must pay, layer by layer; and a network that forgets too slowly for it must not cost
sweeps to find out.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from timeloom.auto.costs import cost_of, step_cost
from timeloom.auto.experience import LayerExperience, assumed_warmup
from timeloom.cells.base import Cell
from timeloom.kernels import sweeper
from timeloom.problem import Recurrence, Segments
from timeloom.solve.inputs import Inputs, sizes_of
from timeloom.solve.plan import Direction, Plan, Planner
from timeloom.solve.residual import by_part
from timeloom.solve.tolerance import TOLERANCE
from timeloom.torch_state.saved_tensors import saved_through_hooks

NEEDED = {True: (1.4, 1.1), False: (1.25, 1.0)}
"""Gain over our own one chunk that is expected of several before they are run, with gradients and without: torch's is
up to 1.4 times as fast. The second numbers are for rows that a thread runs side by side: these gain by that, too, which
the cost of a step does not tell."""
AS_FAST, AS_FAST_FROM = 128, {True: 768, False: 2048}
"""Units up to which our own one chunk is as fast as torch's with one thread, and steps from which on, with gradients
and without: 1.05–2.5 and 1.1–1.4 times at these and more (`python -m benchmarks.calibrate --threads 1`). More threads
share a step of torch's, and of one sequence of ours they do not."""
PROBED_SEQUENCES = 2
"""Sequences of a batch that are looked at."""


def is_rival(cell: Cell, inputs: Inputs) -> bool:
    """Whether torch's own layer is the fastest one chunk (the torch it is measured by: `python -m benchmarks.zoo`), and
    may run this call.
    """
    x = inputs.x
    fastest = cell.kernel == "lstm" and x.device.type == "cpu" and x.dtype == torch.float32
    return fastest and inputs.whole and not inputs.masked and not saved_through_hooks()


def why(
    cell: Cell, inputs: Inputs, solver: Planner, experience: LayerExperience, problem_of: Callable[[Inputs], Recurrence]
) -> str | None:
    """Why torch's own layer is to run, or None: where either pass would gain too little by being cut, and our own one
    chunk is slower. Where nothing is known of the network, a few steps of it are looked at first.
    """
    reason = _why_not_cut(cell, inputs, solver, experience, problem_of)
    if reason is None or not is_as_fast(cell.parts[0], len(inputs.x), inputs.taped):
        return reason
    for side in (experience.forward, experience.backward):  # this call's plans are for one chunk then
        side.rest_once()
    return None


def _why_not_cut(
    cell: Cell, inputs: Inputs, solver: Planner, experience: LayerExperience, problem_of: Callable[[Inputs], Recurrence]
) -> str | None:
    steps, sizes = len(inputs.x), sizes_of(cell, inputs)
    sides = [experience.forward, experience.backward][: 1 + inputs.taped]
    look = assumed_warmup(TOLERANCE[torch.float32])
    if any(side.resting for side in sides):
        for side in sides:  # both passes are torch's, or none
            side.rest_once()
    elif sides[0].forgetting is None and 2 * look < steps:
        with torch.no_grad():
            jump = jump_after(look, inputs, problem_of)
        for side in sides:
            side.note_look(look, jump)
    directions: tuple[Direction, ...] = ("forward", "backward")
    plans = [solver.plan(sizes, side, way) for side, way in zip(sides, directions, strict=False)]
    for plan, side in zip(plans, sides, strict=True):
        if plan.chunk >= steps:
            return plan.reason
        if not gains(plan, sizes, inputs.taped):
            side.rest()
            return f"auto: {-(-steps // plan.chunk)} chunks after warm-ups of {plan.warmup} steps gain too little"
    return None


def is_as_fast(units: int, steps: int, taped: bool) -> bool:
    """Whether our own one chunk is no slower than torch's: then it runs where nothing else gains."""
    return torch.get_num_threads() == 1 and units <= AS_FAST and steps >= AS_FAST_FROM[taped]


def gains(plan: Plan, sizes: Recurrence, taped: bool) -> bool:
    """Whether a plan is likely to be faster than torch's layer, and than our own one chunk where that is as fast."""
    steps, batch = sizes.steps, max(sizes.batch, 1)
    cost, rows = step_cost(sizes), -(-steps // plan.chunk) * batch
    gain = cost_of(steps, batch, steps, 0, cost) / cost_of(steps, batch, plan.chunk, plan.warmup, cost)
    if is_as_fast(sizes.cell.parts[0], steps, taped):
        return gain > 1
    return gain > NEEDED[taped][rows >= 2 * torch.get_num_threads()]


def lstm(x: Tensor, initial: Tensor, weights: tuple[Tensor | None, ...]) -> tuple[Tensor, Tensor]:
    """Torch's layer: outputs `(T, B, n)` and final state `(B, 2n)`, on autograd's tape."""
    held = [weight for weight in weights if weight is not None]
    start = [part.unsqueeze(0).contiguous() for part in initial.chunk(2, -1)]
    output, h, c = torch.lstm(x, start, held, len(held) > 2, 1, 0.0, torch.is_grad_enabled(), False, False)
    return output, torch.cat([h[0], c[0]], -1)


def jump_after(warmup: int, inputs: Inputs, problem_of: Callable[[Inputs], Recurrence]) -> float:
    """How far apart two states still are after `warmup` steps, relative to their size: one of them the initial state,
    the other one where the network has been elsewhere. `problem_of` makes the recurrence of some inputs.
    """

    def end(x: Tensor, starts: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        problem = problem_of(inputs._replace(x=x, initial=starts)).detach()
        return _end(problem, starts), problem.cell.parts

    x, rows = inputs.x, min(PROBED_SEQUENCES, inputs.x.shape[1])
    steps, initial = len(x), inputs.initial[:rows]
    later = x[steps - warmup :, :rows]
    elsewhere, parts = end(x[:warmup, :rows], initial)
    one, other = end(torch.cat([later, later], 1), torch.cat([initial, elsewhere]))[0].split(rows)
    scale = by_part(torch.maximum(one.abs(), other.abs()), parts).clamp(min=torch.finfo(one.dtype).tiny)
    return float((by_part((one - other).abs(), parts) / scale).amax())


def _end(problem: Recurrence, starts: Tensor) -> Tensor:
    rows = torch.arange(problem.batch, device="cpu")
    whole = Segments(rows, torch.zeros_like(rows), torch.full_like(rows, problem.steps))
    return sweeper(problem).forward(whole, starts)[0]
