"""From a solver's options to a plan that all ranks share."""

from __future__ import annotations

from dataclasses import dataclass, replace

from timeloom.distributed.span import Line, Span
from timeloom.problem import Recurrence
from timeloom.solve import Plan
from timeloom.solvers.auto import (
    PATIENCE,
    Auto,
    Experience,
    cheapest,
    copies_inputs,
    leak_is_cheap,
    newton_up_to,
    step_overhead,
)
from timeloom.solvers.base import Solver
from timeloom.solvers.planning import plan_forward
from timeloom.solvers.sequential import Sequential
from timeloom.solvers.shooting import Shooting


@dataclass(frozen=True)
class RankPlan:
    """How to march over ranks. The chunk and warm-up inside a rank are its own; all else is the same on every rank.

    lead: steps at the end of each rank that are run first, to guess what the next rank starts from.
    pipelined: whether to run one step after the other, rank after rank.
    """

    inside: Plan
    line: Line
    lead: int
    pipelined: bool


def plan_over_ranks(solver: Solver, problem: Recurrence, experience: Experience, span: Span, line: Line) -> RankPlan:
    """How to solve for the states."""
    if not isinstance(solver, Auto | Shooting | Sequential):
        raise NotImplementedError(
            f"{type(solver).__name__} does not run over many ranks yet: use 'auto', 'shooting' or 'sequential'"
        )
    tolerance, shortest = solver.tolerance(problem.initial), min(span.sizes)
    if isinstance(solver, Sequential):
        return _pipelined(solver, problem, line, "sequential, as asked for")
    if isinstance(solver, Auto) and experience.pause > 0:
        experience.pause -= 1
        return _pipelined(solver, problem, line, "auto: one rank after the other, the network forgets too slowly")
    if isinstance(solver, Shooting):
        lead = Experience().warmup(tolerance) if solver.warmup is None else solver.warmup
        inside = plan_forward(solver, problem, experience)
    else:
        lead = experience.warmup(tolerance)
        chunk, warmup = cheapest(
            problem.steps, max(problem.batch, 1), lead, step_overhead(problem), copies_inputs(problem)
        )
        inside = Plan(
            chunk=chunk,
            correction="auto",
            warmup=warmup,
            tolerance=tolerance,
            max_iters=solver.max_iters or max(PATIENCE, len(span.sizes)),
            on_divergence=solver.on_divergence,
            reason=f"auto: {len(span.sizes)} ranks, warm-up of {lead} steps",
            leak_is_cheap=leak_is_cheap(problem),
            newton_up_to=newton_up_to(problem),
        )
    # A warm-up over whole slices tells no more than the first sweep, which tells the transfers too.
    return RankPlan(inside, line, lead if lead <= shortest else 0, pipelined=False)


def plan_adjoint_over_ranks(
    solver: Solver, problem: Recurrence, experience: Experience, span: Span, line: Line
) -> RankPlan:
    """How to solve for the gradients."""
    if solver.adjoint == "sequential":
        return _pipelined(solver, problem, line, "adjoint='sequential'")
    return plan_over_ranks(
        replace(solver, tol=solver.adjoint_tolerance(problem.initial)), problem, experience, span, line
    )


def _pipelined(solver: Solver, problem: Recurrence, line: Line, reason: str) -> RankPlan:
    inside = plan_forward(Sequential(), problem, Experience())
    return RankPlan(replace(inside, on_divergence=solver.on_divergence, reason=reason), line, 0, pipelined=True)
