"""The forward solve: all states of a recurrence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from timeloom.kernels import ReferenceSweeper
from timeloom.mgrit.propagators import Forward
from timeloom.mgrit.recorded import Coarsen, key_of, over
from timeloom.problem import Recurrence, Segments, cut, empty_states
from timeloom.report import SolveReport
from timeloom.solve.chain import Chain, Entered
from timeloom.solve.linearize import carry, leaving, window_of
from timeloom.solve.plan import Plan
from timeloom.solve.residual import SHARE_OF_BOX
from timeloom.solve.tangents import by_differences


def solve_states(
    problem: Recurrence,
    plan: Plan,
    sweeper: ReferenceSweeper,
    states: list[Tensor] | None = None,
    entered: Entered | None = None,
) -> tuple[list[Tensor], SolveReport]:
    """States before every step and after the last, one `(T + 1, B, part)` for each part of the state.

    Steps past the end of a sequence hold zeros. `states` and `entered` are the results of a first sweep over all
    chunks, if there was one, from which the solve continues.
    """
    if states is None:
        states = empty_states(problem.steps, problem.initial, problem.cell.parts, zeroed=problem.lengths is not None)
    chain = forward_chain(problem, plan, sweeper, states)
    return states, plan.march(chain if entered is None else replace(chain, entered=entered))


def forward_chain(
    problem: Recurrence, plan: Plan, sweeper: ReferenceSweeper, states: list[Tensor], onward: bool = False
) -> Chain:
    """The chain of chunks, first to last; sweeps write `states`. `onward`: whether it continues on another rank."""
    segments = cut(problem, plan.chunk)
    lengths = problem.ends()

    def sweep(rows: Segments, starts: Tensor, _: Tensor, want_decay: bool) -> tuple[Tensor, Tensor | None]:
        return sweeper.forward(rows, starts, states, want_decay)

    def enter(rows: Segments, lead: int, _: Tensor, want_decay: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        if problem.guess is not None:
            return problem.guess.enter(sweeper, rows, lead, states, want_decay)
        return sweeper.forward_entering(rows, lead, states, want_decay)

    def finish(links: Tensor, sequences: Tensor, starts: Tensor) -> Tensor:
        rows = segments[(links * problem.batch + sequences).cpu()]
        return sweeper.forward(Segments(rows.sequence, rows.begin, lengths[rows.sequence]), starts, states)[0]

    links = -(-problem.steps // plan.chunk)
    anchors = torch.zeros(links, problem.batch, dtype=torch.bool, device="cpu")
    anchors[:1] = True
    return Chain(
        segments=segments,
        first=problem.initial,
        neutral=problem.initial,
        anchors=anchors,
        parts=problem.cell.parts,
        sweep=sweep,
        enter=enter,
        transfer=lambda rows, starts: sweeper.transfer(rows, states, starts),
        tangent=by_differences(lambda rows, starts: sweeper.forward(rows, starts)[0], segments, problem.u),
        finish=finish,
        bound=problem.cell.bound(problem.initial),
        guess=None if problem.guess is None or plan.warmup else problem.guess.starts(plan.chunk, links),
        carry=_carry(problem, plan),
        leave=_leave(problem, plan),
        certify=sweeper.certifier(SHARE_OF_BOX, fading=False),
        coarsen=_coarsen(problem, onward),
    )


def _coarsen(problem: Recurrence, onward: bool) -> Coarsen:
    """Coarse steps of the states, of the whole problem or of the tensors that it is made of."""
    key = None if onward else key_of(problem)
    if key is None:
        return Coarsen((), lambda _, coarsening: Forward.of(problem, coarsening, onward))
    given = problem.u, problem.initial, *problem.cell.weights
    return Coarsen(given, lambda given, coarsening: Forward.of(over(problem, given)[0], coarsening), ("states", key))


def _carry(problem: Recurrence, plan: Plan) -> Callable[[Tensor, Tensor, Tensor | None], Tensor] | None:
    how = plan.linearization
    if how is None:
        return None
    window = window_of(problem, how, inner=True)
    return lambda jump, starts, damping: carry(how, window, jump, starts, False, damping)


def _leave(problem: Recurrence, plan: Plan) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor] | None] | None:
    how = plan.linearization
    if how is None:
        return None
    window = window_of(problem, how)
    return lambda moves, starts: leaving(how, window, moves, starts)


def final_state(problem: Recurrence, states: list[Tensor]) -> Tensor:
    """The state after each sequence's last step, `(B, S)`."""
    if problem.lengths is None:
        return last_of(states)
    at = problem.lengths.to(states[0].device), torch.arange(problem.batch, device=states[0].device)
    return torch.cat([part[at] for part in states], -1)


def last_of(states: list[Tensor]) -> Tensor:
    """The last state, with all its parts joined, `(B, S)`."""
    return torch.cat([part[-1] for part in states], -1)
