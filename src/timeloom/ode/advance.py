"""One step after the other: the plain run of a step, a first guess from few large steps, and the step as a cell."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from timeloom.ode.field import Field
from timeloom.ode.newton import default_tolerance, fit, relative_to_largest
from timeloom.ode.steps import RK4, Step
from timeloom.ode.steps.base import exact_transfers
from timeloom.solve.autograd import refuse_second_order

TWICE_DIFFERENTIABLE = "solver='sequential' with step='rk4'"
"""The options that have second-order gradients."""
MOST_INNER = 50
"""Most Newton steps for the equation of one implicit step."""
SHORTEST_STRIDE = 1e-4
"""Shortest stride, as a fraction of a step, by which its solution is continued before it is given up."""
MOST_STRIDES = 60
"""Most strides that are tried: near a pole a solution can be followed in ever shorter ones without end."""
ROUNDING = 1e4
"""Multiple of the tolerance up to which the remaining residual of an equation counts as rounding."""


def advance(step: Step, field: Field, t: Tensor, y: Tensor) -> Tensor:
    """One step from y `(B, n)` between the times `t` `(2, 1 or B, 1)`: the next y, `(B, n)`, differentiable.

    An implicit equation is solved off the tape; one more Newton step on it, with its matrix held fixed, has the
    solution's first derivatives. Rows whose equation could not be solved are NaN.
    """
    guess = torch.stack([y.detach(), y.detach()])
    if step.explicit:
        return guess[1] - step.evaluate(field, t, torch.stack([y, guess[1]])).residual[0]
    with torch.no_grad():
        guess = _solve_implicit(step, field, t.detach(), guess)
        transfers = exact_transfers(step, field, t, guess)
    now = step.evaluate(field, t, torch.stack([y, guess[1]]))
    following: Tensor = _OnceDifferentiable.apply(guess[1] - transfers.solve(now.residual)[0])
    return following


def _solve_implicit(step: Step, field: Field, t: Tensor, guess: Tensor) -> Tensor:
    """Begin and end of one step, `(2, B, n)`: by Newton's method, and where that fails, by continuation.

    The end of a shorter step from the same begin is a good guess for that of a longer one. Rows proceed independently.
    """
    tolerance = default_tolerance(guess.dtype)
    found = fit(step, field, t, guess, tolerance, MOST_INNER)
    solved = found.met[0]
    guess = torch.where(solved.unsqueeze(-1), found.y, guess)
    reached, t = solved.to(t.dtype), t.expand(2, len(solved), 1)
    stride = torch.full_like(reached, 0.5)
    for _ in range(MOST_STRIDES):
        left = (reached < 1) & (stride > SHORTEST_STRIDE) & guess[0].isfinite().all(-1)
        if not bool(left.any()):
            break
        target = (reached + stride)[left].clamp(max=1)
        begin, end = t[:, left]
        part = torch.stack([begin, begin + target.unsqueeze(-1) * (end - begin)])
        attempt = fit(step, field, part, guess[:, left], tolerance, MOST_INNER)
        solved = attempt.met[0]
        guess[:, left] = torch.where(solved.unsqueeze(-1), attempt.y, guess[:, left])
        reached[left] = torch.where(solved, target, reached[left])
        stride[left] *= torch.where(solved, 2.0, 0.5).to(stride.dtype)
    solved = (reached == 1).unsqueeze(-1)
    y = torch.where(solved, guess, found.y)
    if not bool(solved.all()):
        solved = solved | _solved(step, field, t, y)
    return torch.stack([y[0], torch.where(solved, y[1], torch.nan)])


def _solved(step: Step, field: Field, t: Tensor, y: Tensor) -> Tensor:
    """Rows `(B, 1)` whose equation holds up to rounding."""
    miss = exact_transfers(step, field, t, y).solve(step.evaluate(field, t, y).residual)
    return (relative_to_largest(miss, y)[0] <= ROUNDING * default_tolerance(y.dtype)).unsqueeze(-1)


class _OnceDifferentiable(torch.autograd.Function):
    """Identity whose gradient cannot be differentiated: the matrix of the Newton step before it was held fixed."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        refuse_second_order(TWICE_DIFFERENTIABLE)
        return grads[0]


def march(step: Step, field: Field, t: Tensor, y: Tensor) -> Tensor:
    """All points `(T + 1, B, n)` of a sequential run from y `(B, n)`."""
    points = [y]
    for i in range(len(t) - 1):
        points.append(advance(step, field, t[i : i + 2], points[-1]))
    return torch.stack(points)


def first_guess(field: Field, t: Tensor, y: Tensor) -> Tensor:
    """A trajectory to start Newton's method from: about √T Runge–Kutta steps, and cubics between them.

    The first point everywhere if such large steps diverge: if they move further than twice their slopes.
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
