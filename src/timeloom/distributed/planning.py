"""From a solver's options to a plan that all ranks share."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from itertools import chain, repeat

from timeloom.auto.costs import cheapest, copies_inputs, decay_is_cheap, newton_up_to, step_cost
from timeloom.auto.decide import PATIENCE, Experience, assumed_warmup
from timeloom.distributed.multigrid import RankMGRITPlan
from timeloom.distributed.span import Line, Span
from timeloom.mgrit.grid import LATER_FACTOR
from timeloom.problem import Recurrence
from timeloom.solve.plan import MOST_SWEEPS, Plan
from timeloom.solvers.auto import Auto
from timeloom.solvers.base import Solver
from timeloom.solvers.mgrit import MGRIT
from timeloom.solvers.planning import cheapest_chunk, plan_backward, plan_cycles, plan_forward
from timeloom.solvers.sequential import Sequential
from timeloom.solvers.shooting import Shooting
from timeloom.solvers.stepwise import Stepwise


@dataclass(frozen=True)
class RankPlan:
    """How to march over ranks. The chunk and warm-up inside a rank are its own; all else is the same on every rank.

    lead: steps at the end of each rank that are run first, to guess what the next rank starts from.
    pipelined: whether to run one step after the other, rank after rank.
    """

    inside: Plan
    line: Line
    lead: int
    pipelined: bool = False


def plan_over_ranks(solver: Solver, problem: Recurrence, experience: Experience, span: Span, line: Line) -> RankPlan:
    """How to solve for the states."""
    if isinstance(solver, Sequential):
        return _pipelined(solver, problem, line, "sequential, as asked for")
    if isinstance(solver, MGRIT):
        return _plan_mgrit(solver, problem, solver.cycles, experience, span, line)
    if isinstance(solver, Stepwise):
        return RankPlan(_undamped(solver, plan_forward(solver, problem, experience)), line, 0)
    tolerance = solver.tolerance(problem)
    if isinstance(solver, Shooting):
        lead = assumed_warmup(tolerance) if solver.warmup is None else solver.warmup
        return RankPlan(plan_forward(solver, problem, experience), line, _within(lead, span))
    if isinstance(solver, Auto) and experience.pause > 0:
        experience.pause -= 1
        return _pipelined(solver, problem, line, "auto: one rank after the other, the network forgets too slowly")
    lead = experience.warmup(tolerance)
    chunk, warmup = cheapest(problem.steps, max(problem.batch, 1), lead, step_cost(problem), copies_inputs(problem))
    inside = Plan(
        chunk=chunk,
        correction="auto",
        warmup=warmup,
        tolerance=tolerance,
        max_iters=solver.max_iters or max(PATIENCE, len(span.sizes)),
        on_divergence=solver.on_divergence,
        reason=f"auto: {len(span.sizes)} ranks, warm-up of {lead} steps",
        decay_is_cheap=decay_is_cheap(problem),
        newton_up_to=newton_up_to(problem),
    )
    return RankPlan(inside, line, _within(lead, span))


def plan_adjoint_over_ranks(
    solver: Solver, problem: Recurrence, experience: Experience, span: Span, line: Line
) -> RankPlan:
    """How to solve for the gradients."""
    if solver.adjoint == "sequential":
        return _pipelined(solver, problem, line, "adjoint='sequential'")
    if solver.adjoint == "scan" or (isinstance(solver, Stepwise) and solver.adjoint == "same"):
        inside = plan_backward(solver, problem, experience)
        return RankPlan(_scan_of_slices(problem, inside) if inside.linearization is None else inside, line, 0)
    solver = replace(solver, tol=solver.adjoint_tolerance(problem))
    if solver.adjoint == "mgrit" and not isinstance(solver, MGRIT):
        solver = MGRIT(tol=solver.tol, max_iters=solver.max_iters, on_divergence=solver.on_divergence)
    if isinstance(solver, MGRIT):
        return _plan_mgrit(solver, problem, solver.backward_cycles, experience, span, line)
    return plan_over_ranks(solver, problem, experience, span, line)


def _within(lead: int, span: Span) -> int:
    """A warm-up over whole slices tells no more than the first sweep, which tells the transfers too."""
    return lead if lead <= min(span.sizes) else 0


def _undamped(solver: Solver, plan: Plan) -> Plan:
    if plan.linearization is not None and plan.linearization.damped:
        raise NotImplementedError(
            f"{type(solver).__name__} does not run over many ranks: its damping looks at all steps in order. Use "
            "'auto', 'shooting', 'mgrit', 'deer', 'quasi-deer' or 'sequential'"
        )
    return plan


def _scan_of_slices(problem: Recurrence, plan: Plan) -> Plan:
    """Where a scan is a compiled sweep inside a rank: its chunks' transfers are the elements of a scan over all ranks.

    The problem is linear, so one correction makes all gradients exact up to rounding.
    """
    return replace(
        plan,
        chunk=cheapest_chunk(problem, 0, max(problem.steps, 1)),
        correction="newton",
        max_iters=MOST_SWEEPS,
        name="scan of slices",
        reason="adjoint='scan': compiled sweeps inside ranks, a scan over their transfers",
    )


def _plan_mgrit(
    solver: MGRIT, problem: Recurrence, cycles: int | None, experience: Experience, span: Span, line: Line
) -> RankPlan:
    if solver.check_gradient_every is not None:
        raise NotImplementedError(
            "check_gradient_every compares with a sequential pass of one process, and the sequence is on many ranks: "
            "leave it out, or check on one process"
        )
    tolerance, longest = solver.tolerance(problem), max(span.sizes)
    warmup = assumed_warmup(tolerance)
    factors = _coarsened(solver, longest, cheapest_chunk(problem, warmup, longest))
    inside = plan_cycles(solver, problem, cycles, experience, factors)
    options = {field.name: getattr(inside, field.name) for field in fields(inside)}
    lead = warmup if inside.warmup else 0
    return RankPlan(RankMGRITPlan(**options, joined=_points(longest, factors) == 1), line, _within(lead, span))


def _coarsened(solver: MGRIT, longest: int, chunk: int) -> tuple[int, ...]:
    """Coarsening factors that suit all ranks: as many as were asked for, or until each rank has one point."""
    given = solver.coarsening
    if isinstance(given, tuple):
        wanted = iter(given)
    else:
        first, later = (chunk, LATER_FACTOR) if given is None else (given, given)
        wanted = chain([first], repeat(later) if solver.levels is None else repeat(later, solver.levels - 2))
    factors: tuple[int, ...] = ()
    for factor in wanted:
        factors += (factor,)
        if _points(longest, factors) == 1:
            break
    return factors


def _points(steps: int, factors: tuple[int, ...]) -> int:
    """Points that a slice of so many steps has on the coarsest level."""
    for factor in factors:
        steps = -(-steps // factor)
    return steps


def _pipelined(solver: Solver, problem: Recurrence, line: Line, reason: str) -> RankPlan:
    inside = plan_forward(Sequential(), problem, Experience())
    return RankPlan(replace(inside, on_divergence=solver.on_divergence, reason=reason), line, 0, pipelined=True)
