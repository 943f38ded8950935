"""From a solver's options to a plan for one problem."""

from __future__ import annotations

from dataclasses import replace

from timeloom.auto.costs import cheapest, copies_inputs, decay_is_cheap, newton_up_to, step_cost
from timeloom.auto.decide import Experience, assumed_warmup, decide
from timeloom.kernels import CPUSweeper
from timeloom.mgrit.driver import MGRITPlan
from timeloom.mgrit.grid import Coarsening, fit
from timeloom.options import did_you_mean
from timeloom.problem import Recurrence
from timeloom.solve.linearize import Linearization
from timeloom.solve.plan import MOST_SWEEPS, Plan
from timeloom.solvers.auto import Auto
from timeloom.solvers.base import Solver
from timeloom.solvers.elk import ELK, QuasiELK
from timeloom.solvers.mgrit import MGRIT, MOST_CYCLES
from timeloom.solvers.newton import DEER, QuasiDEER
from timeloom.solvers.picard import Jacobi, Picard
from timeloom.solvers.sequential import Sequential
from timeloom.solvers.shooting import Shooting
from timeloom.solvers.stepwise import Stepwise

_NAMED: dict[str, type[Solver]] = {"auto": Auto, "sequential": Sequential, "shooting": Shooting, "mgrit": MGRIT}
_NAMED |= {kind.name: kind for kind in (DEER, QuasiDEER, ELK, QuasiELK, Picard, Jacobi)}

STEPWISE_PATIENCE = 20
"""Sweeps without halving the residual that a method over single steps is granted: its largest residual may stand still
while it moves on."""
MOST_STEPWISE_SWEEPS = 100


def resolve(solver: str | Solver) -> Solver:
    """A solver from its name or itself."""
    if isinstance(solver, Solver):
        return solver
    if isinstance(solver, str) and solver in _NAMED:
        return _NAMED[solver]()
    names = ", ".join(map(repr, _NAMED))
    hint = did_you_mean(solver, _NAMED)
    if isinstance(solver, type) and issubclass(solver, Solver):
        hint = f"; give an object of it: {solver.__name__}()"
    raise ValueError(f"solver must be one of {names} or an object from timeloom.solvers; got {solver!r}{hint}")


def names() -> tuple[str, ...]:
    """Names that `resolve` knows."""
    return tuple(_NAMED)


def plan_forward(solver: Solver, problem: Recurrence, experience: Experience) -> Plan:
    """How to solve for the states."""
    if isinstance(solver, Shooting):
        return _plan_shooting(solver, problem)
    if isinstance(solver, Auto):
        return decide(solver, problem, experience)
    if isinstance(solver, MGRIT):
        return _plan_mgrit(solver, problem, solver.cycles, experience)
    if isinstance(solver, Stepwise):
        return _plan_stepwise(solver, problem)
    return _one_chunk(solver, problem, "sequential, as asked for")


def plan_backward(solver: Solver, problem: Recurrence, experience: Experience) -> Plan:
    """How to solve for the gradients."""
    if solver.adjoint == "sequential":
        return _one_chunk(solver, problem, "adjoint='sequential'")
    if solver.adjoint == "scan":
        return _plan_scan(solver, problem)
    if isinstance(solver, Stepwise) and solver.adjoint == "same":
        how = replace(solver.linearization(problem.cell), elements="dense", probes=None, damped=False)
        return _plan_linear_adjoint(solver, problem, how, "linear scan")
    if isinstance(solver, Auto) and solver.adjoint == "same":
        return decide(solver, problem, experience, solver.adjoint_tolerance(problem))
    solver = replace(solver, tol=solver.adjoint_tolerance(problem))
    if solver.adjoint == "mgrit" and not isinstance(solver, MGRIT):
        solver = MGRIT(tol=solver.tol, max_iters=solver.max_iters, on_divergence=solver.on_divergence)
    if isinstance(solver, MGRIT):
        plan = _plan_mgrit(solver, problem, solver.backward_cycles, experience)
        due = experience.due(solver.check_gradient_every)
        return replace(plan, check_gradient=due, gradient_tolerance=solver.gradient_tolerance)
    return plan_forward(solver, problem, experience)


def _plan_shooting(solver: Shooting, problem: Recurrence) -> Plan:
    steps, tolerance = max(problem.steps, 1), solver.tolerance(problem)
    warmup = assumed_warmup(tolerance) if solver.warmup is None else solver.warmup
    chunk = min(solver.chunk or cheapest_chunk(problem, warmup, steps), steps)
    return Plan(
        chunk=chunk,
        correction=solver.correction,
        warmup=min(warmup, chunk) if copies_inputs(problem) else warmup,
        tolerance=tolerance,
        max_iters=solver.max_iters or MOST_SWEEPS,
        on_divergence=solver.on_divergence,
        reason="",
        decay_is_cheap=decay_is_cheap(problem),
        newton_up_to=newton_up_to(problem),
    )


