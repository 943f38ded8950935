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
"""Factor by which a Newton step must shrink the residual for its linearisation to be reused."""
SLOW = 0.3
"""Factor above which a step's own transfers are replaced by exact ones."""
PATIENCE = 5
"""Newton steps without halving the residual before it counts as not converging."""


@dataclass(frozen=True)
class Fit:
    """The result of Newton's method.

    y: the trajectory, `(T + 1, B, n)`.
    residuals: largest relative miss of a step before each Newton step, and after the last.
    met: the steps that meet the tolerance, `(T, B)`.
    """

    y: Tensor
    residuals: list[float]
    met: Tensor

    @property
    def good(self) -> int:
        """Number of leading steps that meet the tolerance in every sequence; T when it converged."""
        return leading(self.met)

    @property
    def converged(self) -> bool:
        return bool(self.met.all())


def default_tolerance(dtype: torch.dtype) -> float:
    """Largest miss of a step that counts as rounding, relative to the state."""
    return 8 * torch.finfo(dtype).eps


def fit(step: Step, field: Field, t: Tensor, y: Tensor, tolerance: float, max_iters: int) -> Fit:
    """Solve the equations of all T steps from a guess y, `(T + 1, B, n)`, whose first point is given.

    Each Newton step corrects all points by one linear scan. It goes on past the tolerance while the residual still
    falls: misses of one sign, each within the tolerance, would add up over many steps. Sequences stop independently:
    one that diverges does not hold up the others.
    """
    history = History(y, tolerance, max_iters)
    transfers: Transfers | None = None
    linearise, exact = True, False
    while True:
        now = step.evaluate(field, t, y)
        if transfers is None or (linearise and not exact):
            transfers = now.transfers()
        elif linearise:
            transfers = exact_transfers(step, field, t, y)
        miss = transfers.solve(now.residual)
        relative = relative_to_largest(miss, y)
        history.add(relative)
        if history.over:
            return Fit(y, history.residuals, relative <= tolerance)
        factor = history.factor
        linearise, exact = factor > REUSE, exact or factor > SLOW
        moved = torch.cat([y[:1], y[1:] + transfers.carry(miss)])
        history.stopped |= ~moved.isfinite().all(-1).all(0)
        y = torch.where(history.stopped.unsqueeze(-1), y, moved)


def relative_to_largest(miss: Tensor, y: Tensor) -> Tensor:
    """Each step's miss `(T, B)`, relative to the largest value its sequence has had so far."""
    scale = y.abs().amax(-1).cummax(0).values[1:]
    return miss.abs().amax(-1) / scale.clamp(min=torch.finfo(y.dtype).tiny)


def leading(good: Tensor) -> int:
    """Number of leading entries of `(T, B)` that are good in all columns."""
    return int(good.all(1).to(torch.int64).cumprod(0).sum())


class History:
    """Largest relative residuals after each iteration, and which sequences of the batch have stopped.

    A sequence has settled if it meets the tolerance and only rounding is left, or if it meets a larger tolerance that
    the user gave. The first residual cannot show rounding: many small misses of one sign look like it, and a correction
    removes them. A sequence is given up if its residual is not finite or does not fall.
    """

    def __init__(self, y: Tensor, tolerance: float, max_iters: int) -> None:
        self.tolerance, self.max_iters = tolerance, max_iters
        self.stopped = torch.zeros(y.shape[1], dtype=torch.bool, device=y.device)
        self._worst: list[Tensor] = []

    def add(self, relative: Tensor) -> None:
        """Record the residuals `(T, B)` of an iteration."""
        worst = relative.amax(0)
        self._worst.append(torch.where(worst.isnan(), math.inf, worst))
        self.stopped |= self._settled() | self._hopeless()

    @property
    def over(self) -> bool:
        return bool(self.stopped.all())

    @property
    def residuals(self) -> list[float]:
        """The largest residual of all sequences after each iteration."""
        return [float(worst.max()) for worst in self._worst]

    @property
    def factor(self) -> float:
        """Factor by which the last iteration shrank the largest residual of running sequences; 0 after the first."""
        if len(self._worst) < 2:
            return 0.0
        before, now = (float(worst[~self.stopped].max()) for worst in self._worst[-2:])
        return now / before if before > 0 else 0.0

    def _settled(self) -> Tensor:
        now = self._worst[-1]
        if self.tolerance > default_tolerance(now.dtype):  # the user's own, which is precise enough
            return now <= self.tolerance
        if len(self._worst) < 2:
            return torch.zeros_like(now, dtype=torch.bool)
        return (now <= self.tolerance) & ((now <= torch.finfo(now.dtype).eps) | (now > 0.5 * self._worst[-2]))

    def _hopeless(self) -> Tensor:
        now = self._worst[-1]
        if len(self._worst) > self.max_iters:
            return torch.ones_like(now, dtype=torch.bool)
        hopeless = ~now.isfinite()
        if len(self._worst) > PATIENCE:
            hopeless |= ~(now < 0.5 * self._worst[-1 - PATIENCE])
        return hopeless
