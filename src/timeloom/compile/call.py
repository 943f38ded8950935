"""Run a recurrence by kernels made for its cell, where they can be made; and see that they are still the cell's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from timeloom.cells.fused import FusedCell
from timeloom.cells.generic import GenericCell
from timeloom.compile.remember import compiled_for, refuse
from timeloom.problem import Recurrence
from timeloom.report import SolveReport
from timeloom.solve.recurrence import Seen

CHECKED_ROWS = 4
"""Steps of every call that are compared with the cell itself."""

Solved = tuple[tuple[Tensor, ...], Tensor]
"""Parts of all states, `(T, B, part)` each, and the final state `(B, S)`."""
Run = Callable[[Recurrence, str, Seen | None], Solved]
"""`run(problem, told, seen)`; `told` is for the report, `seen` is shown the states."""
Record = Callable[[SolveReport], None]


def run_fused(cell: GenericCell, problem: Recurrence, xs: Tensor, run: Run, fewest: int | None = None) -> Solved:
    """Solve for a user's cell, by kernels made for it where that is possible."""
    fused = fuse(cell, problem, xs, fewest)
    if not isinstance(fused, str):
        same: list[bool] = []
        compare = partial(agrees, cell, fused, xs)
        solved = run(fused, "fused", lambda states: same.append(compare(states)))
        if all(same):
            return solved
        fused = "the step gives other values than when it was compiled"
        refuse(cell.function, fused)
    return run(problem, f"not fused: {fused}", None)


def telling(record: Record, told: str) -> Record:
    """Record reports that also say whether kernels were made for the cell."""

    def tell(report: SolveReport) -> None:
        if told not in report.reason:
            object.__setattr__(report, "reason", "; ".join(filter(None, (report.reason, told))))
        record(report)

    return tell


def fuse(cell: GenericCell, problem: Recurrence, xs: Tensor, fewest: int | None = None) -> Recurrence | str:
    """The same recurrence over the cell's normal form, or why it has none. On autograd's tape."""
    compiled = compiled_for(cell.function, *_example(cell, problem), xs, fewest)
    if isinstance(compiled, str):
        return compiled
    flat = xs.flatten(0, 1)
    weights, u = compiled.prepare(cell.function, flat, problem.initial)
    return replace(problem, cell=FusedCell(compiled.fused, weights), u=u.view(*xs.shape[:2], -1))


def _example(cell: GenericCell, problem: Recurrence) -> tuple[tuple[Tensor, ...], bool]:
    parts = cell.unpack(problem.initial.detach())
    return (parts if isinstance(parts, tuple) else (parts,)), cell.is_tuple


def agrees(cell: GenericCell, problem: Recurrence, xs: Tensor, states: tuple[Tensor, ...]) -> bool:
    """Whether a few steps of the solved recurrence are the cell's own, run by itself on the states before them."""
    from timeloom.compile.fuse import same_as

    lengths = problem.ends()
    steps = torch.linspace(0, 1, CHECKED_ROWS, dtype=torch.float64)
    sequence = torch.arange(CHECKED_ROWS) % problem.batch
    at = (steps * (lengths[sequence] - 1).clamp(min=0)).long()
    initial = problem.initial.detach().split(cell.parts, -1)
    alive = lengths[sequence] > 0
    back = at == 0 if problem.resets is None else (at == 0) | problem.resets[at, sequence]
    before = [
        torch.where(back.unsqueeze(-1), first[sequence], part[(at - 1).clamp(min=0), sequence])
        for first, part in zip(initial, states, strict=True)
    ]
    after = [part[at, sequence] for part in states]
    state, following = (
        [
            part[alive].unflatten(-1, shape) if shape else part[alive].squeeze(-1)
            for part, shape in zip(parts, cell.shapes, strict=True)
        ]
        for parts in (before, after)
    )
    return same_as(cell.function, cell.is_tuple, state, xs[at, sequence][alive].detach(), following)
