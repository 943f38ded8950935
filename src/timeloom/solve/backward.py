"""The backward solve: `λ[t-1] = J[t]ᵀ λ[t] + g[t-1]` over reversed time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from timeloom.buffers import empty
from timeloom.kernels import AdjointData
from timeloom.kernels import sweeper as choose_sweeper
from timeloom.mgrit.monitor import compare
from timeloom.mgrit.propagators import Adjoint as CoarseAdjoint
from timeloom.problem import Recurrence, Segments, cut
from timeloom.report import GradientCheck, SolveReport
from timeloom.solve.chain import Chain, Entered
from timeloom.solve.driver import march
from timeloom.solve.forward import solve_states
from timeloom.solve.linearize import carry, leaving, window_of
from timeloom.solve.plan import Plan
from timeloom.solve.tangents import by_adjoint

Found = TypeVar("Found")


class Summed(NamedTuple):
    """Gradients of a cell's inputs `(T, B, K)` and weights, which sweeps have summed on their way."""

    inputs: Tensor
    weights: tuple[Tensor, ...]


def solve_adjoint(
    problem: Recurrence, states: list[Tensor], incoming: Tensor | None, final_grad: Tensor | None, plan: Plan
) -> tuple[Tensor, Tensor, SolveReport]:
    """Gate gradients `(T, B, G)`, the gradient of the initial state `(B, S)`, and the report.

    `incoming` `(T, B, ≤ S)` is the loss's gradient on the leading part of every state, `final_grad` `(B, S)` on the
    last.
    """
    if final_grad is None:
        final_grad = torch.zeros_like(problem.initial)
    gate_grads, initial_grad, into_resets, report = solve_backwards(
        problem, states, plan, incoming, final_grad, plan.march
    )
    if into_resets is not None:
        initial_grad += into_resets
    if plan.check_gradient:
        report = replace(report, gradient=_beside_exact(problem, states, gate_grads, plan, incoming, final_grad))
    return gate_grads, initial_grad, report


def solve_summed(
    problem: Recurrence, states: list[Tensor], incoming: Tensor | None, final_grad: Tensor | None, plan: Plan
) -> tuple[Tensor | Summed, Tensor, SolveReport]:
    """`solve_adjoint`, with the sums of the gate gradients in their place where sweeps make them on their way."""
    if plan.check_gradient:
        return solve_adjoint(problem, states, incoming, final_grad, plan)
    if final_grad is None:
        final_grad = torch.zeros_like(problem.initial)
    sweeps = _Sweeps(problem, states, plan.chunk, incoming, final_grad, summing=True)
    report = _drive(problem, states, plan, sweeps, final_grad, plan.march)
    into_resets = sweeps.into_resets()
    initial_grad = sweeps.initial_grad if into_resets is None else sweeps.initial_grad + into_resets
    return sweeps.summed() or sweeps.gate_grads, initial_grad, report


def solve_backwards(
    problem: Recurrence,
    states: list[Tensor],
    plan: Plan,
    incoming: Tensor | None,
    final_grad: Tensor,
    drive: Callable[[Chain], Found],
    onward: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None, Found]:
    """Gate gradients `(T, B, G)`, the gradient of the state before the first step and of the one that resets put back,
    both `(B, S)`, the latter None without resets, and what `drive` returns.
    `onward`: whether the chain goes on on another rank.
    """
    sweeps = _Sweeps(problem, states, plan.chunk, incoming, final_grad)
    found = _drive(problem, states, plan, sweeps, final_grad, drive, onward)
    return sweeps.gate_grads, sweeps.initial_grad, sweeps.into_resets(), found


