"""The normal form of a problem's cell, which generated kernels run: the cell's own, or compiled from its step."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from timeloom.cells.base import Cell
from timeloom.cells.fused import FusedCell
from timeloom.compile import remember
from timeloom.compile.program import Fused
from timeloom.problem import Recurrence

if TYPE_CHECKING:
    from timeloom.compile.fuse import Compiled


SHORT_STEPS = {"cpu": 1 << 15, "cuda": 1 << 11}
"""By device, steps, summed over requests, after which kernels are made for short sequences too. A training step makes a
dozen requests (in order one, until there are kernels), and each counts. On a GPU a step without kernels is some fifty
launches, and kernels are compiled in a few seconds."""
_made: WeakKeyDictionary[Cell, tuple[Any, Compiled]] = WeakKeyDictionary()
"""For each live cell, its compiled step for inputs of one kind. A cell lives as long as a call, which asks often."""


def _compiled(problem: Recurrence) -> Compiled | None:
    """The compiled step of a cell that has generated kernels (`Cell.generated`)."""
    cell = problem.cell
    if not cell.generated:
        return None
    initial, u = problem.initial, problem.u
    kind = (initial.shape[1:], initial.dtype, initial.device, u.shape[2:], u.dtype)
    known = _made.get(cell)
    if known is not None and known[0] == kind:
        return known[1]
    compiled = _looked_up(problem)
    if compiled is not None:
        _made[cell] = kind, compiled
    return compiled


def _looked_up(problem: Recurrence) -> Compiled | None:
    cell, given = problem.cell, ((problem.initial.detach(),), False, problem.u.detach())
    fewest = 0 if problem.steps >= remember.FEWEST_STEPS else SHORT_STEPS.get(problem.u.device.type, 0)
    compiled = remember.compiled_for(partial(type(cell).step, cell), *given, fewest=fewest)
    return None if isinstance(compiled, str) or compiled.fused.gate_width != cell.gate_width else compiled


def form_of(problem: Recurrence) -> Fused | None:
    """The cell's normal form; None where it has none."""
    if isinstance(problem.cell, FusedCell):
        return problem.cell.fused
    compiled = _compiled(problem)
    return None if compiled is None else compiled.fused


def in_normal_form(problem: Recurrence) -> tuple[FusedCell, Tensor]:
    """The cell in its normal form, and its inputs `(T, B, K)`."""
    cell, u = problem.cell, problem.u
    if isinstance(cell, FusedCell):
        return cell, u
    compiled = _compiled(problem)
    assert compiled is not None
    with torch.no_grad():
        weights, inputs = compiled.prepare(partial(type(cell).step, cell), u.flatten(0, 1), problem.initial)
    return FusedCell(compiled.fused, weights), inputs.view(*u.shape[:2], -1)
