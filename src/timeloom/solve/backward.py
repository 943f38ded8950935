"""The backward solve: `λ[t-1] = J[t]ᵀ λ[t] + g[t-1]` over reversed time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from timeloom.kernels import sweeper as choose_sweeper
from timeloom.mgrit.grid import Coarsening
from timeloom.mgrit.monitor import compare
from timeloom.mgrit.propagators import Adjoint as CoarseAdjoint
from timeloom.mgrit.propagators import Propagator
from timeloom.mgrit.recorded import Coarsen, Given, key_of, over
from timeloom.problem import Recurrence
from timeloom.report import GradientCheck, SolveReport
from timeloom.solve.adjoint_sweeps import Summed, Sweeps
from timeloom.solve.chain import Chain
from timeloom.solve.driver import march
from timeloom.solve.forward import solve_states
from timeloom.solve.linearize import carry, leaving, window_of
from timeloom.solve.plan import Plan
from timeloom.solve.tangents import by_adjoint

Found = TypeVar("Found")


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
    """`solve_adjoint`, but with sums in place of the gate gradients if the sweeps can sum these up as they go."""
    if plan.check_gradient:
        return solve_adjoint(problem, states, incoming, final_grad, plan)
    if final_grad is None:
        final_grad = torch.zeros_like(problem.initial)
    sweeps = Sweeps(problem, states, plan.chunk, incoming, final_grad, summing=True)
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
    """Gate gradients `(T, B, G)`, two gradients of initial states `(B, S)`, and what `drive` returns.

    The first of the two is the gradient of the state before the first step, the second one that of the state which
    resets restore, None without resets.

    onward: whether the chain continues on another rank.
    """
    sweeps = Sweeps(problem, states, plan.chunk, incoming, final_grad)
    found = _drive(problem, states, plan, sweeps, final_grad, drive, onward)
    return sweeps.gate_grads, sweeps.initial_grad, sweeps.into_resets(), found


def _drive(
    problem: Recurrence,
    states: list[Tensor],
    plan: Plan,
    sweeps: Sweeps,
    final_grad: Tensor,
    drive: Callable[[Chain], Found],
    onward: bool = False,
) -> Found:
    """Solve for the gradients at the ends of all chunks; `sweeps` collects everything else."""
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
        coarsen=_coarsen(problem, states, incoming, final_grad, anchors, onward),
    )
    return drive(chain)


def _coarsen(
    problem: Recurrence,
    states: list[Tensor],
    incoming: Tensor | None,
    final_grad: Tensor,
    anchors: Tensor,
    onward: bool,
) -> Coarsen:
    """Coarse steps of the gradients, of the whole problem or of the tensors that it is made of."""
    key = None if onward else key_of(problem)
    if key is None:
        return Coarsen((), lambda _, how: CoarseAdjoint.of(problem, states, incoming, final_grad, anchors, how, onward))

    def make(given: Given, how: Coarsening) -> list[Propagator]:
        at, (incoming, final, *others) = over(problem, given)
        known: Any = others
        assert final is not None
        return CoarseAdjoint.of(at, known, incoming, final, anchors, how)

    given = problem.u, problem.initial, *problem.cell.weights, incoming, final_grad, *states
    return Coarsen(given, make, ("adjoint", key))


def _beside_exact(
    problem: Recurrence,
    states: list[Tensor],
    gate_grads: Tensor,
    plan: Plan,
    incoming: Tensor | None,
    final_grad: Tensor,
) -> GradientCheck:
    """Compare with the gradients of sequential forward and backward passes, for the same gradient of the loss."""
    serial = replace(plan, driver=march, chunk=problem.steps, warmup=0, linearization=None, check_gradient=False)
    exact_states, _ = solve_states(problem, serial, choose_sweeper(problem))
    exact_gates, _, _ = solve_adjoint(problem, exact_states, incoming, final_grad, serial)
    given, exact = (
        weight_grads_of(problem, at, gates) or (gates,)
        for at, gates in ((states, gate_grads), (exact_states, exact_gates))
    )
    return compare(given, exact, plan.gradient_tolerance)


def weight_grads_of(problem: Recurrence, states: list[Tensor], gate_grads: Tensor) -> tuple[Tensor, ...]:
    """Gradients of the cell's weights; empty if the cell does not expose them."""
    previous = [part.flatten(0, 1) for part in previous_states(problem, states)]
    seen = problem.cell.multiplied(previous, problem.u.flatten(0, 1))
    return problem.cell.weight_grads(seen, gate_grads.flatten(0, 1))


Carrying = Callable[[Tensor, Tensor | None], Tensor]
"""`carrying(jumps, incoming)`: gradients `(T, B, S)` that reach all states from later steps, in time order."""


def _carrying(problem: Recurrence, states: list[Tensor], plan: Plan) -> Carrying | None:
    """The linear recurrence of the gradients over single steps, if the plan asks for one."""
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
    """Initial guess, exact up to rounding: gradients `(T, B, S)` after every step from later ones, last step first."""
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
    """Parts of the state before every step, `(T, B, part)`, resets applied. Past the end of a sequence it is the
    initial one, too: gradients are zero there, and what they are multiplied by must be a number.
    """
    apart = problem.resets
    if problem.lengths is not None:
        past = torch.arange(problem.steps, device=problem.u.device)[:, None] >= problem.ends_on_device()
        apart = past if apart is None else apart | past
    if apart is None:
        return [part[:-1] for part in states]
    origin = problem.initial.split(problem.cell.parts, -1)
    return [torch.where(apart.unsqueeze(-1), o, part[:-1]) for part, o in zip(states, origin, strict=True)]
