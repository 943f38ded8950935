"""Multigrid over ranks: every level is split like the sequence, and a rank's first point is a point of all levels.

So F-relaxation stays inside ranks. C-relaxation and restriction send one state, from each rank's last interval to the
next rank's first point. Once a level has one point per rank, every rank gathers all of it, and all ranks solve it and
the coarser levels redundantly.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from timeloom.distributed.boundaries import Check, Marched, RankBoundaries, Settle, over_ranks
from timeloom.distributed.span import Line
from timeloom.mgrit.cycle import Hierarchy
from timeloom.mgrit.driver import Cycles, MGRITPlan
from timeloom.mgrit.grid import COARSEST, LATER_FACTOR
from timeloom.mgrit.propagators import Adjoint, Propagator
from timeloom.mgrit.relax import Level, f_relax, residual, serial
from timeloom.solve.chain import Chain
from timeloom.solve.plan import Plan


def cycle_over_ranks(
    chain: Chain, plan: Plan, line: Line, settle: Settle, check: Check, lead: int, reenter: bool
) -> Marched:
    """`march_over_ranks` by multigrid."""
    assert isinstance(plan, MGRITPlan)
    began = time.perf_counter()
    state, rows = RankBoundaries.entering(chain, plan, False, reenter, line, settle, check)
    report = Cycles(chain, plan, state, rows, began, partial(_over_ranks, state=state, plan=plan)).run()
    return state.marched(over_ranks(report, line, lead))


def _over_ranks(
    levels: list[Level],
    weight: float,
    kind: str,
    size_of: Callable[[Tensor], float],
    *,
    state: RankBoundaries,
    plan: MGRITPlan,
) -> RankHierarchy:
    """`Hierarchy` over ranks."""
    joint = state.joint.unsqueeze(-1)
    for level in levels:
        propagate = level.propagate
        if isinstance(propagate, Adjoint) and propagate.ends is not None:  # the gradient that arrives is not known
            level.propagate = replace(propagate, ends=propagate.ends & ~joint)
    joined = Hierarchy(_joined(levels[-1].propagate, state, plan), weight, kind, size_of) if plan.joined else None
    return RankHierarchy(
        levels, weight, kind, size_of, line=state.line, joint=joint, entry=state.entry_link, joined=joined
    )


def _joined(last: Propagator, state: RankBoundaries, plan: MGRITPlan) -> list[Level]:
    """The level with one point per rank, and coarser ones, the same on all ranks."""
    line = state.line
    ranks, batch = line.alive.shape

    def gather(values: Tensor) -> Tensor:
        mine = values[-1] if len(values) else values.new_zeros(values.shape[1:])
        if mine.dtype == torch.bool:
            return line.gather(mine.to(torch.uint8))[:-1].bool()
        return line.gather(mine)[:-1]

    first = line.gather(state.chain.first)
    head = line.heads.to(torch.uint8).argmax(0).to(first.device)
    begins = line.heads[line.place].to(first.device) & (state.entry_link == 0) & ~state.joint
    heads = line.gather(begins.to(torch.uint8)).bool()[1:].unsqueeze(-1)
    propagate = last.joined(gather, first[head, state.sequences], heads)
    levels, steps, size = [], ranks - 1, state.shape[2]
    while True:
        factor = LATER_FACTOR if steps > COARSEST else 1
        levels.append(Level.of(propagate, steps, factor, plan.relaxations[-1], (batch, size)))
        if factor == 1:
            return levels
        propagate, steps = propagate.merged(factor, plan.coarsening.inputs), steps // factor


@dataclass(kw_only=True)
class RankHierarchy(Hierarchy):
    """The coarse levels of one rank."""

    line: Line
    joint: Tensor
    """`(B, 1)`, whether a sequence comes to this rank from the one before."""
    entry: Tensor
    """`(B,)`, the point of the finest level at which it comes."""
    joined: Hierarchy | None = None
    """The coarsest level, gathered from all ranks, and coarser ones."""

    def _leaving(self, level: Level, last: Tensor) -> Tensor:
        """Φ of this rank's last interval on a level, applied to its last point `(B, S)`; zero on the last rank."""
        if not self.line.goes_on:
            return torch.zeros_like(last)
        return level.propagate(slice(level.steps, level.steps + 1), last.unsqueeze(0))[0]

    def _passed_on(self, *values: Tensor) -> list[Tensor]:
        """These values from the rank before: one collective."""
        heard = self.line.gather(torch.stack(values))
        return list(heard[self.line.place - 1] if self.line.place else torch.zeros_like(heard[0]))

    def _at_first(self, level: Level, arrived: Tensor) -> Tensor:
        """The residual at this rank's first point."""
        return torch.where(self.joint, arrived + level.f[0] - level.u[0], 0)

    def relax(self, level: Level) -> None:
        f_relax(level)
        for _ in range(level.sweeps):
            inner = residual(level)
            (arrived,) = self._passed_on(self._leaving(level, level.u[-1]))
            level.u[level.factor :: level.factor] += self.weight * inner
            level.u[0] += self.weight * self._at_first(level, arrived)
            f_relax(level)

    def hand_down(self, points: Tensor, missing: Tensor, coarse: Level) -> Tensor:
        points, missing = self._from_entry(points, missing)
        (arrived,) = self._passed_on(self._leaving(coarse, points[-1]))
        return self._restrict(points, missing, arrived, coarse)

    def _from_entry(self, points: Tensor, missing: Tensor) -> tuple[Tensor, Tensor]:
        """Points and residuals, with the entry's values at the empty chunks before it, which pass values on."""
        if not bool(self.entry.any()):
            return points, missing
        place = torch.arange(len(points), device=points.device).unsqueeze(-1)
        empty = (place <= self.entry) & self.joint.squeeze(-1)
        at = torch.where(empty, self.entry, place), torch.arange(len(self.entry), device=points.device)
        return points[at], missing[at].masked_fill((empty & (place > 0)).unsqueeze(-1), 0)

    def restrict(self, level: Level, coarser: Level) -> Tensor:
        points, inner = level.u[:: level.factor].clone(), residual(level)
        fine, coarse = self._passed_on(self._leaving(level, level.u[-1]), self._leaving(coarser, points[-1]))
        missing = torch.cat([self._at_first(level, fine).unsqueeze(0), inner])
        return self._restrict(points, missing, coarse, coarser)

    def _restrict(self, points: Tensor, missing: Tensor, arrived: Tensor, coarse: Level) -> Tensor:
        """Restrict on this rank; `arrived` is the coarse step of the rank before, applied to its last point."""
        super().hand_down(points, missing, coarse)
        coarse.f[0] = missing[0] + points[0] - torch.where(self.joint, arrived, 0)
        return points

    def set_sources(self) -> None:
        """Set the right-hand sides; the last interval's belongs to the next rank: one collective for all levels."""
        leaving = []
        for level in self.levels:
            source = level.propagate.source()
            level.f[:] = 0
            if source is not None:
                level.f[1:] = source[: level.steps]
                leaving.append(source[-1] if self.line.goes_on else torch.zeros_like(level.f[0]))
        if leaving:
            for level, arrived in zip(self.levels, self._passed_on(*leaving), strict=True):
                level.f[0] = arrived

    def solve_coarsest(self) -> None:
        """Solve the coarsest level redundantly on all ranks, or one rank after the other."""
        level = self.levels[-1]
        if self.joined is not None:
            top = self.joined.levels[0]
            top.u, top.f = self.line.gather(torch.cat([level.u, level.f])).transpose(0, 1).contiguous()
            self.joined.visit(0, self.kind)
            level.u[0] = top.u[self.line.place]
            return
        if self.line.place:
            level.u[0] = torch.where(self.joint, self.line.receive(level.u[0]) + level.f[0], level.u[0])
        serial(level)
        if self.line.goes_on:
            self.line.send(self._leaving(level, level.u[-1]))
