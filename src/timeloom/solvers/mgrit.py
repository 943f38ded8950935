"""Multigrid reduction in time."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import chain, repeat
from typing import Any, ClassVar, Literal, get_args

from timeloom.auto.costs import step_cost
from timeloom.auto.experience import Experience, assumed_warmup
from timeloom.cells.coarse import UserStep
from timeloom.mgrit.driver import MGRITPlan, cycle
from timeloom.mgrit.grid import LATER_FACTOR, Coarsening, fit
from timeloom.options import check_choice, check_count, check_flag, check_number
from timeloom.problem import Recurrence
from timeloom.solve.plan import Plan, RankPlan
from timeloom.solvers.base import Solver, cheapest_chunk, cheapest_chunk_over_ranks, within

CoarseKind = Literal["frozen", "implicit"]
CoarseInputs = Literal["mean", "inject"]
CycleKind = Literal["V", "F"]
Guess = Literal["warmup", "nested", "initial"]

MOST_CYCLES = 40
"""Default of the largest number of cycles."""


@dataclass(frozen=True)
class MGRIT(Solver):
    """Correct the chunk starts by coarser and coarser copies of the network, forward and backward (FAS cycles).

    By default it cycles until the tolerance is met, so results and gradients are exact; `MGRIT.paper()` is the
    published setting, which is not.

    levels: number of levels, including the fine one; None chooses by the length, so that cost grows logarithmically.
    coarsening: number of steps of a level that make one step of the next: one for all levels, or one for each but the
        coarsest; None takes long first chunks, as they suit the machine, and 4 from there on. No length has to be
        divisible by it.
    relaxation: `F`, `FCF`, `FCFCF`, …: one for all levels, or one for each from the finest on, the last for the rest.
    weight: weight of a C-relaxation; 1 is the full one.
    cycle: `V`, or `F`, which visits coarse levels more often.
    cycles, backward_cycles: largest number of cycles of each pass; None cycles until the tolerance is met (or
        `max_iters`).
    skip_down: start the first cycle at the coarsest level and only go up; this replaces any other first guess.
    guess: first guess of the chunk starts: `warmup` (run some steps before each chunk; enough by itself for a network
        that forgets quickly), `nested` (up from the coarsest level, with a cycle on every level on the way), or
        `initial` (the initial state everywhere; zero for gradients).
    coarse: `frozen` (gates stay constant over the interval; any cell), `implicit` (the paper's implicit step; GRU and
        ImplicitGRU without dropout inside the recurrence), or a step of your own, `step(h, x, span) -> h`, with `span`
        `(N, 1)` the number of steps that it replaces.
    coarse_inputs: the input of a coarse step: the `mean` over its interval, or the first input there (`inject`, as in
        the paper).
    check_gradient_every: interval, in backward passes, at which the gradient is compared with the exact one; the
        backward report then has `gradient`, with the relative error and the cosine. It costs a sequential pass.
    gradient_tolerance: largest relative error of the gradient to accept in such a comparison; beyond it, both passes
        make one more cycle from then on (if their number is fixed).
    """

    name: ClassVar[str] = "mgrit"
    levels: int | None = None
    coarsening: int | tuple[int, ...] | None = None
    relaxation: str | tuple[str, ...] = "FCF"
    weight: float = 1.0
    cycle: CycleKind = "V"
    cycles: int | None = None
    backward_cycles: int | None = None
    skip_down: bool = False
    guess: Guess = "warmup"
    coarse: CoarseKind | UserStep = "frozen"
    coarse_inputs: CoarseInputs = "mean"
    check_gradient_every: int | None = None
    gradient_tolerance: float | None = None

    @staticmethod
    def paper(**changes: Any) -> MGRIT:
        """The multigrid paper's setting, which is inexact: reports say how far off it is.

        It has 3 levels, coarsened by 4, F-relaxation on the fine level and FCF below, 2 cycles forward and 1 backward,
        of which the first only goes up.
        """
        setting: dict[str, Any] = {
            "levels": 3,
            "coarsening": 4,
            "relaxation": ("F", "FCF"),
            "cycles": 2,
            "backward_cycles": 1,
            "skip_down": True,
            "guess": "initial",
            "coarse": "implicit",
            "coarse_inputs": "inject",
            "on_divergence": "ignore",
        }
        return MGRIT(**(setting | changes))

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("coarsening", "relaxation"):
            if isinstance(getattr(self, name), list):  # a tuple, so that solvers stay hashable
                object.__setattr__(self, name, tuple(getattr(self, name)))
        for name in ("levels", "cycles", "backward_cycles", "check_gradient_every"):
            check_count(name, getattr(self, name))
        if self.levels == 1:
            raise ValueError("levels must be at least 2, the fine one counted: one level is solver='sequential'")
        self._check_coarsening()
        for relaxation in self.relaxations(1):
            if not isinstance(relaxation, str) or not re.fullmatch("F(CF)*", relaxation):
                raise ValueError(f"relaxation must be 'F', 'FCF', 'FCFCF', … or a tuple of such; got {relaxation!r}")
        check_number("weight", self.weight, below=2, optional=False)
        check_flag("skip_down", self.skip_down)
        check_choice("cycle", self.cycle, get_args(CycleKind))
        check_choice("guess", self.guess, get_args(Guess))
        if not callable(self.coarse):
            check_choice("coarse", self.coarse, get_args(CoarseKind))
        check_choice("coarse_inputs", self.coarse_inputs, get_args(CoarseInputs))
        check_number("gradient_tolerance", self.gradient_tolerance)
        if self.gradient_tolerance is not None and self.check_gradient_every is None:
            raise ValueError("gradient_tolerance needs check_gradient_every: nothing is compared without it")

    @property
    def why_not_fused(self) -> str | None:
        return "the coarse step is written for the cell's own states and inputs" if callable(self.coarse) else None

    def _check_coarsening(self) -> None:
        if not isinstance(self.coarsening, tuple):
            check_count("coarsening", self.coarsening, least=2)
            return
        if not self.coarsening or None in self.coarsening:
            raise ValueError(f"coarsening must name a factor for each level but the coarsest, got {self.coarsening}")
        for factor in self.coarsening:
            check_count("every factor of coarsening", factor, least=2)
        if self.levels is not None and self.levels != len(self.coarsening) + 1:
            raise ValueError(
                f"coarsening={self.coarsening} makes {len(self.coarsening) + 1} levels, and levels={self.levels} were "
                f"asked for: leave one of them out, or let them agree"
            )

    def relaxations(self, levels: int) -> tuple[str, ...]:
        """The relaxation of each level, finest first; at least as many as were given."""
        given = self.relaxation if isinstance(self.relaxation, tuple) else (self.relaxation,)
        if not given:
            raise ValueError("relaxation must be 'F', 'FCF', 'FCFCF', … or a tuple of such; got an empty tuple")
        return given + given[-1:] * (levels - len(given))

    def _multigrid(self) -> Solver:
        return self

    def _plan_states(self, problem: Recurrence, experience: Experience) -> Plan:
        return self._plan_cycles(problem, self.cycles, experience, self._factors(problem))

    def _plan_gradients(self, problem: Recurrence, experience: Experience) -> Plan:
        solver = replace(self, tol=self.adjoint_tolerance(problem))
        plan = solver._plan_cycles(problem, self.backward_cycles, experience, solver._factors(problem))
        due = experience.due(self.check_gradient_every)
        checked = replace(plan, check_gradient=due, gradient_tolerance=self.gradient_tolerance)
        return self._polished(checked, problem)

    def _plan_states_over_ranks(self, problem: Recurrence, experience: Experience, sizes: tuple[int, ...]) -> RankPlan:
        return self._plan_cycles_over_ranks(problem, self.cycles, experience, sizes)

    def _plan_gradients_over_ranks(
        self, problem: Recurrence, experience: Experience, sizes: tuple[int, ...]
    ) -> RankPlan:
        solver = replace(self, tol=self.adjoint_tolerance(problem))
        return solver._plan_cycles_over_ranks(problem, self.backward_cycles, experience, sizes)

    def _factors(self, problem: Recurrence) -> tuple[int, ...]:
        """Coarsening factors of all levels but the coarsest."""
        steps, warmup = max(problem.steps, 1), assumed_warmup(self.tolerance(problem))
        return fit(steps, self.levels, self.coarsening, lambda: cheapest_chunk(problem, warmup, steps))

    def _plan_cycles(
        self, problem: Recurrence, cycles: int | None, experience: Experience, factors: tuple[int, ...]
    ) -> MGRITPlan:
        """The plan of cycles through levels coarsened by these factors."""
        if not callable(self.coarse):
            problem.cell.coarse(self.coarse)  # raises here, even if it will not be needed
        chunk = factors[0] if factors else max(problem.steps, 1)
        warms_up = self.guess == "warmup" and factors and not self.skip_down
        warmup = assumed_warmup(self.tolerance(problem)) if warms_up else 0
        relaxations = self.relaxations(len(factors) + 1)[: len(factors) + 1]
        kind = "your own" if callable(self.coarse) else self.coarse
        return self._plan(
            MGRITPlan,
            problem,
            chunk,
            driver=cycle,
            warmup=min(warmup, chunk) if step_cost(problem).copies_inputs else warmup,
            max_iters=(cycles + experience.extra_cycles if cycles else self.max_iters) or MOST_CYCLES,
            reason=f"coarsened by {', '.join(map(str, factors))}; {kind} coarse steps of {self.coarse_inputs} inputs"
            if factors
            else "mgrit: one chunk is cheapest, or all that fits",
            coarsening=Coarsening(factors, self.coarse, self.coarse_inputs),
            relaxations=tuple(relaxation.count("C") for relaxation in relaxations),
            weight=self.weight,
            kind=self.cycle,
            skip_down=self.skip_down,
            nested=self.guess == "nested" and not self.skip_down,
            limited=cycles is not None,
        )

    def _plan_cycles_over_ranks(
        self, problem: Recurrence, cycles: int | None, experience: Experience, sizes: tuple[int, ...]
    ) -> RankPlan:
        if self.check_gradient_every is not None:
            raise NotImplementedError(
                "check_gradient_every compares with a sequential pass of one process, and the sequence is on many "
                "ranks: leave it out, or check on one process"
            )
        warmup, longest = assumed_warmup(self.tolerance(problem)), max(sizes)
        factors = self._factors_over_ranks(longest, cheapest_chunk_over_ranks(problem, warmup, longest))
        inside = self._plan_cycles(problem, cycles, experience, factors)
        inside = replace(inside, joined=_points(longest, factors) == 1)
        return RankPlan(inside, within(warmup if inside.warmup else 0, sizes), "cycles")

    def _factors_over_ranks(self, longest: int, chunk: int) -> tuple[int, ...]:
        """Coarsening factors for all ranks: as many as were asked for, or until each rank has a single point."""
        given = self.coarsening
        if isinstance(given, tuple):
            wanted = iter(given)
        else:
            first, later = (chunk, LATER_FACTOR) if given is None else (given, given)
            wanted = chain([first], repeat(later) if self.levels is None else repeat(later, self.levels - 2))
        factors: tuple[int, ...] = ()
        for factor in wanted:
            factors += (factor,)
            if _points(longest, factors) == 1:
                break
        return factors


def _points(steps: int, factors: tuple[int, ...]) -> int:
    """Number of points that a slice of `steps` steps has on the coarsest level."""
    for factor in factors:
        steps = -(-steps // factor)
    return steps
