"""Between two levels, by the full approximation scheme: the coarse level solves for states, not for errors."""

from __future__ import annotations

from torch import Tensor

from timeloom.mgrit.relax import Level, f_relax


def restrict(points: Tensor, missing: Tensor, coarse: Level) -> Tensor:
    """Give a coarse level the C-points v `(N + 1, B, S)` and what is missing at all but the first; returns v.

    `f[i] = r[i] + v[i] − Φ(v[i−1])`: where nothing is missing, v solves the coarse problem and stays.
    """
    coarse.u = points.clone()
    coarse.f[1:] = missing + points[1:] - coarse.propagate(slice(0, coarse.steps), points[:-1])
    return points


def correct(fine: Level, coarse: Level, before: Tensor) -> None:
    """Add what the coarse level changed to the C-points, and carry it to the F-points."""
    fine.u[:: fine.factor] += coarse.u - before
    f_relax(fine)


def interpolate(fine: Level, coarse: Level) -> None:
    """A first guess: the coarse level's points, and F-relaxation between them."""
    fine.u[:: fine.factor] = coarse.u
    f_relax(fine)
