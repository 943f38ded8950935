"""The fine grid of multigrid: relaxation by sweeps over all chunks, residual, correction from the coarse levels, stop.

A sweep from the chunk starts is F-relaxation, and its ends are Φ at the next C-points. So the jump between a chunk's
end and the next chunk's start is the residual, and C-relaxation moves a start to the end of the chunk before.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from timeloom.mgrit.cycle import Hierarchy, coarse_levels
from timeloom.mgrit.diagnosis import diagnose, stalled
from timeloom.mgrit.grid import Coarsening
from timeloom.mgrit.recorded import Recorded
from timeloom.mgrit.relax import Level
from timeloom.report import SolveReport
from timeloom.solve.boundaries import Boundaries
from timeloom.solve.chain import Chain
from timeloom.solve.driver import by_links, certified, conclude, march, most, smaller_demand
from timeloom.solve.plan import Plan
from timeloom.solve.residual import error_estimate

WORTH_A_CYCLE = 1.5
"""Multiple of the tolerance that jumps within it may add up to: a cycle costs as much as many sweeps."""

Stack = Callable[[list[Level], float, str, Callable[[Tensor], float]], Hierarchy]
"""`Hierarchy`, or its counterpart over many ranks."""


@dataclass(frozen=True, kw_only=True)
class MGRITPlan(Plan):
    """How to cycle. `max_iters` is the largest number of cycles, `chunk` the first coarsening factor."""

    coarsening: Coarsening = field(default_factory=lambda: Coarsening((), "frozen", "mean"))
    relaxations: tuple[int, ...] = ()
    """C-relaxations of every level before it goes down: 0 for F, 1 for FCF, 2 for FCFCF."""
    weight: float = 1.0
    kind: str = "V"
    skip_down: bool = False
    nested: bool = False
    limited: bool = False
    """Whether the user fixed the number of cycles, and so accepts the residual that they leave."""
    joined: bool = False
    """Over ranks: whether the coarsest level has one point per rank, so that every rank solves all of it."""

    @property
    def method(self) -> str:
        return f"mgrit[{self.kind}, {len(self.coarsening.factors) + 1} levels]"


def cycle(chain: Chain, plan: Plan) -> SolveReport:
    """Solve the chain by cycles through coarser levels; a single link is a plain run."""
    if chain.links == 1:
        return march(chain, plan)
    assert isinstance(plan, MGRITPlan)
    began, entered = time.perf_counter(), chain.entered
    if plan.warmup and chain.guess is None and entered is None:
        entered = chain.enter_all(plan.warmup, False)
        report = None if chain.certify is None else certified(chain.certify(*entered[:2]), plan, began)
        if report is not None:
            return report
    state = Boundaries(chain, entered, plan)
    return Cycles(chain, plan, state, state.solvable if entered is None else None, began).run()


class Cycles:
    """One solve: the chunk starts and ends, the coarse levels, and the residuals after every cycle.

    rows: chunks to run first; None if all of them have been run.
    """

    def __init__(
        self,
        chain: Chain,
        plan: MGRITPlan,
        state: Boundaries,
        rows: Tensor | None,
        began: float,
        stack: Stack = Hierarchy,
    ) -> None:
        self.chain = chain
        self.plan = plan
        self.began = began
        self.state = state
        self.rows = rows
        self.stack = stack
        self.residual = math.inf
        self.demanded = plan.tolerance
        """The jumps to aim for: smaller than the tolerance if jumps that meet it add up to more."""
        self.residuals: list[float] = []
        self.moves: list[float] = []
        """How far each cycle moved the starts."""
        self.estimates: list[float] = []
        """Estimated errors after the cycles that met the tolerance."""
        self.levels: list[tuple[float, ...]] = []

    @cached_property
    def hierarchy(self) -> Hierarchy | Recorded:
        """The coarse levels, made when first needed: many networks forget within one relaxation."""
        plan, coarsen = self.plan, self.chain.coarsen
        assert coarsen is not None
        if self.stack is Hierarchy and coarsen.key is not None and not callable(plan.coarsening.coarse):
            scale = partial(_scale, self.state)
            return Recorded(coarsen, plan.coarsening, plan.relaxations, plan.weight, plan.kind, scale)
        propagators = coarsen(plan.coarsening)
        levels = coarse_levels(propagators, plan.coarsening.factors[1:], plan.relaxations[1:], self.state.starts)
        return self.stack(levels, plan.weight, plan.kind, partial(_size, self.state))

    def run(self) -> SolveReport:
        plan, state = self.plan, self.state
        if plan.nested or plan.skip_down:
            self._guess()
        if self.rows is None:
            self.residual = state.measure(plan.tolerance)
        else:
            self._sweep(self.rows)
        if plan.skip_down:
            self._end_cycle()  # the way up was the first cycle
        given_up = ""
        while not (self._meets_tolerance and self._rests()):
            given_up = self._why_stop()
            if given_up:
                break
            before, left = state.starts, self.residual
            self._cycle()
            self._end_cycle()
            if not plan.limited:
                self._note_move(state.moved_from(before), left)
        if self._meets_tolerance:
            given_up = ""
            state.accept()
        if not self.residuals:
            self._end_cycle()
        sensible = state.converged or not math.isfinite(self.residual)
        advice = "" if sensible else diagnose(self.levels, plan.coarsening, plan.relaxations, plan.kind)
        report = conclude(state, plan, plan.method, self.residuals, given_up, self.began)
        error = self.estimates[-1] if self.estimates and self._meets_tolerance else None
        return replace(report, levels=tuple(self.levels), advice=advice, error_estimate=error)

    @property
    def _meets_tolerance(self) -> bool:
        return self.residual <= self.plan.tolerance

    def _rests(self) -> bool:
        """Whether jumps that meet the tolerance are small enough to stop; if not, demands smaller ones.

        One more cycle is made if the plan asks for polish, or if the jumps add up to much more than the tolerance.
        """
        plan, state = self.plan, self.state
        if plan.limited or self.residual == 0:
            return True
        polished = self.demanded < plan.tolerance
        residuals = self.residuals or [self.residual]
        aim = most(plan) * (WORTH_A_CYCLE if plan.counts_errors else 1.0)
        demand = smaller_demand(state, plan, aim, residuals, self.moves, self.estimates or [0.0], polished)
        if demand is None:
            return True
        self.demanded = min(demand, plan.tolerance)
        state.demand(self.demanded)
        return False

    def _note_move(self, moved: float, left: float) -> None:
        """Estimate the error from a cycle in which jumps of size `left` led to moves of the starts of size `moved`.

        The remaining jumps are assumed to add up in the same ratio, and later corrections to shrink at the same rate.
        """
        self.moves.append(moved)
        if self._meets_tolerance:
            following = self.residual * max(moved / left, 1.0)
            series = error_estimate([*self.moves, following], self.chain.links - len(self.moves))
            self.estimates.append(by_links(self.state, series))

    def _guess(self) -> None:
        """Take first guesses of the starts from the coarse levels, if finite."""
        state = self.state
        guess = self._inside(self.hierarchy.guess(state.starts, self.plan.nested))
        usable = state.unknown.unsqueeze(-1) & guess.isfinite().all(-1, keepdim=True)
        state.starts = torch.where(usable, guess, state.starts)

    def _inside(self, starts: Tensor) -> Tensor:
        bound = self.chain.bound
        return starts if bound is None else torch.clamp(starts, -bound, bound)

    def _cycle(self) -> None:
        """Relax, then correct from the coarse levels; ends with F-relaxation, so that all states fit their starts.

        A correction that increases the residual is undone and replaced by C-relaxation, so that relaxation continues
        alone if coarse steps do not resemble the network. A fixed number of cycles has fixed work, without this check.
        """
        state = self.state
        for _ in range(self.plan.relaxations[0]):
            if not self._move(self.plan.weight * state.jump):
                return
        before, relaxed = self.residual, state.arriving()
        correction = self.hierarchy.correction(state.starts, state.jump)
        self._move(torch.where(correction.isfinite().all(-1, keepdim=True), correction, state.jump))
        if not self.residual <= before and not self.plan.limited:
            self._move(relaxed - state.starts)

    def _move(self, delta: Tensor) -> bool:
        """Move the chunk starts and relax the chunks that moved; returns whether anything is left to do."""
        rows = self.state.move(delta, self.demanded)
        if self.state.rests(rows):
            return False
        self._sweep(rows)
        return not self.state.converged

    def _sweep(self, rows: Tensor) -> None:
        """F-relaxation, and the residual at the C-points that comes with it."""
        self.state.run(rows, False)
        self.residual = self.state.measure(self.demanded)

    def _end_cycle(self) -> None:
        """Record the residuals that a cycle left, on the fine grid and on the coarse levels that it visited.

        The last of a fixed number of cycles ends with C- and F-relaxation, since no other cycle smooths its residual.
        """
        if self.plan.limited and len(self.residuals) + 1 == self.plan.max_iters and not self.state.converged:
            self._move(self.plan.weight * self.state.jump)
        built = "hierarchy" in self.__dict__
        self.residuals.append(self.residual)
        self.levels.append((self.residual, *(self.hierarchy.leave() if built else ())))

    def _why_stop(self) -> str:
        """Why to stop, or an empty string to go on."""
        cycles, plan = len(self.residuals), self.plan
        if cycles >= plan.max_iters:
            if plan.limited:
                return f"stopped after {cycles} cycles, as asked for: inexact, residual {self.residual:.1e}"
            return f"gave up after max_iters={plan.max_iters} cycles"
        if not math.isfinite(self.residual) and not plan.limited:
            return "gave up: the values are not finite"
        return stalled(self.residuals)


def _scale(state: Boundaries) -> Tensor:
    """The largest scale of each entry of the state, `(S,)`."""
    return state.scale.amax((0, 1))


def _size(state: Boundaries, missing: Tensor) -> float:
    """Largest entry of a coarse level's residual, relative to the state's scale as on the fine grid.

    No method of `Cycles`: levels that referred to what holds them would be kept until garbage is collected.
    """
    scale = _scale(state)
    return float((missing.abs() / scale).amax().nan_to_num(nan=math.inf)) if missing.numel() else 0.0