def _drive(
    problem: Recurrence,
    states: list[Tensor],
    plan: Plan,
    sweeps: _Sweeps,
    final_grad: Tensor,
    drive: Callable[[Chain], Found],
    onward: bool = False,
) -> Found:
    """Solve for the gradients at the ends of all chunks; what else there is of them is where the sweeps put it."""
    segments, incoming = sweeps.segments, sweeps.data.incoming
    anchors = (segments.end == problem.ends()[segments.sequence]) & (segments.end > segments.begin)
    anchors = anchors.view(sweeps.links, problem.batch)
    carrying = _carrying(problem, states, plan)
    chain = Chain(
        segments=segments,
        first=final_grad,
        neutral=torch.zeros_like(final_grad),
        anchors=anchors,
        parts=problem.cell.parts,
        sweep=sweeps.sweep,
        enter=sweeps.enter,
        transfer=lambda rows, _: sweeps.sweeper.transfer(rows, states).transpose(-1, -2),
        tangent=by_adjoint(sweeps.through, segments, problem.u),
        finish=sweeps.finish,
        fading=True,
        guess=_guess(problem, carrying, incoming, final_grad),
        carry=None if carrying is None else lambda jump, *_: carrying(jump.flip(0), None).flip(0),
        leave=_leaving(problem, states, plan),
        certify=sweeps.sweeper.certifier(0.0, fading=True),
        coarsen=lambda coarsening: CoarseAdjoint.of(problem, states, incoming, final_grad, anchors, coarsening, onward),
    )
    return drive(chain)


