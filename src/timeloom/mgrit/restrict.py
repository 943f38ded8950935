"""Between two levels, by the full approximation scheme: the coarse level solves for states, not for errors."""

from __future__ import annotations

from torch import Tensor

from timeloom.mgrit.relax import Level, f_relax


def restrict(points: Tensor, missing: Tensor, coarse: Level) -> Tensor:
    """Give a coarse level the C-points v `(N + 1, B, S)` and the residuals r at all but the first; returns v.

    `f[i] = r[i] + v[i] − Φ(v[i−1])`: if the residuals are zero, v solves the coarse problem and stays.
    """
    coarse.u = points.clone()
    coarse.f[1:] = missing + points[1:] - coarse.propagate(slice(0, coarse.steps), points[:-1])
    return points


def correct(fine: Level, coarse: Level, before: Tensor) -> None:
    """Add the coarse level's changes to the C-points, and relax the F-points."""
    fine.u[:: fine.factor] += coarse.u - before
    f_relax(fine)


def interpolate(fine: Level, coarse: Level) -> None:
    """Make a first guess from the coarse level's points, with F-relaxation between them."""
    fine.u[:: fine.factor] = coarse.u
    f_relax(fine)
