"""One step after the other: the plain run of a step, a first guess from few large steps, and the step as a cell."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from timeloom.ode.field import Field
from timeloom.ode.newton import default_tolerance, fit
from timeloom.ode.steps import RK4, Step
from timeloom.ode.steps.base import exact_transfers

MOST_INNER = 50
"""Newton steps at most for the equation of one implicit step."""


def advance(step: Step, field: Field, t: Tensor, y: Tensor) -> Tensor:
    """One step from y `(B, n)` between the times `t` `(2, 1 or B, 1)`: the next y, `(B, n)`, differentiable.

    An implicit equation is solved off the tape; one more Newton step on it, with its matrix held fixed, has the
    solution's derivatives.
    """
    guess = torch.stack([y.detach(), y.detach()])
    if not step.explicit:
        with torch.no_grad():
            guess = fit(step, field, t.detach(), guess, default_tolerance(y.dtype), MOST_INNER).y
    now = step.evaluate(field, t, torch.stack([y, guess[1]]))
    if step.explicit:
        return guess[1] - now.residual[0]
    with torch.no_grad():
        transfers = exact_transfers(step, field, t, guess)
    return guess[1] - transfers.solve(now.residual)[0]


def march(step: Step, field: Field, t: Tensor, y: Tensor) -> Tensor:
    """All points `(T + 1, B, n)` of a sequential run from y `(B, n)`."""
    points = [y]
    for i in range(len(t) - 1):
        points.append(advance(step, field, t[i : i + 2], points[-1]))
    return torch.stack(points)


def first_guess(field: Field, t: Tensor, y: Tensor) -> Tensor:
    """A trajectory to start Newton's method from: about √T Runge–Kutta steps, and cubics between them.

    The first point everywhere where steps so large run away: where they move further than twice their slopes.
    """
    steps = len(t) - 1
    at = torch.linspace(0, steps, math.isqrt(steps - 1) + 2, dtype=torch.float64, device=t.device).round().long()
    coarse_t = t[at]
    coarse = march(RK4(), field, coarse_t, y)
    slopes = field(coarse_t, coarse)
    moved, pushed = coarse[1:] - coarse[:-1], (coarse_t[1:] - coarse_t[:-1]) * slopes[:-1]
    if not bool((moved.abs().amax(-1).sum(0) <= 2 * pushed.abs().amax(-1).sum(0)).all()):
        return y.expand(len(t), *y.shape).clone()
    left = torch.searchsorted(at, torch.arange(len(t), device=t.device), right=True).sub(1).clamp(max=len(at) - 2)
    h = coarse_t[left + 1] - coarse_t[left]
    s = (t - coarse_t[left]) / h
    rise = coarse[left + 1] - coarse[left]
    bend = (1 - s) * (h * slopes[left] - rise) - s * (h * slopes[left + 1] - rise)
    return coarse[left] + s * (rise + (1 - s) * bend)


def as_cell(step: Step, field: Field) -> Callable[[Tensor, Tensor], Tensor]:
    """The step as a cell for `timeloom.unroll`: a state `(N, n)` and `(begin, end)` of the step, `(N, 2)`."""
    return lambda y, times: advance(step, field, times.t().unsqueeze(-1), y)