def _plan_mgrit(solver: MGRIT, problem: Recurrence, cycles: int | None, experience: Experience) -> MGRITPlan:
    steps, tolerance = max(problem.steps, 1), solver.tolerance(problem)
    factors = fit(
        steps, solver.levels, solver.coarsening, lambda: cheapest_chunk(problem, assumed_warmup(tolerance), steps)
    )
    return plan_cycles(solver, problem, cycles, experience, factors)


def plan_cycles(
    solver: MGRIT, problem: Recurrence, cycles: int | None, experience: Experience, factors: tuple[int, ...]
) -> MGRITPlan:
    """How to cycle through levels coarsened by these factors."""
    steps, tolerance = max(problem.steps, 1), solver.tolerance(problem)
    if not callable(solver.coarse):
        problem.cell.coarse(solver.coarse)  # refused here, whether it will be needed or not
    chunk = factors[0] if factors else steps
    warmup = assumed_warmup(tolerance) if solver.guess == "warmup" and factors and not solver.skip_down else 0
    relaxations = solver.relaxations(len(factors) + 1)[: len(factors) + 1]
    kind = "your own" if callable(solver.coarse) else solver.coarse
    return MGRITPlan(
        chunk=chunk,
        correction="none",
        warmup=min(warmup, chunk) if copies_inputs(problem) else warmup,
        tolerance=tolerance,
        max_iters=(cycles + experience.extra_cycles if cycles else solver.max_iters) or MOST_CYCLES,
        on_divergence=solver.on_divergence,
        reason=f"coarsened by {', '.join(map(str, factors))}; {kind} coarse steps of {solver.coarse_inputs} inputs"
        if factors
        else "mgrit: one chunk is cheapest, or all that fits",
        coarsening=Coarsening(factors, solver.coarse, solver.coarse_inputs),
        relaxations=tuple(relaxation.count("C") for relaxation in relaxations),
        weight=solver.weight,
        kind=solver.cycle,
        skip_down=solver.skip_down,
        nested=solver.guess == "nested" and not solver.skip_down,
        limited=cycles is not None,
    )


def cheapest_chunk(problem: Recurrence, warmup: int, steps: int) -> int:
    """The chunk that takes least time for so many steps of a problem like this."""
    return cheapest(steps, max(problem.batch, 1), warmup, step_cost(problem), copies_inputs(problem))[0]


def _plan_stepwise(solver: Stepwise, problem: Recurrence) -> Plan:
    """Every step may leave a jump of the tolerance, and they add up: jumps beyond that of gradients are mended once."""
    how = solver.linearization(problem.cell)
    _check_precision(how, problem)
    max_iters = solver.max_iters or MOST_STEPWISE_SWEEPS
    return Plan(
        chunk=1,
        correction="none",
        warmup=0,
        tolerance=solver.tolerance(problem),
        max_iters=max_iters,
        on_divergence=solver.on_divergence,
        reason="",
        linearization=how,
        name=solver.name,
        patience=STEPWISE_PATIENCE if solver.max_iters is None else max_iters,
        polish=solver.adjoint_tolerance(problem),
    )


def _plan_scan(solver: Solver, problem: Recurrence) -> Plan:
    levels = solver.adjoint_levels
    if levels is None and problem.u.device.type == "cpu":
        levels = 0
    if levels == 0 and CPUSweeper.supports(problem):
        return _one_chunk(solver, problem, "adjoint='scan' of 0 levels: the compiled sweep, in order")
    how = Linearization("dense", method="blelloch", levels=levels)
    return _plan_linear_adjoint(solver, problem, how, "blelloch scan")


def _plan_linear_adjoint(solver: Solver, problem: Recurrence, how: Linearization, name: str) -> Plan:
    """All gradients by one linear recurrence; more sweeps than two only mend what rounding left."""
    return Plan(
        chunk=1,
        correction="none",
        warmup=0,
        tolerance=solver.adjoint_tolerance(problem),
        max_iters=MOST_SWEEPS,
        on_divergence=solver.on_divergence,
        reason="",
        linearization=how,
        name=name,
    )


def _check_precision(how: Linearization, problem: Recurrence) -> None:
    if how.precision == "tf32" and problem.u.device.type != "cuda":
        raise ValueError(
            f"precision='tf32' is for CUDA devices, the inputs are on {problem.u.device.type}: use 'bfloat16' or 'full'"
        )


def _one_chunk(solver: Solver, problem: Recurrence, reason: str) -> Plan:
    return Plan(
        chunk=max(problem.steps, 1),
        correction="none",
        warmup=0,
        tolerance=solver.tolerance(problem),
        max_iters=1,
        on_divergence=solver.on_divergence,
        reason=reason,
    )
