"""The base class of all solvers: options, default tolerances, and how a problem becomes a plan.

A solver is one file with its options and `_plan_states`, which makes a plan from them for a problem. `register` gives
it a name. If gradients, or sequences over ranks, need another kind of plan, it overrides the other planning methods of
`Solver`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar, get_args

import torch
from torch import Tensor

from timeloom.auto.costs import cheapest, compiled_cost, decay_is_cheap, newton_up_to, step_cost
from timeloom.auto.experience import Experience
from timeloom.auto.layer_experience import LayerExperience
from timeloom.auto.thresholds import Fewest, Sized
from timeloom.kernels import in_compiled_code, may_be_compiled
from timeloom.options import check_choice, check_count, check_number, did_you_mean
from timeloom.problem import Recurrence
from timeloom.scan import gpu
from timeloom.solve.driver import march
from timeloom.solve.linearize import Linearization
from timeloom.solve.plan import MOST_SWEEPS, Adjoint, Direction, Driver, OnDivergence, Plan, RankPlan, StandingPlan
from timeloom.solve.tolerance import ONE_SIGN, default_tolerance

SolverKind = TypeVar("SolverKind", bound="type[Solver]")
PlanKind = TypeVar("PlanKind", bound=Plan)


@dataclass(frozen=True)
class Solver:
    """Options of every solver.

    adjoint: how the backward pass solves for the gradients: the same way as the forward pass, by a scan over the
        transposed Jacobians of all steps (BPPSA), by multigrid, or sequentially.
    tol: largest jump between chunks to accept, relative to the largest value of its part of the state (h of an LSTM,
        or c, which may be far larger); None takes the dtype's default, which then also limits what jumps add up to.
    max_iters: sweeps after which to give up; None leaves it to the solver.
    adjoint_levels: with `adjoint="scan"`, levels of the scan's tree that multiply matrices; the roots above them are
        run one after the other. None chooses: no level on a CPU, where matrix-vector products in order are fastest (a
        compiled sweep does them without forming Jacobians); on a GPU the scan's kernels if a state has at most 32
        numbers, and all levels beyond.
    on_divergence: what to do if the sweeps do not converge: finish sequentially after the exact prefix, raise
        `ConvergenceError`, or return the unfinished result (the report then says `converged=False`).
    """

    name: ClassVar[str] = ""
    """The name by which users can select it."""
    in_given_precision: ClassVar[bool] = False
    """Whether GPU kernels may multiply in half precision if the input has it; otherwise they solve in float32."""
    adapts: ClassVar[bool] = False
    """Whether it makes another plan if a sweep shows that the first one is not enough."""
    on_tape: ClassVar[bool] = False
    """Whether it is the plain loop over steps on autograd's tape, used if there are no lengths and no resets."""

    adjoint: Adjoint = "same"
    tol: float | None = None
    max_iters: int | None = None
    on_divergence: OnDivergence = "sequential"
    adjoint_levels: int | None = None

    def __post_init__(self) -> None:
        check_choice("adjoint", self.adjoint, get_args(Adjoint))
        check_choice("on_divergence", self.on_divergence, get_args(OnDivergence))
        check_number("tol", self.tol)
        check_count("max_iters", self.max_iters)
        check_count("adjoint_levels", self.adjoint_levels, least=0)
        if self.adjoint_levels is not None and self.adjoint != "scan":
            raise ValueError(f"adjoint_levels goes with adjoint='scan'; adjoint is {self.adjoint!r}")

    @property
    def why_not_fused(self) -> str | None:
        """Why it needs a user's cell as it is, not its kernels; None if it does not."""
        return None

    def tolerance(self, problem: Recurrence) -> float:
        """The tolerance for the states of a problem."""
        return default_tolerance(problem, "forward") if self.tol is None else self.tol

    def adjoint_tolerance(self, problem: Recurrence) -> float:
        """The tolerance for the gradients of a problem."""
        return default_tolerance(problem, "backward") if self.tol is None else self.tol

    def why_torch(
        self, layer: Sized, x: Tensor, steps: int, batch: int, known: Sequence[LayerExperience]
    ) -> str | None:
        """Why torch's own layer runs, or None if timeloom's sweeps do."""
        return None

    def why_torch_by_size(self, layer: Sized, x: Tensor, steps: int, batch: int) -> str | None:
        """Why torch's own layer runs, decided by sizes alone, for a graph; or None. `steps` may be a symbol."""
        return None

    def fewest_steps(self, layer: Sized, x: Tensor, batch: int) -> Fewest:
        """The number of steps below which torch's own layer runs every call; it never changes within a process."""
        return Fewest()

    def plan(self, problem: Recurrence, experience: Experience, direction: Direction = "forward") -> Plan:
        """The plan to solve for states or gradients; depends on the problem's sizes, devices and dtypes alone."""
        if direction == "forward":
            return self._plan_states(problem, experience)
        if self.adjoint == "sequential":
            return self._one_chunk(problem, "adjoint='sequential'")
        if self.adjoint == "scan":
            return self._plan_scan(problem)
        solver = self._multigrid() if self.adjoint == "mgrit" else self
        return solver._plan_gradients(problem, experience)

    def standing(self, problem: Recurrence, experience: Experience, direction: Direction) -> StandingPlan | None:
        """The plan that `plan` would return, if it was made before and stands until more is learned; else None."""
        return None

    def plan_over_ranks(
        self, problem: Recurrence, experience: Experience, sizes: tuple[int, ...], direction: Direction = "forward"
    ) -> RankPlan:
        """The plan over ranks: `problem` is this rank's slice, `sizes` the number of steps that each rank holds."""
        if direction == "forward":
            return self._plan_states_over_ranks(problem, experience, sizes)
        if self.adjoint == "sequential":
            return self._in_order(problem, "adjoint='sequential'")
        if self.adjoint == "scan":
            inside = self._plan_scan(problem)
            return RankPlan(self._scan_of_slices(problem, inside) if inside.linearization is None else inside)
        solver = self._multigrid() if self.adjoint == "mgrit" else self
        return solver._plan_gradients_over_ranks(problem, experience, sizes)

    def _plan_states(self, problem: Recurrence, experience: Experience) -> Plan:
        raise NotImplementedError(f"{type(self).__name__} must say how it solves: override _plan_states")

    def _plan_gradients(self, problem: Recurrence, experience: Experience) -> Plan:
        """The plan of `adjoint="same"`: that of the states, apart from the tolerance."""
        return self._polished(self._for_gradients(problem)._plan_states(problem, experience), problem)

    def _plan_states_over_ranks(self, problem: Recurrence, experience: Experience, sizes: tuple[int, ...]) -> RankPlan:
        raise NotImplementedError(f"{type(self).__name__} does not run over many ranks: use 'auto'")

    def _plan_gradients_over_ranks(
        self, problem: Recurrence, experience: Experience, sizes: tuple[int, ...]
    ) -> RankPlan:
        return self._for_gradients(problem)._plan_states_over_ranks(problem, experience, sizes)

    def _polished(self, plan: Plan, problem: Recurrence) -> Plan:
        """The plan of gradients; in float64 with one more sweep, as a smaller tolerance might never be met."""
        firm = self.tol is None and problem.rounded.dtype == torch.float64
        return replace(plan, polish=ONE_SIGN * plan.tolerance) if firm else plan

    def _for_gradients(self, problem: Recurrence) -> Solver:
        return replace(self, tol=self.adjoint_tolerance(problem))

    def _multigrid(self) -> Solver:
        """The solver of `adjoint="mgrit"`."""
        return kind_named("mgrit")(tol=self.tol, max_iters=self.max_iters, on_divergence=self.on_divergence)

    def _plan(
        self,
        kind: type[PlanKind],
        problem: Recurrence,
        chunk: int,
        /,
        *,
        warmup: int = 0,
        driver: Driver = march,
        tolerance: float | None = None,
        max_iters: int | None = None,
        **decided: Any,
    ) -> PlanKind:
        """A plan with this chunk length, and with everything that all plans of this solver have in common."""
        tolerance = self.tolerance(problem) if tolerance is None else tolerance
        return kind(
            chunk=chunk,
            warmup=warmup,
            driver=driver,
            tolerance=tolerance,
            counts_errors=tolerance <= default_tolerance(problem, "forward"),
            max_iters=max_iters or self.max_iters or MOST_SWEEPS,
            on_divergence=self.on_divergence,
            **decided,
        )

    def _plan_shooting(self, problem: Recurrence, chunk: int, warmup: int, **decided: Any) -> Plan:
        """A plan of sweeps over chunks, with the information which corrections are cheap."""
        cheap, dense = decay_is_cheap(problem), newton_up_to(problem)
        return self._plan(Plan, problem, chunk, warmup=warmup, decay_is_cheap=cheap, newton_up_to=dense, **decided)

    def _one_chunk(self, problem: Recurrence, reason: str) -> Plan:
        return self._plan(Plan, problem, max(problem.steps, 1), max_iters=1, reason=reason)

    def _in_order(self, problem: Recurrence, reason: str) -> RankPlan:
        """The plan of a sequential run, rank after rank."""
        return RankPlan(self._one_chunk(problem, reason), way="in order")

    def _plan_scan(self, problem: Recurrence) -> Plan:
        """Gradients by a scan over the transposed Jacobians of all steps."""
        levels = self.adjoint_levels
        if levels is None and gpu.supports(problem.initial, "dense"):
            return self._plan_linear(problem, Linearization("dense"), "linear scan")
        if levels is None and problem.u.device.type == "cpu":
            levels = 0
        if levels == 0 and in_compiled_code(problem):
            return self._one_chunk(problem, "adjoint='scan' of 0 levels: the compiled sweep, in order")
        return self._plan_linear(problem, Linearization("dense", method="blelloch", levels=levels), "blelloch scan")

    def _plan_linear(self, problem: Recurrence, how: Linearization, name: str) -> Plan:
        """All gradients by one linear recurrence; sweeps beyond the second only reduce rounding."""
        decided: dict[str, Any] = {"tolerance": self.adjoint_tolerance(problem), "max_iters": MOST_SWEEPS}
        return self._plan(Plan, problem, 1, linearization=how, name=name, **decided)

    def _scan_of_slices(self, problem: Recurrence, plan: Plan) -> Plan:
        """The plan over ranks if the scan inside a rank is a compiled sweep: a scan over the transfers of its chunks.

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


def cheapest_chunk(problem: Recurrence, warmup: int, steps: int) -> int:
    """The chunk that takes the least time for `steps` steps of a problem like this."""
    return cheapest(steps, max(problem.batch, 1), warmup, step_cost(problem))[0]


def cheapest_chunk_over_ranks(problem: Recurrence, warmup: int, steps: int) -> int:
    """The chunk that takes the least time, chosen alike on all ranks; `steps` must be the same on all."""
    if may_be_compiled(problem):
        return cheapest(steps, max(problem.batch, 1), warmup, compiled_cost())[0]
    return cheapest_chunk(problem, warmup, steps)


def within(lead: int, sizes: tuple[int, ...]) -> int:
    """The warm-up `lead`, or 0 if it exceeds a slice: it would show less than a sweep, which also gives transfers."""
    return lead if lead <= min(sizes) else 0


_NAMED: dict[str, type[Solver]] = {}


def register(kind: SolverKind) -> SolverKind:
    """Make a solver available by its name."""
    _NAMED[kind.name] = kind
    return kind


def names() -> tuple[str, ...]:
    """Names that `resolve` knows."""
    return tuple(_NAMED)


def kind_named(name: str) -> type[Solver]:
    return _NAMED[name]


def resolve(solver: str | Solver) -> Solver:
    """A solver from its name or itself."""
    if isinstance(solver, Solver):
        return solver
    if isinstance(solver, str) and solver in _NAMED:
        return _NAMED[solver]()
    known = ", ".join(map(repr, _NAMED))
    hint = did_you_mean(solver, _NAMED)
    if isinstance(solver, type) and issubclass(solver, Solver):
        hint = f"; give an object of it: {solver.__name__}()"
    raise ValueError(f"solver must be one of {known} or an object from timeloom.solvers; got {solver!r}{hint}")
