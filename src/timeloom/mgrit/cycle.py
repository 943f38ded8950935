"""Cycles through the coarse levels, and the first guess that comes up from the coarsest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from timeloom.mgrit.propagators import Propagator
from timeloom.mgrit.relax import Level, relax, residual, serial
from timeloom.mgrit.restrict import correct, interpolate, restrict


def coarse_levels(
    propagators: list[Propagator], factors: tuple[int, ...], relaxations: tuple[int, ...], like: Tensor
) -> list[Level]:
    """Coarse levels for chunk starts like `(C, B, S)`; factors and relaxations are those of levels 1, 2, …"""
    levels, steps = [], len(like) - 1
    for propagate, factor, sweeps in zip(propagators, (*factors, 1), relaxations, strict=True):
        levels.append(Level.of(propagate, steps, factor, sweeps, like.shape[1:]))
        steps //= factor
    return levels


@dataclass
class Hierarchy:
    """All coarse levels; `levels[0]` is level 1, with the chunk starts as its points."""

    levels: list[Level]
    weight: float
    kind: str
    """`V` or `F`."""
    size_of: Callable[[Tensor], Any]
    """The largest entry of a residual relative to the state's scale: a number, or one on the device."""
    left: dict[int, Any] = field(default_factory=dict)
    """Each level's own residual after its last visit; the coarsest level is solved exactly and has none."""

    def leave(self) -> tuple[float, ...]:
        """Return and clear the residuals that the last correction left on levels 1, 2, …"""
        left, self.left = self.left, {}
        return tuple(left[depth] for depth in sorted(left))

    def correction(self, starts: Tensor, jumps: Tensor) -> Tensor:
        """The moves of the chunk starts `(C, B, S)`, given the residuals at them (ignored at the first one)."""
        top = self.levels[0]
        points = self.hand_down(starts.to(top.f.dtype), jumps, top)
        self.visit(0, self.kind)
        return (top.u - points).to(starts.dtype)

    def guess(self, starts: Tensor, nested: bool) -> Tensor:
        """Chunk starts from the coarsest level up, `(C, B, S)`; `nested` runs a V-cycle on every level on the way."""
        for level in self.levels:
            level.u = starts[:1].to(level.f.dtype).repeat(level.steps + 1, 1, 1)
        self.set_sources()
        self.solve_coarsest()
        for depth in reversed(range(len(self.levels) - 1)):
            interpolate(self.levels[depth], self.levels[depth + 1])
            if nested:
                self.down_and_up(depth, "V")
        self.left = {}
        return self.levels[0].u.to(starts.dtype)

    def set_sources(self) -> None:
        """Set the right-hand sides for a first guess."""
        for level in self.levels:
            source = level.propagate.source()
            level.f[1:] = 0 if source is None else source

    def hand_down(self, points: Tensor, missing: Tensor, coarse: Level) -> Tensor:
        """Give a coarse level its points `(N + 1, B, S)` and the residuals at them; returns the points."""
        return restrict(points, missing[1:], coarse)

    def restrict(self, level: Level, coarser: Level) -> Tensor:
        """Give a level's C-points and the residuals at them to the next coarser level; returns the points."""
        return restrict(level.u[:: level.factor].clone(), residual(level), coarser)

    def relax(self, level: Level) -> None:
        """Relax a level by F, FCF, FCFCF, …"""
        relax(level, self.weight)

    def solve_coarsest(self) -> None:
        """Solve the coarsest level sequentially."""
        serial(self.levels[-1])

    def visit(self, depth: int, kind: str) -> None:
        """Solve a level: exactly if it is the coarsest, else by a V-cycle, or by an F- and then a V-cycle."""
        if depth == len(self.levels) - 1:
            self.solve_coarsest()
            return
        self.down_and_up(depth, kind)
        if kind == "F":
            self.down_and_up(depth, "V")
        self.left[depth] = self.size_of(residual(self.levels[depth]))

    def down_and_up(self, depth: int, kind: str) -> None:
        """One V- or F-cycle from this level down."""
        level, coarser = self.levels[depth], self.levels[depth + 1]
        self.relax(level)
        before = self.restrict(level, coarser)
        self.visit(depth + 1, kind)
        correct(level, coarser, before)