class _Sweeps:
    """Sweeps over the chunks, last one first, and what they leave beside the gradients that they end with.

    gate_grads: `(T, B, G)`; with sums in their place, where the sweeper makes such, of no steps.
    initial_grad: `(B, S)`, of the state before the first step.
    """

    def __init__(
        self,
        problem: Recurrence,
        states: list[Tensor],
        chunk: int,
        incoming: Tensor | None,
        final_grad: Tensor,
        summing: bool = False,
    ) -> None:
        self.problem, self.sweeper = problem, choose_sweeper(problem)
        self.segments = cut(problem, chunk, backwards=True)
        self.links, self._final_grad = -(-problem.steps // chunk), final_grad
        self._sums = self.sweeper.new_sums() if summing else None
        steps = 0 if self._sums is not None else problem.steps
        self.gate_grads = empty(steps, problem.batch, problem.cell.gate_width, like=problem.initial)
        if problem.lengths is not None:
            self.gate_grads.zero_()
        written = self.gate_grads if self._sums is None else None
        self.data = AdjointData(states, None if incoming is None else incoming.contiguous(), written)
        self._ends = torch.empty_like(final_grad).repeat(self.links, 1) if self._sums is not None else final_grad
        """`(C·B, S)`: the gradients that each chunk was last swept from."""
        self._finished: list[tuple[Tensor, Tensor, Segments, Tensor]] = []
        """Links and sequences from which on chunks were swept as one, as which rows, from which gradients."""
        self._swept_all = self._stale = False
        """Whether all of these are known, and whether there were sweeps over some rows since those that were summed."""
        self.initial_grad = final_grad.clone()  # what a sequence of no steps keeps
        self._reset_grads: Tensor | None = None
        """`(C·B, S)`, what the resets of each row take."""
        if problem.resets is not None:
            self._reset_grads = problem.initial.new_zeros(len(self.segments), problem.cell.size)

    def sweep(self, rows: Segments, ends: Tensor, where: Tensor, want_decay: bool) -> tuple[Tensor, Tensor | None]:
        if self._is_worth_all(rows):  # one sweep over all that can be summed, rather than one over most and one for sums
            all_ends = self._ends.index_copy(0, where, ends)
            begins, decay = self.sweep(self.segments, all_ends, torch.arange(len(all_ends), device="cpu"), want_decay)
            return begins[where], None if decay is None else decay[where]
        data = self._data_for(rows)
        begins, decay = self.sweeper.adjoint(rows, ends, data, want_decay)
        self._keep(rows, where, begins, data.reset_grads)
        self._note_ends(where, ends, data)
        return begins, decay

    def through(self, rows: Segments, ends: Tensor) -> Tensor:
        """What comes of gradients at the ends alone, without those that the loss adds on the way."""
        return self.sweeper.adjoint(rows, ends, AdjointData(self.data.states, None))[0]

    def enter(self, rows: Segments, lead: int, where: Tensor, want_decay: bool) -> Entered:
        data = self._data_for(rows)
        ends, begins, decay = self.sweeper.adjoint_entering(rows, lead, self._final_grad, data, want_decay)
        self._keep(rows, where, begins, data.reset_grads)
        self._note_ends(where, ends, data)
        return ends, begins, decay

    def finish(self, bad_links: Tensor, sequences: Tensor, ends: Tensor) -> Tensor:
        batch = self.problem.batch
        chain_rows = (bad_links * batch + sequences).cpu()
        if self._reset_grads is not None:
            later = torch.arange(self.links, device=bad_links.device)[:, None] >= bad_links
            kept = self._reset_grads.view(self.links, batch, -1)
            kept[:, sequences] = torch.where(later.unsqueeze(-1), 0, kept[:, sequences])  # what overflowed there too
        rows = self.segments[chain_rows]
        rows = Segments(rows.sequence, torch.zeros_like(rows.begin), rows.end)
        data = replace(self._data_for(rows), sums=None)
        begins, _ = self.sweeper.adjoint(rows, ends, data)
        self._keep(rows, chain_rows, begins, data.reset_grads)
        self._finished.append((bad_links, sequences, rows, ends))
        self._stale = True
        return begins

    def summed(self) -> Summed | None:
        """The sums, where there are any, of the sweeps that hold now."""
        if self._sums is None:
            return None
        if self._stale:
            rows, ends = self._rows_that_hold()
            self._sums.clear()
            self.sweeper.adjoint(rows, ends, replace(self.data, sums=self._sums))
        return Summed(self._sums.inputs, self._sums.weights())

    def _rows_that_hold(self) -> tuple[Segments, Tensor]:
        """All chunks, those that were swept as one being one row, and the gradients at their ends."""
        apart = torch.ones(self.links, self.problem.batch, dtype=torch.bool, device="cpu")
        for links, sequences, *_ in self._finished:
            for link, sequence in zip(links.tolist(), sequences.tolist(), strict=True):
                apart[link:, sequence] = False
        alone = apart.flatten().nonzero().squeeze(-1)
        pieces = [(self.segments[alone], self._ends[alone]), *[(rows, ends) for *_, rows, ends in self._finished]]
        columns = [torch.cat(column) for column in zip(*[rows.columns for rows, _ in pieces], strict=True)]
        return Segments(*columns), torch.cat([ends for _, ends in pieces])

    def _note_ends(self, where: Tensor, ends: Tensor, data: AdjointData) -> None:
        if self._sums is not None:
            self._ends[where] = ends
            self._stale = data.sums is None
            self._swept_all |= len(where) == len(self.segments)

    def into_resets(self) -> Tensor | None:
        """The gradient of the state that resets put back, `(B, S)`; None without resets."""
        kept = self._reset_grads
        return None if kept is None else kept.view(self.links, self.problem.batch, -1).sum(0)

    def _data_for(self, rows: Segments) -> AdjointData:
        data = self.data
        if self._sums is not None and self._are_all(rows):
            self._sums.clear()
            data = replace(data, sums=self._sums)
        if self._reset_grads is None:
            return data
        return replace(data, reset_grads=self._final_grad.new_empty(len(rows), self._final_grad.shape[1]))

    def _is_worth_all(self, rows: Segments) -> bool:
        """Whether these are most chunks, and of the others it is known what to sweep them from."""
        return (
            self._swept_all
            and not self._finished
            and len(rows) < len(self.segments) <= 2 * len(rows)
            and not self._are_all(rows)
        )

    def _are_all(self, rows: Segments) -> bool:
        """Whether these are all chunks that have steps."""
        if len(rows) == len(self.segments) or self.problem.lengths is None:
            return len(rows) == len(self.segments)
        return int((rows.end - rows.begin).sum()) == int(self.problem.ends().sum())

    def _keep(self, rows: Segments, where: Tensor, begins: Tensor, into_resets: Tensor | None) -> None:
        problem, device = self.problem, begins.device
        if self._reset_grads is not None and into_resets is not None:
            self._reset_grads[where.to(device)] = into_resets
        if len(rows) == len(self.segments) and problem.lengths is None:
            self.initial_grad.copy_(begins[-problem.batch :])
            return
        at_start = (rows.begin == 0).nonzero().squeeze(-1)
        self.initial_grad[rows.sequence[at_start].to(device)] = begins[at_start.to(device)]


def _beside_exact(
    problem: Recurrence,
    states: list[Tensor],
    gate_grads: Tensor,
    plan: Plan,
    incoming: Tensor | None,
    final_grad: Tensor,
) -> GradientCheck:
    """These gradients beside those of a sequential forward and backward pass, for the same gradient of the loss."""
    serial = replace(plan, driver=march, chunk=problem.steps, warmup=0, linearization=None, check_gradient=False)
    exact_states, _ = solve_states(problem, serial, choose_sweeper(problem))
    exact_gates, _, _ = solve_adjoint(problem, exact_states, incoming, final_grad, serial)
    given, exact = (
        weight_grads_of(problem, at, gates) or (gates,)
        for at, gates in ((states, gate_grads), (exact_states, exact_gates))
    )
    return compare(given, exact, plan.gradient_tolerance)


def weight_grads_of(problem: Recurrence, states: list[Tensor], gate_grads: Tensor) -> tuple[Tensor, ...]:
    """Gradients of the cell's weights; none where it hides its own."""
    previous = [part.flatten(0, 1) for part in previous_states(problem, states)]
    seen = problem.cell.multiplied(previous, problem.u.flatten(0, 1))
    return problem.cell.weight_grads(seen, gate_grads.flatten(0, 1))


Carrying = Callable[[Tensor, Tensor | None], Tensor]
"""`carrying(jumps, incoming)`: gradients `(T, B, S)` on all states from later steps, in the order of time."""


def _carrying(problem: Recurrence, states: list[Tensor], plan: Plan) -> Carrying | None:
    """The linear recurrence of the gradients over single steps, where the plan asks for one."""
    how = plan.linearization
    if how is None:
        return None
    window, at = window_of(problem, how), torch.cat(states, -1)
    return lambda jump, incoming: carry(how, window, jump, at, backwards=True, incoming=incoming)


def _leaving(
    problem: Recurrence, states: list[Tensor], plan: Plan
) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor] | None] | None:
    how = plan.linearization
    if how is None:
        return None
    return lambda moves, _: leaving(
        how, window_of(problem, how, passing=True), moves.flip(0), torch.cat(states, -1), backwards=True
    )


def _guess(
    problem: Recurrence, carrying: Carrying | None, incoming: Tensor | None, final_grad: Tensor
) -> Tensor | None:
    """Gradients behind every step that come from later steps, `(T, B, S)`, last step first: exact up to rounding."""
    if carrying is None:
        return None
    added = final_grad.new_zeros(problem.steps, *final_grad.shape)
    lengths = problem.ends_on_device()
    alive = (lengths > 0).nonzero().squeeze(-1)
    added[lengths[alive] - 1, alive] = final_grad[alive]
    if incoming is not None:
        incoming = pad(incoming, (0, final_grad.shape[1] - incoming.shape[-1]))
    return carrying(added, incoming).flip(0)


def previous_states(problem: Recurrence, states: list[Tensor]) -> list[Tensor]:
    """Parts of the state before every step, `(T, B, part)`, resets applied."""
    if problem.resets is None:
        return [part[:-1] for part in states]
    origin = problem.initial.split(problem.cell.parts, -1)
    return [torch.where(problem.resets.unsqueeze(-1), o, part[:-1]) for part, o in zip(states, origin, strict=True)]
