"""The coarsest level by compiled kernels, which run its steps as a recurrence of their own."""

from __future__ import annotations

import torch
from torch import Tensor

from timeloom.cells.coarse import March
from timeloom.cells.fused import FusedCell
from timeloom.compile import remember
from timeloom.kernels.cpu.fused import FusedSweeper
from timeloom.problem import Recurrence, cut_evenly

PAYS_FROM = 1 << 12
"""Number of steps, over all calls, from which compiling kernels pays: that takes seconds, and a step in torch a quarter
of a millisecond."""


def marched(march: March, first: Tensor) -> Tensor | None:
    """The points `(N, B, S)` after `first` `(B, S)`, on a CPU; None if there are no kernels, or not yet."""
    step, x = march
    with torch.no_grad():
        compiled = remember.compiled_for(step, (first,), False, x, PAYS_FROM)
        if isinstance(compiled, str):
            return None
        weights, inputs = compiled.prepare(step, x.flatten(0, 1), first)
        problem = Recurrence(FusedCell(compiled.fused, weights), inputs.view(*x.shape[:2], -1), first)
        if not FusedSweeper.supports(problem):
            return None
        states = first.new_empty(len(x) + 1, *first.shape)
        FusedSweeper(problem).forward(cut_evenly(len(x), len(first), len(x), False), first, [states])
    return states[1:]
