"""An LSTM's layer on a CPU beside torch's own: with several threads, or wide, oneDNN runs one chunk faster than our
kernels do, so that cutting time must pay, layer by layer; and a network that forgets too slowly for it must not cost
sweeps to find out.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from timeloom.auto.costs import cost_of, step_cost
from timeloom.auto.experience import LayerExperience
from timeloom.cells.base import Cell
from timeloom.kernels import sweeper
from timeloom.problem import Recurrence, Segments
from timeloom.solve.plan import Plan
from timeloom.solve.residual import by_part

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


def is_rival(cell: Cell, x: Tensor) -> bool:
    """Whether torch's own layer is the fastest one chunk (the torch it is measured by: `python -m benchmarks.zoo`)."""
    return cell.kernel == "lstm" and x.device.type == "cpu" and x.dtype == torch.float32


def is_as_fast(units: int, steps: int, taped: bool) -> bool:
    """Whether our own one chunk is no slower than torch's: then it runs where nothing else gains."""
    return torch.get_num_threads() == 1 and units <= AS_FAST and steps >= AS_FAST_FROM[taped]


def keeps_to_itself(cell: Cell, steps: int, taped: bool, experience: LayerExperience) -> bool:
    """Whether a layer runs in one chunk of its own where cutting time does not pay; this call's plans are then so."""
    if not is_as_fast(cell.parts[0], steps, taped):
        return False
    for side in (experience.forward, experience.backward):
        side.rest_once()
    return True


def is_recorded_elsewhere() -> bool:
    """Whether saved tensors go through hooks: torch.utils.checkpoint runs a call twice, and must find the same tensors
    saved, whatever has been learned meanwhile.
    """
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top is not None and top(True) is not None


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


def jump_after(warmup: int, problem_of: Callable[[Tensor, Tensor], Recurrence], x: Tensor, initial: Tensor) -> float:
    """How far apart two states still are after `warmup` steps, relative to their size: one of them the initial state,
    the other one where the network has been elsewhere. `problem_of(x, initial)` is the recurrence over some of x.
    """
    rows = min(PROBED_SEQUENCES, x.shape[1])
    steps, initial = len(x), initial[:rows]
    earlier, later = x[:warmup, :rows], x[steps - warmup :, :rows]
    elsewhere = _end(problem_of(earlier, initial), initial)
    starts = torch.cat([initial, elsewhere])
    one, other = _end(problem_of(torch.cat([later, later], 1), starts), starts).split(rows)
    parts = problem_of(earlier, initial).cell.parts
    scale = by_part(torch.maximum(one.abs(), other.abs()), parts).clamp(min=torch.finfo(one.dtype).tiny)
    return float((by_part((one - other).abs(), parts) / scale).amax())


def _end(problem: Recurrence, starts: Tensor) -> Tensor:
    rows = torch.arange(problem.batch, device="cpu")
    whole = Segments(rows, torch.zeros_like(rows), torch.full_like(rows, problem.steps))
    return sweeper(problem).forward(whole, starts)[0]
