"""From a solver's options to a plan for one problem."""

from __future__ import annotations

from dataclasses import replace

from timeloom.problem import Recurrence
from timeloom.solve import MOST_SWEEPS, Plan
from timeloom.solvers.auto import (
    Auto,
    Experience,
    cheapest,
    copies_inputs,
    decide,
    leak_is_cheap,
    newton_up_to,
    step_overhead,
)
from timeloom.solvers.base import Solver
from timeloom.solvers.sequential import Sequential
from timeloom.solvers.shooting import Shooting

_NAMED: dict[str, type[Solver]] = {"auto": Auto, "sequential": Sequential, "shooting": Shooting}


def resolve(solver: str | Solver) -> Solver:
    """A solver from its name or itself."""
    if isinstance(solver, Solver):
        return solver
    if isinstance(solver, str) and solver in _NAMED:
        return _NAMED[solver]()
    names = ", ".join(map(repr, _NAMED))
    raise ValueError(f"solver must be one of {names} or an object from timeloom.solvers; got {solver!r}")


def plan_forward(solver: Solver, problem: Recurrence, experience: Experience) -> Plan:
    """How to solve for the states."""
    if isinstance(solver, Shooting):
        return _plan_shooting(solver, problem)
    if isinstance(solver, Auto):
        return decide(solver, problem, experience)
    return _one_chunk(solver, problem, "sequential, as asked for")


def plan_backward(solver: Solver, problem: Recurrence, experience: Experience) -> Plan:
    """How to solve for the gradients."""
    if solver.adjoint == "sequential":
        return _one_chunk(solver, problem, "adjoint='sequential'")
    return plan_forward(replace(solver, tol=solver.adjoint_tolerance(problem.initial)), problem, experience)


def _plan_shooting(solver: Shooting, problem: Recurrence) -> Plan:
    steps, tolerance = max(problem.steps, 1), solver.tolerance(problem.initial)
    warmup = Experience().warmup(tolerance) if solver.warmup is None else solver.warmup
    chunk = solver.chunk
    if chunk is None:
        chunk, _ = cheapest(steps, max(problem.batch, 1), warmup, step_overhead(problem), copies_inputs(problem))
    chunk = min(chunk, steps)
    return Plan(
        chunk=chunk,
        correction=solver.correction,
        warmup=min(warmup, chunk) if copies_inputs(problem) else warmup,
        tolerance=tolerance,
        max_iters=solver.max_iters or MOST_SWEEPS,
        on_divergence=solver.on_divergence,
        reason="",
        leak_is_cheap=leak_is_cheap(problem),
        newton_up_to=newton_up_to(problem),
    )


def _one_chunk(solver: Solver, problem: Recurrence, reason: str) -> Plan:
    return Plan(
        chunk=max(problem.steps, 1),
        correction="none",
        warmup=0,
        tolerance=solver.tolerance(problem.initial),
        max_iters=1,
        on_divergence=solver.on_divergence,
        reason=reason,
    )
