"""Relaxation on one coarse level: all intervals between C-points side by side, one batched step at a time.

A level solves `u[i+1] = Φ(i, u[i]) + f[i+1]`, i = 0 … N−1. Its C-points are 0, m, 2m, …; the others are F-points.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from timeloom.mgrit.marched import marched
from timeloom.mgrit.propagators import Propagator

FEWEST_MARCHED = 16
"""Fewest steps of a coarsest level for which kernels save time."""


@dataclass
class Level:
    """One coarse level: Φ, the coarsening factor m to the next level (1 on the coarsest), points u, right sides f."""

    propagate: Propagator
    steps: int
    factor: int
    sweeps: int
    """C-relaxations before going down, each followed by an F-relaxation: 0 for F, 1 for FCF, 2 for FCFCF."""
    u: Tensor
    """`(N + 1, B, S)`, the points."""
    f: Tensor
    """`(N + 1, B, S)`, the right-hand side; f[0] is only used if the point before is on another rank."""

    @classmethod
    def of(cls, propagate: Propagator, steps: int, factor: int, sweeps: int, shape: tuple[int, ...]) -> Level:
        """A level of zeros, with points of shape `(B, S)`."""
        points = propagate.span.new_zeros(steps + 1, *shape)
        return cls(propagate, steps, factor, sweeps, points, points.clone())

    def after(self, at: slice) -> Tensor:
        """`Φ(i, u[i]) + f[i+1]` for the steps i of a slice that ends at N: the required values of the next points."""
        assert at.stop == self.steps
        return self.propagate(at, self.u[at]) + self.f[at.start + 1 :: at.step]


def f_relax(level: Level) -> None:
    """March from every C-point over the F-points after it."""
    for j in range(level.factor - 1):
        at = slice(j, level.steps, level.factor)
        level.u[j + 1 :: level.factor] = level.after(at)


def c_relax(level: Level, weight: float) -> None:
    """Move every C-point to Φ of the point before it, by a share `weight` of the way."""
    level.u[level.factor :: level.factor] += weight * residual(level)


def residual(level: Level) -> Tensor:
    """The residual at every C-point but the first: `Φ(u[i−1]) + f[i] − u[i]`, i = m, 2m, …"""
    m = level.factor
    return level.after(slice(m - 1, level.steps, m)) - level.u[m::m]


def relax(level: Level, weight: float) -> None:
    """Relax by F, FCF, FCFCF, …, as `level.sweeps` says."""
    f_relax(level)
    for _ in range(level.sweeps):
        c_relax(level, weight)
        f_relax(level)


def serial(level: Level) -> None:
    """Solve the coarsest level exactly, one step after the other; by compiled kernels if enough steps pay for them."""
    worth = level.steps >= FEWEST_MARCHED and level.u.device.type == "cpu"
    found = level.propagate.marching(level.f[1:]) if worth else None
    points = None if found is None else marched(found, level.u[0])
    if points is not None:
        level.u[1:] = points
        return
    for i in range(level.steps):
        level.u[i + 1] = (level.propagate(slice(i, i + 1), level.u[i : i + 1]) + level.f[i + 1])[0]
