"""Multiple shooting: all chunks at once, corrected until the jumps between them vanish."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, get_args

from timeloom.auto.costs import step_cost
from timeloom.auto.experience import Experience, assumed_warmup
from timeloom.options import check_choice, check_count
from timeloom.problem import Recurrence
from timeloom.solve.plan import Correction, Plan, RankPlan
from timeloom.solve.tangents import RANK
from timeloom.solvers.base import Solver, cheapest_chunk, within


@dataclass(frozen=True)
class Shooting(Solver):
    """Cut time into chunks, run them side by side, correct the chunk starts, repeat until the jumps vanish.

    chunk: steps in a chunk; None chooses. The last chunk may be shorter.
    correction: how a jump at one chunk's start changes the starts after it: `none` (Jacobi, F-relaxation: it moves
        one chunk per sweep), `diag` (through the product of the cell's decay: z of a GRU, f of an LSTM), `secant`
        (as diag, but in the directions in which the last 8 sweeps moved a start, as its end moved then; costs no extra
        steps), `lowrank` (as diag, but in `rank` directions by finite differences, which are swept as additional rows),
        `newton` (through the dense product of Jacobians), or `auto` (diag if the decay is cheap and large, else none;
        newton for a small state if that is slow, except with compiled sweeps, where a sequential finish is faster).
    warmup: steps before each chunk that are run first, from the initial state, to guess the chunk's start (at most a
        chunk's, if sweeps run in torch operations); 0 guesses the initial state itself; None chooses.
    rank: number of directions of each chunk for `lowrank`; with as many as the state has units it is Newton's method.

    If `max_iters` is given it is the only limit; otherwise sweeps also end once 5 of them did not halve the residual.
    """

    name: ClassVar[str] = "shooting"
    chunk: int | None = None
    correction: Correction = "auto"
    warmup: int | None = None
    rank: int = RANK

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("correction", self.correction, get_args(Correction))
        check_count("chunk", self.chunk)
        check_count("warmup", self.warmup, least=0)
        check_count("rank", self.rank)

    def _plan_states(self, problem: Recurrence, experience: Experience) -> Plan:
        steps, warmup = max(problem.steps, 1), self._warmup(problem)
        chunk = min(self.chunk or cheapest_chunk(problem, warmup, steps), steps)
        warmup = min(warmup, chunk) if step_cost(problem).copies_inputs else warmup
        patient = {} if self.max_iters is None else {"patience": self.max_iters}
        return self._plan_shooting(problem, chunk, warmup, correction=self.correction, rank=self.rank, **patient)

    def _plan_states_over_ranks(self, problem: Recurrence, experience: Experience, sizes: tuple[int, ...]) -> RankPlan:
        return RankPlan(self._plan_states(problem, experience), within(self._warmup(problem), sizes))

    def _warmup(self, problem: Recurrence) -> int:
        return assumed_warmup(self.tolerance(problem)) if self.warmup is None else self.warmup
