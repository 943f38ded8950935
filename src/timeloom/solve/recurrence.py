"""Solve a recurrence and put the result on autograd's tape, for the modules and `unroll`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from timeloom.auto.experience import Experience
from timeloom.auto.layer_experience import LayerExperience
from timeloom.kernels import ReferenceSweeper, sweeper_kind, with_tape
from timeloom.problem import Recurrence
from timeloom.report import ConvergenceError, SolveReport
from timeloom.solve.autograd import Note, attach, outputs_of
from timeloom.solve.forward import final_state
from timeloom.solve.plan import Plan, Planner
from timeloom.solve.replayed import replayed_states, replayed_sums
from timeloom.solve.warm_starts import Guess

Record = Callable[[SolveReport], None]
Seen = Callable[[tuple[Tensor, ...]], None]
"""Receives the states after all steps, detached, `(T, B, part)` of every part."""
BEGUN = "begun at known states"
"""Words in the reason of a report whose solve began at known states."""


def run(
    problem: Recurrence,
    solver: Planner,
    experience: LayerExperience,
    record: Record,
    guess: Guess | None = None,
    slot: int = 0,
    parts: int | None = None,
    seen: Seen | None = None,
    plans: tuple[Plan, ...] = (),
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Outputs, `(T, B, part)` of the leading `parts` of all states, and final state `(B, S)`, differentiable.

    record: receives the report, and again with the backward report in it once the backward pass has run.
    guess: gives the states to begin at, and keeps those that were found, as the states of recurrence `slot`.
    parts: None for the parts that the cell returns.
    seen: receives all states that were found.
    plans: of the forward and the backward pass, if they are already made.
    """
    unmarked = problem.lengths is None and problem.resets is None
    if solver.on_tape and unmarked and not runs_in_order(problem):
        return on_tape(problem, record, "sequential, as asked for", parts, seen)
    detached = problem.detach()
    if guess is not None:
        detached = replace(detached, guess=guess.load(slot, detached))
    if needs_grad(problem):
        detached = with_tape(detached)
    learned = experience.beginning(detached.guess is not None)
    with torch.no_grad():
        plan = plans[0] if plans else plan_from_known(solver, detached, learned)
        states, report = replayed_states(detached, plan)
    learned.learn(report)
    raise_if_asked(report, solver)
    record(report)
    if guess is not None and report.converged:
        guess.save(slot, detached, states, plan.chunk)
    if seen is not None:
        seen(tuple(part[1:] for part in states))
    final = final_state(detached, states)
    if not needs_grad(problem):
        return outputs_of(detached, states, parts), final
    back = plans[1] if plans else solver.plan(detached, experience.backward, "backward")
    adjoint = partial(replayed_sums, plan=back)
    note = noting(report, solver, experience, record)
    return attach(detached, states, final, adjoint, note, problem, parts)


def runs_in_order(problem: Recurrence) -> bool:
    """Whether kernels generated for a cell of timeloom's run all steps in order, in place of a loop over them.

    On a GPU, where each operation of a loop is a launch. Elsewhere the loop is kept: it is the reference.
    """
    return problem.u.is_cuda and problem.cell.generated and sweeper_kind(problem) is not ReferenceSweeper


def plan_from_known(solver: Planner, problem: Recurrence, experience: Experience) -> Plan:
    """The plan to solve for the states, beginning at known ones if there are any.

    Known states replace a fixed warm-up; a learned warm-up begins at them.
    """
    plan = solver.plan(problem, experience)
    if problem.guess is None or plan.chunk >= problem.steps:
        return plan
    between = plan.chunk % problem.guess.every > 0  # chunks that start between known states are entered early
    warmup = plan.warmup if solver.adapts else int(between)
    return replace(plan, warmup=warmup, reason="; ".join(filter(None, (plan.reason, BEGUN))))


def noting(report: SolveReport, solver: Planner, experience: LayerExperience, record: Record) -> Note:
    """A function that learns from the backward pass's report and adds it to the forward pass's report."""

    def note(backward: SolveReport) -> None:
        experience.learn_backward(backward)
        object.__setattr__(report, "backward", backward)  # filled in later: the user may hold this report already
        record(report)
        raise_if_asked(backward, solver)

    return note


def on_tape(
    problem: Recurrence, record: Record, reason: str, parts: int | None = None, seen: Seen | None = None
) -> tuple[tuple[Tensor, ...], Tensor]:
    """The plain loop on autograd's tape: differentiable any number of times, in every way that torch supports.

    Past the end of a sequence outputs are zero, and the state stays.
    """
    state, states, resets = problem.initial, [], problem.resets
    ends = None if problem.lengths is None else problem.lengths.to(problem.u.device).unsqueeze(-1)
    for t, u in enumerate(problem.u.unbind(0)):
        before = state if resets is None else torch.where(resets[t].unsqueeze(-1), problem.initial, state)
        following = problem.cell.step(before, u)
        state = following if ends is None else torch.where(t < ends, following, state)
        states.append(state if ends is None else torch.where(t < ends, state, 0))
    record(SolveReport.sequential(problem.steps, reason))
    outputs = torch.stack(states).split(problem.cell.parts, -1)
    if seen is not None:
        seen(tuple(part.detach() for part in outputs))
    return outputs[: parts or (len(outputs) if problem.cell.whole_state_out else 1)], state


def raise_if_asked(report: SolveReport, solver: Planner) -> None:
    """Raise if the solve did not converge and the solver says `on_divergence="raise"`.

    Inside a CUDA graph the certificate is not known before a replay, so nothing is raised: see `report.certified`.
    """
    if solver.on_divergence == "raise" and not report.converged and report.certificate is None:
        raise ConvergenceError(report)


def needs_grad(problem: Recurrence) -> bool:
    """Whether a backward pass may follow; always assumed for a generic cell, since its parameters are hidden."""
    if not torch.is_grad_enabled():
        return False
    tensors = (problem.u, problem.initial, *problem.cell.weights)
    return problem.cell.whole_state_out or any(tensor.requires_grad for tensor in tensors)
