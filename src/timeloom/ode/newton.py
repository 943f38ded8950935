"""Newton's method on a whole trajectory: all steps' equations at once."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from timeloom.ode.field import Field
from timeloom.ode.steps import Step, Transfers
from timeloom.ode.steps.base import exact_transfers

REUSE = 0.02
"""Factor by which a Newton step must shrink the residual for its linearisation to be used once more."""
SLOW = 0.3
"""Factor from which on a step's own transfers are given up for the exact ones."""
PATIENCE = 5
"""Newton steps without halving the residual before it counts as not converging."""


@dataclass(frozen=True)
class Fit:
    """Where Newton's method got to.

    y: the trajectory, `(T + 1, B, n)`.
    residuals: largest relative miss of a step before each Newton step, and after the last.
    good: how many leading steps meet the tolerance, in every sequence; T when it converged.
    """

    y: Tensor
    residuals: list[float]
    good: int

    @property
    def converged(self) -> bool:
        return self.good == len(self.y) - 1


def default_tolerance(dtype: torch.dtype) -> float:
    """Largest miss of a step that is put down to rounding, relative to the state."""
    return 8 * torch.finfo(dtype).eps


def fit(step: Step, field: Field, t: Tensor, y: Tensor, tolerance: float, max_iters: int) -> Fit:
    """Solve the equations of all T steps from a guess y, `(T + 1, B, n)`, whose first point is given.

    Each Newton step corrects all points by one linear scan. It goes on past the tolerance while the residual still
    falls: misses of one sign, each within the tolerance, would add up over many steps.
    """
    residuals: list[float] = []
    transfers: Transfers | None = None
    linearise, exact, good = True, False, 0
    while bool(y.isfinite().all()):
        now = step.evaluate(field, t, y)
        if transfers is None or (linearise and not exact):
            transfers = now.transfers()
        elif linearise:
            transfers = exact_transfers(step, field, t, y)
        miss = transfers.solve(now.residual)
        relative = relative_to_largest(miss, y)
        residuals.append(largest(relative))
        good = leading(relative <= tolerance)
        if settled(residuals, tolerance, y.dtype) or hopeless(residuals, max_iters):
            break
        factor = contraction(residuals) or 0.0
        linearise, exact = factor > REUSE, exact or factor > SLOW
        before, y = y, torch.cat([y[:1], y[1:] + transfers.carry(miss)])
    else:
        y = before if residuals else y
    return Fit(y, residuals, good)


def relative_to_largest(miss: Tensor, y: Tensor) -> Tensor:
    """Each step's miss `(T, B)`, relative to the largest value its sequence has had so far."""
    scale = y.abs().amax(-1).cummax(0).values[1:]
    return miss.abs().amax(-1) / scale.clamp(min=torch.finfo(y.dtype).tiny)


def largest(relative: Tensor) -> float:
    worst = float(relative.max()) if relative.numel() else 0.0
    return math.inf if math.isnan(worst) else worst


def leading(good: Tensor) -> int:
    """How many leading entries of `(T, B)` are good in all columns."""
    return int(good.all(1).to(torch.int64).cumprod(0).sum())


def settled(residuals: list[float], tolerance: float, dtype: torch.dtype) -> bool:
    """Whether the tolerance is met and all that is left is rounding. The first residual cannot tell: many small
    misses of one sign look like rounding, and a correction undoes them.
    """
    if len(residuals) < 2 or not residuals[-1] <= tolerance:
        return False
    return residuals[-1] <= torch.finfo(dtype).eps or (contraction(residuals) or 0.0) > 0.5


def hopeless(residuals: list[float], max_iters: int) -> bool:
    """Whether it makes no sense to go on."""
    if len(residuals) > max_iters or not math.isfinite(residuals[-1]):
        return True
    return len(residuals) > PATIENCE and not residuals[-1] < 0.5 * residuals[-1 - PATIENCE]


def contraction(residuals: list[float]) -> float | None:
    """Factor by which the last step shrank the residual."""
    return residuals[-1] / residuals[-2] if len(residuals) > 1 and residuals[-2] > 0 else None
