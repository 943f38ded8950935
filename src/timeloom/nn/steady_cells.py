"""Calls of users' cells by replays alone: which kinds of calls are known, and when a call is made that way."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from timeloom.auto.layer_experience import LayerExperience
from timeloom.cells.generic import GenericCell
from timeloom.compile.call import compiled_of
from timeloom.compile.surroundings import Unseen
from timeloom.distributed.context import alone
from timeloom.nn.steady import possible
from timeloom.problem import Recurrence
from timeloom.solve.plan import Planner
from timeloom.solve.steady_cell import SteadyCell
from timeloom.torch_state import streams
from timeloom.torch_state.transforms import transformed

if TYPE_CHECKING:
    from timeloom.compile.fuse import Compiled

CALLS_BEFORE = 2
"""Calls of a kind that are solved without recording: plans change in the first ones, and recording takes as long as
some calls."""
RARER, MOST_BEFORE = 2, 64
"""Factor by which that number grows each time that the cell has changed for good, and its maximum."""
LOOK_AFTER = 256
"""Calls after which one is solved without replays, to compare a few steps with the cell's own."""
MOST_KINDS = 64


class Run(NamedTuple):
    """One recurrence that was solved in a call."""

    cell: GenericCell
    problem: Recurrence
    """The recurrence over the user's own cell."""
    x: Tensor
    """`(T, B, ...)`"""
    experience: LayerExperience


@dataclass(eq=False)
class _Kind:
    calls: int = 0
    needed: int = CALLS_BEFORE
    missed: int = 0
    """Calls since the cell was last as recorded; it may return to that, as after `functional_call`."""
    cells: list[SteadyCell] | None = None
    why_not: str = ""

    def drop(self) -> None:
        """Drop the recordings and start over."""
        for cell in self.cells or ():
            cell.drop()
        self.cells, self.calls, self.missed = None, 0, 0

    def rarer(self) -> None:
        """Require more calls before the next recording."""
        self.needed, self.calls = min(RARER * self.needed, MOST_BEFORE), 0


class KnownCalls:
    """The calls of a module or of one function, by kind."""

    def __init__(self) -> None:
        self._kinds: dict[Hashable, _Kind] = {}

    def __reduce__(self) -> Any:
        """A copy of a module has no recordings: it finds its own steady state."""
        return KnownCalls, ()

    def find(self, key: Hashable, functions: Iterable[Any]) -> list[SteadyCell] | None:
        """The steady cells for the next call of this kind of these functions, if replays can make it; else None."""
        kind = self._kinds.get(key)
        if kind is None or kind.cells is None:
            return None
        kind.calls += 1
        theirs = zip(kind.cells, functions, strict=True)
        if not all(cell.cell.function == function and cell.around.same() for cell, function in theirs):
            kind.missed += 1
            if kind.missed >= kind.needed:
                kind.drop()
                kind.rarer()
            return None
        kind.missed = 0
        if not all(cell.stands() for cell in kind.cells):
            kind.drop()
            return None
        return kind.cells if kind.calls % LOOK_AFTER else None

    def settle(self, key: Hashable, runs: Sequence[Run], solver: Planner, shown: int | None, ends: bool) -> None:
        """Have the next call of this kind made by replays, if calls like it have been made often enough.

        shown: number of parts of all states that are returned, None for all.
        ends: whether the parts of the final state are returned.
        """
        if len(self._kinds) >= MOST_KINDS:
            self._kinds.clear()
        kind = self._kinds.setdefault(key, _Kind())
        if kind.cells is not None:
            if not kind.missed:  # a call without replays, for comparison
                self._stay(kind, [_compiled(run) for run in runs])
            return
        kind.calls += 1
        if kind.why_not or kind.calls < kind.needed:
            return
        made = [_compiled(run) for run in runs]
        if any(isinstance(one, str) for one in made):  # not yet, or not at all
            kind.rarer()
            return
        try:
            found = [_steady(run, one, solver, shown, ends) for run, one in zip(runs, made, strict=True)]
        except Unseen as reason:
            kind.why_not = str(reason)
            return
        if all(found):
            kind.cells = [cell for cell in found if cell is not None]

    def _stay(self, kind: _Kind, made: list[Compiled | str]) -> None:
        """Drop the recordings unless they are still those of the compiled steps."""
        if any(isinstance(one, str) for one in made):
            kind.why_not = "its step gave other values than its kernels"
        elif all(cell.compiled is one for cell, one in zip(kind.cells or (), made, strict=True)):
            return
        kind.drop()

    @property
    def reasons(self) -> list[str]:
        """Why calls of some kinds are not made by replays."""
        return [kind.why_not for kind in self._kinds.values() if kind.why_not]


def _compiled(run: Run) -> Compiled | str:
    return compiled_of(run.cell, run.problem, run.x)


def _steady(run: Run, compiled: Any, solver: Planner, shown: int | None, ends: bool) -> SteadyCell | None:
    parts = len(run.cell.parts) if shown is None else shown
    taped = torch.is_grad_enabled()  # a cell may hold any tensors
    return SteadyCell.of(run.cell, compiled, run.x, run.problem.initial, solver, run.experience, parts, ends, taped)


def kind_of(x: Tensor, state: Any, *more: Hashable) -> Hashable:
    """What must be the same between calls, apart from the cell; None if calls like this cannot be made by replays.

    state: the initial state, or None.
    """
    parts = state if isinstance(state, tuple) else () if state is None else (state,)
    if type(x) is not Tensor or x.dim() < 2 or not all(type(part) is Tensor for part in parts):
        return None
    if not possible(x) or transformed() or not alone() or torch.is_inference_mode_enabled():
        return None
    own = x.shape, x.dtype, x.device, x.requires_grad, torch.is_grad_enabled(), streams.stream_of(x.device)
    given = tuple((part.shape, part.dtype, part.device, part.requires_grad) for part in parts)
    key = own, given, isinstance(state, tuple), torch.are_deterministic_algorithms_enabled(), *more
    try:
        hash(key)
    except TypeError:  # a user's own solver, or one that holds a list
        return None
    return key
