"""The interface of time steps: an equation between two neighbouring points, and its linearisation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from timeloom.ode.field import Field, pull_back
from timeloom.scan import linear_scan


@dataclass(frozen=True)
class Transfers:
    """The linearised equations of all steps: `M[i] δ[i+1] = M[i] A[i] δ[i] − residual[i]`.

    across: A, `(T, B, n, n)`: the derivative of a step's end by its begin.
    weight: M, `(T, B, n, n)`: the derivative of the residual by a step's end; None for the identity.
    """

    across: Tensor
    weight: Tensor | None = None

    def solve(self, residual: Tensor) -> Tensor:
        """`M⁻¹ residual`, the miss: how far each step's end would be off if its begin were right."""
        if self.weight is None:
            return residual
        return solve(self.weight, residual.unsqueeze(-1)).squeeze(-1)

    def solve_transposed(self, residual: Tensor) -> Tensor:
        if self.weight is None:
            return residual
        return solve(self.weight.mT, residual.unsqueeze(-1)).squeeze(-1)

    def carry(self, miss: Tensor) -> Tensor:
        """Changes of all points `(T, B, n)` that undo these misses: `δ[i+1] = A[i] δ[i] − miss[i]`, `δ[0] = 0`."""
        return linear_scan(self.across, -miss)

    def carry_back(self, grads: Tensor) -> Tensor:
        """The adjoint of `carry`: `μ[i] = grads[i] + A[i+1]ᵀ μ[i+1]` over `(T, B, n)`."""
        following = torch.cat([self.across[1:], torch.zeros_like(self.across[:1])])
        return linear_scan(following.mT, grads, reverse=True)


@dataclass(frozen=True)
class Evaluation:
    """A step's equations on a trajectory: their residuals, `(T, B, n)`, and their linearisation, computed on demand."""

    residual: Tensor
    transfers: Callable[[], Transfers]


class Step(ABC):
    """A one-step method as an equation `residual(y[i], y[i+1]) = 0`."""

    name: str
    order: int
    explicit: bool = False
    """Whether the equation is solved for y[i+1], so that one correction solves it."""

    @abstractmethod
    def evaluate(self, field: Field, t: Tensor, y: Tensor) -> Evaluation:
        """The equations of T steps at once: t `(T + 1, 1, 1)` or `(T + 1, B, 1)`, y `(T + 1, B, n)`.

        The residual is differentiable in y, t and what the field holds; the transfers are detached.
        """


def midpoint_jacobian(field: Field, t: Tensor, y: Tensor) -> Tensor:
    """`h ∂f/∂y` in the middle of every step, `(T, B, n, n)`, detached."""
    with torch.no_grad():
        h, middle = t[1:] - t[:-1], (t[1:] + t[:-1]) / 2
        return h.unsqueeze(-1) * field.jacobian(middle, (y[1:] + y[:-1]) / 2)[1]


def solve(matrix: Tensor, right: Tensor) -> Tensor:
    """`matrix⁻¹ right`; not finite for singular matrices, which then shows in the residual."""
    solution: Tensor = torch.linalg.solve_ex(matrix, right)[0]
    return solution


def identity_like(matrix: Tensor) -> Tensor:
    return torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)


def exact_transfers(step: Step, field: Field, t: Tensor, y: Tensor) -> Transfers:
    """Exact transfers by n vjps through the steps themselves, which cost more than a step's own transfers."""
    steps, batch = len(y) - 1, y.shape[1]
    times = t.detach().expand(-1, batch, 1)
    with torch.enable_grad():
        # every step as a trajectory of its own, so that its two ends have separate derivatives
        ends = torch.stack([y[:-1].detach().flatten(0, 1), y[1:].detach().flatten(0, 1)]).requires_grad_()
        alone = step.evaluate(field, torch.stack([times[:-1].flatten(0, 1), times[1:].flatten(0, 1)]), ends).residual
        rows = [pull_back(alone, ends, seed.expand_as(alone)) for seed in identity_like(alone)]
    begin, end = torch.stack(rows, -2).detach().unflatten(1, (steps, batch))
    if step.explicit:
        return Transfers(-begin)
    return Transfers(-solve(end, begin), end)
