"""The backward solve, `λ[t-1] = J[t]ᵀ λ[t] + g[t-1]` over reversed time, and what plugs it into autograd."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from timeloom.cells.base import Cell
from timeloom.cells.generic import GenericCell
from timeloom.eager import eager
from timeloom.linearize import carry, leaving, window_of
from timeloom.links import Chain
from timeloom.memory import empty
from timeloom.mgrit.monitor import compare
from timeloom.mgrit.propagators import Adjoint as CoarseAdjoint
from timeloom.problem import Recurrence, Segments, cut
from timeloom.report import GradientCheck, SolveReport
from timeloom.solve import Plan
from timeloom.sweep import AdjointData
from timeloom.sweep import sweeper as choose_sweeper
from timeloom.trajectory import solve_states

Note = Callable[[SolveReport], None]
Found = TypeVar("Found")
Adjoint = Callable[[Recurrence, list[Tensor], Tensor | None, Tensor | None], tuple[Tensor, Tensor, SolveReport]]
"""`solve_adjoint` with a plan, or what stands in for it over many ranks."""


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


def solve_backwards(
    problem: Recurrence,
    states: list[Tensor],
    plan: Plan,
    incoming: Tensor | None,
    final_grad: Tensor,
    march: Callable[[Chain], Found],
    onward: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None, Found]:
    """Gate gradients `(T, B, G)`, the gradient of the state before the first step and of the one that resets put back,
    both `(B, S)`, the latter None without resets, and what `march` returns.
    `onward`: whether the chain goes on on another rank.
    """
    sweeper = choose_sweeper(problem)
    if incoming is not None:
        incoming = incoming.contiguous()
    links, batch = -(-problem.steps // plan.chunk), problem.batch
    segments = cut(problem, plan.chunk, backwards=True)
    lengths, device = problem.ends(), problem.u.device
    gate_grads = empty(problem.steps, batch, problem.cell.gate_width, like=problem.initial)
    if problem.lengths is not None:
        gate_grads.zero_()
    initial_grad = final_grad.clone()  # what a sequence of no steps keeps
    reset_grads = problem.initial.new_zeros(links * batch, problem.cell.size) if problem.resets is not None else None

    def data_for(rows: Segments) -> AdjointData:
        into_resets = None if reset_grads is None else final_grad.new_empty(len(rows), final_grad.shape[1])
        return AdjointData(states, incoming, gate_grads, into_resets)

    def keep(rows: Segments, where: Tensor, begins: Tensor, into_resets: Tensor | None) -> None:
        if reset_grads is not None and into_resets is not None:
            reset_grads[where.to(device)] = into_resets
        if len(rows) == links * batch and problem.lengths is None:
            initial_grad.copy_(begins[-batch:])
            return
        at_start = (rows.begin == 0).nonzero().squeeze(-1)
        initial_grad[rows.sequence[at_start].to(device)] = begins[at_start.to(device)]

    def sweep(rows: Segments, ends: Tensor, where: Tensor, want_leak: bool) -> tuple[Tensor, Tensor | None]:
        data = data_for(rows)
        begins, leak = sweeper.adjoint(rows, ends, data, want_leak)
        keep(rows, where, begins, data.reset_grads)
        return begins, leak

    def enter(rows: Segments, lead: int, where: Tensor, want_leak: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        data = data_for(rows)
        ends, begins, leak = sweeper.adjoint_entering(rows, lead, final_grad, data, want_leak)
        keep(rows, where, begins, data.reset_grads)
        return ends, begins, leak

    def finish(bad_links: Tensor, sequences: Tensor, ends: Tensor) -> Tensor:
        chain_rows = (bad_links * batch + sequences).cpu()
        if reset_grads is not None:
            later = torch.arange(links, device=device)[:, None] >= bad_links
            kept = reset_grads.view(links, batch, -1)
            kept[:, sequences] = torch.where(later.unsqueeze(-1), 0, kept[:, sequences])  # what overflowed there too
        rows = segments[chain_rows]
        return sweep(Segments(rows.sequence, torch.zeros_like(rows.begin), rows.end), ends, chain_rows, False)[0]

    anchors = (segments.end == lengths[segments.sequence]) & (segments.end > segments.begin)
    anchors = anchors.view(links, batch)
    carrying = _carrying(problem, states, plan)
    chain = Chain(
        segments=segments,
        first=final_grad,
        neutral=torch.zeros_like(final_grad),
        anchors=anchors,
        parts=problem.cell.parts,
        sweep=sweep,
        enter=enter,
        transfer=lambda rows, _: sweeper.transfer(rows, states).transpose(-1, -2),
        finish=finish,
        fading=True,
        guess=_guess(problem, plan, carrying, incoming, final_grad),
        carry=None if carrying is None else lambda jump, *_: carrying(jump.flip(0), None).flip(0),
        leave=_leaving(problem, states, plan),
        certify=sweeper.certifier(0.0, fading=True),
        coarsen=lambda coarsening: CoarseAdjoint.of(problem, states, incoming, final_grad, anchors, coarsening, onward),
    )
    found = march(chain)
    into_resets = None if reset_grads is None else reset_grads.view(links, batch, -1).sum(0)
    return gate_grads, initial_grad, into_resets, found


def _beside_exact(
    problem: Recurrence,
    states: list[Tensor],
    gate_grads: Tensor,
    plan: Plan,
    incoming: Tensor | None,
    final_grad: Tensor,
) -> GradientCheck:
    """These gradients beside those of a sequential forward and backward pass, for the same gradient of the loss."""
    serial = Plan(problem.steps, "none", 0, plan.tolerance, 1, plan.on_divergence, "the truth to compare with")
    exact_states, _ = solve_states(problem, serial, choose_sweeper(problem))
    exact_gates, _, _ = solve_adjoint(problem, exact_states, incoming, final_grad, serial)
    given, exact = (
        _weight_grads(problem, at, gates) or (gates,)
        for at, gates in ((states, gate_grads), (exact_states, exact_gates))
    )
    return compare(given, exact, plan.gradient_tolerance)


def _weight_grads(problem: Recurrence, states: list[Tensor], gate_grads: Tensor) -> tuple[Tensor, ...]:
    previous = [part.flatten(0, 1) for part in _previous(problem, states)]
    return problem.cell.weight_grads(previous, gate_grads.flatten(0, 1))


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
    problem: Recurrence, plan: Plan, carrying: Carrying | None, incoming: Tensor | None, final_grad: Tensor
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


def _previous(problem: Recurrence, states: list[Tensor]) -> list[Tensor]:
    """Parts of the state before every step, `(T, B, part)`, resets applied."""
    if problem.resets is None:
        return [part[:-1] for part in states]
    origin = problem.initial.split(problem.cell.parts, -1)
    return [torch.where(problem.resets.unsqueeze(-1), o, part[:-1]) for part, o in zip(states, origin, strict=True)]


class _Solved(torch.autograd.Function):
    """A solved recurrence on autograd's tape: what the backward pass needs, saved so that autograd can guard and
    free it.
    """

    @staticmethod
    def keep(
        ctx: Any, problem: Recurrence, states: list[Tensor], solve: Adjoint, note: Note, shared: Tensor | None
    ) -> None:
        ctx.set_materialize_grads(False)
        ctx.cell, ctx.lengths, ctx.resets, ctx.solve, ctx.note = (
            problem.cell,
            problem.lengths,
            problem.resets,
            solve,
            note,
        )
        ctx.cell = problem.cell.with_weights(())
        ctx.counts = (len(problem.cell.weights), len(states))
        ctx.save_for_backward(problem.u, problem.initial, shared, *problem.cell.weights, *states)

    @staticmethod
    def recall(ctx: Any) -> tuple[Recurrence, list[Tensor]]:
        refuse_second_order()
        u, initial, _, *rest = ctx.saved_tensors
        weights, states = rest[: ctx.counts[0]], rest[ctx.counts[0] :]
        return Recurrence(ctx.cell.with_weights(tuple(weights)), u, initial, ctx.lengths, ctx.resets), list(states)


class HandWritten(_Solved):
    """States of a cell with hand-written derivatives, as a function of its inputs, initial state and weights.

    Returns the output part `(T, B, parts[0])` and the final state `(B, S)`.
    """

    @staticmethod
    def forward(
        ctx: Any, problem: Recurrence, states: list[Tensor], final: Tensor, solve: Adjoint, note: Note, *_: Tensor
    ) -> tuple[Tensor, Tensor]:
        outputs, shared = output_of(states)
        _Solved.keep(ctx, problem, states, solve, note, shared)
        return outputs, final

    @staticmethod
    @eager
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        problem, states = _Solved.recall(ctx)
        with torch.autocast(problem.u.device.type, enabled=False):  # it may be on around the backward pass
            return HandWritten.gradients(ctx, problem, states, *grads)

    @staticmethod
    def gradients(
        ctx: Any, problem: Recurrence, states: list[Tensor], incoming: Tensor | None, final_grad: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        gate_grads, initial_grad, report = ctx.solve(problem, states, incoming, final_grad)
        ctx.note(report)
        cell = problem.cell
        weight_grads: tuple[Tensor | None, ...] = (None,) * len(cell.weights)
        if any(ctx.needs_input_grad[7:]):
            weight_grads = _weight_grads(problem, states, gate_grads)
        return None, None, None, None, None, cell.input_grads(gate_grads), initial_grad, *weight_grads


class AttachAdjoint(_Solved):
    """Identity on one differentiated evaluation of all steps; its backward turns gradients on states into adjoints.

    The evaluation was made at detached previous states. Given the adjoint of each state rather than the
    loss's own gradient, autograd of that evaluation delivers every input's and parameter's gradient at once.
    """

    @staticmethod
    def forward(
        ctx: Any, problem: Recurrence, states: list[Tensor], final: Tensor, solve: Adjoint, note: Note, *_: Tensor
    ) -> tuple[Tensor, Tensor]:
        outputs = torch.cat([part[1:] for part in states], -1)
        _Solved.keep(ctx, problem, states, solve, note, None)
        return outputs, final

    @staticmethod
    @eager
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        problem, states = _Solved.recall(ctx)
        adjoints, initial_grad, report = ctx.solve(problem, states, *grads)
        ctx.note(report)
        return None, None, None, None, None, adjoints.flatten(0, 1), initial_grad


def attach(
    problem: Recurrence, states: list[Tensor], final: Tensor, solve: Adjoint, note: Note, u: Tensor, initial: Tensor,
    cell: Cell,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Outputs `(T, B, ·)` and final state `(B, S)` on autograd's tape.

    `problem` is what was solved, detached, with its `states` and `final` state; `solve` is to do so backward. `u`,
    `initial` and `cell` are the live ones. For a generic cell the outputs are whole states.
    """
    if isinstance(cell, GenericCell):
        previous = torch.cat(_previous(problem, states), -1).flatten(0, 1)
        live = (cell.step(previous, u.flatten(0, 1)), initial)
        outputs, final = AttachAdjoint.apply(problem, states, final, solve, note, *live)
    else:
        outputs, final = HandWritten.apply(problem, states, final, solve, note, u, initial, *cell.weights)
    return outputs, final


def refuse_second_order(instead: str = "solver='sequential', without lengths= or resets=") -> None:
    """For a backward pass that is itself being recorded; `instead` is what has second-order gradients."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "timeloom's parallel-in-time gradients cannot be differentiated again (create_graph=True): the solves "
            f"behind them are not on the tape. For second-order gradients use {instead}."
        )


def output_of(states: list[Tensor]) -> tuple[Tensor, Tensor | None]:
    """The states after every step as an output, and that once more if it shares their memory, for autograd to guard.

    Torch lets users write into what a GRU or RNN returns on a CPU, so there it is a copy. An LSTM's, and all on a GPU,
    are not to be written into before the backward pass, in torch neither.
    """
    after = states[0][1:]
    if after.device.type == "cpu" and len(states) == 1:
        return after.clone(), None
    outputs = _alias(after)
    return outputs, outputs


def _alias(tensor: Tensor) -> Tensor:
    """The same memory as a tensor of its own, which autograd does not take for a view."""
    alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return alias.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
