"""Run a recurrence by kernels compiled for its cell, where that is possible, and check that they still match it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from timeloom.cells.fused import FusedCell
from timeloom.cells.generic import GenericCell, spread
from timeloom.compile.refusal import BRANCHES, ROWS_MIX, NotFused
from timeloom.compile.remember import compiled_for, doubted, forget, now_and_then, refuse, rounding_of
from timeloom.compile.watch import unchanged
from timeloom.kernels.cpu import build
from timeloom.kernels.cpu import fused as cpu
from timeloom.kernels.cuda import fused as cuda
from timeloom.kernels.cuda.chain import index_of
from timeloom.problem import Recurrence
from timeloom.report import SolveReport
from timeloom.solve.recurrence import Seen
from timeloom.torch_state.precision import HALF
from timeloom.torch_state.streams import capturing

if TYPE_CHECKING:
    from timeloom.compile.fuse import Compiled

CHECKED_ROWS = 4
"""Steps of every call that are compared with the cell itself."""

Solved = tuple[tuple[Tensor, ...], Tensor]
"""Parts of all states, `(T, B, part)` each, and the final state `(B, S)`."""
Run = Callable[[Recurrence, str, Seen | None], Solved]
"""`run(problem, told, seen)`; `told` goes into the report, `seen` is called with the states."""
Record = Callable[[SolveReport], None]


def run_fused(cell: GenericCell, problem: Recurrence, xs: Tensor, run: Run, why_not: str | None) -> Solved:
    """Solve for a user's cell, by kernels compiled for it where that is possible.

    why_not: why the solver can do nothing with those.
    """
    check = partial(_check, cell, problem, xs, alone=True)
    fused, dtype = fuse(cell, problem, xs, check, why_not), problem.initial.dtype
    if not isinstance(fused, str):
        gaps: list[float] = []
        compare = partial(gap, cell, fused, xs, dtype=dtype)
        parts, final = run(fused, "fused", lambda states: gaps.append(compare(states)))
        changed = doubted(cell.function, *_examples(cell, problem, xs), max(gaps, default=0.0))
        if changed is None:
            return tuple(part.to(dtype) for part in parts), final.to(dtype)
        fused = changed
    _check(cell, problem, xs, alone=fused.startswith((ROWS_MIX, BRANCHES)))
    return run(problem, f"not fused: {fused}", None)


def _check(cell: GenericCell, problem: Recurrence, xs: Tensor, alone: bool) -> None:
    """Refuse a cell whose results are not repeatable, since its steps are run more than once.

    With `alone`, also one that mixes rows: chunks are rows, too, and would influence each other.
    """
    if len(xs) * problem.batch == 0 or capturing(xs.device):
        return
    rows = spread(len(xs) * problem.batch, xs.device)
    initial, u = problem.initial.detach(), xs.detach().flatten(0, 1)
    with torch.no_grad():
        try:
            cell.check_repeats(initial[rows % problem.batch], u[rows])
            if alone:
                cell.check_rows(initial[rows % problem.batch], u[rows])
        except RuntimeError as error:
            cell.step(initial, u[: problem.batch])  # what is wrong there, too, is for torch to say
            raise ValueError(
                f"the cell runs on {problem.batch} rows, those of the batch, and not on other numbers of rows "
                f"({error}): it must take any number, since chunks of time are rows, too. Give what belongs to a "
                f'sequence as a part of x. solver="sequential" runs such a cell step by step'
            ) from error


def telling(record: Record, told: str) -> Record:
    """A `record` that adds to each report whether kernels were made for the cell."""

    def tell(report: SolveReport) -> None:
        if told not in report.reason:
            object.__setattr__(report, "reason", "; ".join(filter(None, (report.reason, told))))
        record(report)

    return tell


def fuse(
    cell: GenericCell, problem: Recurrence, xs: Tensor, check: Callable[[], None] | None = None,
    why_not: str | None = None,
) -> Recurrence | str:  # fmt: skip
    """The same recurrence over the cell's normal form, on autograd's tape, or why there is none.

    check: called in some of the calls.
    why_not: why kernels would be of no use.
    """
    device = xs.device
    missing = why_not or (cuda.hindrance(index_of(device)) if device.type == "cuda" else build.unavailable())
    if missing is not None:
        if check is not None:
            now_and_then(cell.function, *_examples(cell, problem, xs), check)
        return missing
    compiled = _compiled_now(cell, problem, xs, check)
    if isinstance(compiled, str):
        return compiled
    initial = problem.initial.float() if problem.initial.dtype in HALF else problem.initial
    on_gpu = device.type == "cuda"
    missing = cuda.why_not(compiled.fused, device) if on_gpu else cpu.why_not(compiled.fused, initial.dtype)
    if missing is not None:  # the normal form in torch would be slower than the step itself
        return missing
    flat = xs.flatten(0, 1)
    try:
        weights, u = compiled.prepare(cell.function, flat, initial)
    except NotFused as error:  # an operation that works only for the number of rows it was traced with
        refuse(cell.function, str(error))
        return str(error)
    return replace(problem, cell=FusedCell(compiled.fused, weights), u=u.view(*xs.shape[:2], -1), initial=initial)


def _compiled_now(
    cell: GenericCell, problem: Recurrence, xs: Tensor, check: Callable[[], None] | None
) -> Compiled | str:
    """The compiled step of the cell as it is now, compiled anew if it has changed."""
    compiled = compiled_of(cell, problem, xs, check)
    if isinstance(compiled, str) or capturing(xs.device):
        return compiled
    state, is_tuple, _ = given = _examples(cell, problem, xs)
    if unchanged(cell.function, compiled, state, is_tuple, xs.detach().flatten(0, 1)):
        return compiled
    forget(cell.function, *given)
    return compiled_of(cell, problem, xs, check)


def compiled_of(
    cell: GenericCell, problem: Recurrence, xs: Tensor, check: Callable[[], None] | None = None
) -> Compiled | str:
    """The compiled step of the cell, or why there is none."""
    return compiled_for(cell.function, *_examples(cell, problem, xs), check=check)


def _examples(cell: GenericCell, problem: Recurrence, xs: Tensor) -> tuple[tuple[Tensor, ...], bool, Tensor]:
    parts = cell.unpack(problem.initial.detach())
    return parts if isinstance(parts, tuple) else (parts,), cell.is_tuple, xs


def gap(cell: GenericCell, problem: Recurrence, xs: Tensor, states: tuple[Tensor, ...], dtype: torch.dtype) -> float:
    """How far a few steps of the solved recurrence, with states `(T, B, part)` each, are from those of the cell itself.

    The cell is run in its own dtype on the states before these steps. If the difference is more than rounding, that of
    the normal form is returned instead, since a solver may be told to leave jumps.
    """
    from timeloom.compile.fuse import apart

    if capturing(xs.device):  # nothing can be read while a CUDA graph is captured
        return 0.0
    checked = _checked(problem, xs.device)
    if checked is None:
        return 0.0
    tokens, sequence, begins = checked
    if problem.resets is not None:
        begins = begins | problem.resets.flatten()[tokens].unsqueeze(-1)

    def states_at(tokens: Tensor) -> Tensor:
        return torch.cat([part.flatten(0, 1).index_select(0, tokens) for part in states], -1)

    before = states_at((tokens - problem.batch).clamp_(min=0))
    before = torch.where(begins, problem.initial.detach().index_select(0, sequence), before)
    x, initial = xs.detach().flatten(0, 1).index_select(0, tokens), problem.initial
    found = apart(cell, before, x, states_at(tokens), dtype)
    if found <= rounding_of(dtype):
        return found
    with torch.no_grad():
        u = problem.u.detach().flatten(0, 1).index_select(0, tokens)
        return apart(cell, before, x, problem.cell.step(before.to(initial), u), dtype)


Checked = tuple[Tensor, Tensor, Tensor]
"""Of the steps to compare: `t · B + sequence`, the sequence, and whether it is its first step `(·, 1)`."""


def _checked(problem: Recurrence, device: torch.device) -> Checked | None:
    """The steps to compare; None if there are none."""
    if problem.lengths is None:
        return _evenly_checked(problem.steps, problem.batch, device)
    return _steps_of(problem.ends(), problem.batch, device)


@lru_cache(maxsize=64)
def _evenly_checked(steps: int, batch: int, device: torch.device) -> Checked | None:
    with torch.inference_mode(False):  # what is kept must serve calls in any mode
        return _steps_of(torch.full((batch,), steps, device="cpu"), batch, device)


def _steps_of(lengths: Tensor, batch: int, device: torch.device) -> Checked | None:
    sequence = torch.arange(CHECKED_ROWS, device="cpu") % batch
    sequence = sequence[lengths[sequence] > 0]
    if len(sequence) == 0:
        return None
    share = torch.linspace(0, 1, CHECKED_ROWS, dtype=torch.float64, device="cpu")[: len(sequence)]
    at = (share * (lengths[sequence] - 1)).long()
    return (at * batch + sequence).to(device), sequence.to(device), (at == 0).unsqueeze(-1).to(device)
