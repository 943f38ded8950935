"""The forward solve: all states of a recurrence."""

from __future__ import annotations

import torch
from torch import Tensor

from timeloom.memory import empty
from timeloom.problem import Recurrence, Segments, cut
from timeloom.report import SolveReport
from timeloom.solve import SHARE_OF_BOX, Chain, Plan, march
from timeloom.sweep import ReferenceSweeper


def solve_states(problem: Recurrence, plan: Plan, sweeper: ReferenceSweeper) -> tuple[list[Tensor], SolveReport]:
    """States before every step and after the last, one `(T + 1, B, part)` for each part of the state.

    Steps past the end of a sequence hold zeros.
    """
    states = empty_states(problem)
    return states, march(forward_chain(problem, plan.chunk, sweeper, states), plan)


def forward_chain(problem: Recurrence, chunk: int, sweeper: ReferenceSweeper, states: list[Tensor]) -> Chain:
    """The chain of chunks, first to last; sweeps write `states`."""
    segments = cut(problem, chunk)
    lengths = problem.ends()

    def sweep(rows: Segments, starts: Tensor, _: Tensor, want_leak: bool) -> tuple[Tensor, Tensor | None]:
        return sweeper.forward(rows, starts, states, want_leak)

    def enter(rows: Segments, lead: int, _: Tensor, want_leak: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        return sweeper.forward_entering(rows, lead, states, want_leak)

    def finish(links: Tensor, sequences: Tensor, starts: Tensor) -> Tensor:
        rows = segments[(links * problem.batch + sequences).cpu()]
        return sweeper.forward(Segments(rows.sequence, rows.begin, lengths[rows.sequence]), starts, states)[0]

    links = -(-problem.steps // chunk)
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
        transfer=lambda rows: sweeper.transfer(rows, states),
        finish=finish,
        bound=problem.cell.bound(problem.initial),
        certify=sweeper.certifier(SHARE_OF_BOX),
    )


def final_state(problem: Recurrence, states: list[Tensor]) -> Tensor:
    """The state after each sequence's last step, `(B, S)`."""
    if problem.lengths is None:
        return torch.cat([part[-1] for part in states], -1)
    at = problem.lengths.to(states[0].device), torch.arange(problem.batch, device=states[0].device)
    return torch.cat([part[at] for part in states], -1)


def empty_states(problem: Recurrence) -> list[Tensor]:
    """Room for all states, the first one filled in; zeros where a sequence may have ended."""
    shape = (problem.steps + 1, problem.batch)
    states = [empty(*shape, width, like=problem.initial) for width in problem.cell.parts]
    if problem.lengths is not None:
        for part in states:
            part.zero_()
    for part, initial in zip(states, problem.initial.split(problem.cell.parts, -1), strict=True):
        part[0] = initial
    return states
