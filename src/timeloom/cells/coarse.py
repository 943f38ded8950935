"""Coarse steps: one evaluation that approximates many steps of a cell, and its vjp."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from timeloom.cells.base import Cell

Pull = Callable[[slice, Tensor], Tensor]
"""`pull(at, grad)`: the vjps of the intervals `at`, applied to grad `(k, B, S)`."""
March = tuple[Callable[[Tensor, Tensor], Tensor], Tensor]
"""`step(state, x)` on rows `(B, S)` and `(B, K)`, and the x of every interval, `(N, B, K)`."""
UserStep = Callable[[Any, Tensor, Tensor], Any]
"""A user's own coarse step, `step(h, x, span) -> h`: h and x as the user's cell takes them, span `(N, 1)`."""


class Coarse(ABC):
    """A step over `span` fine steps. It need not be exact: multigrid only corrects with it.

    Rows are flat as in `Cell`: state `(N, S)`, u `(N, K)`, span `(N, 1)`, the number of fine steps as a float.
    """

    @abstractmethod
    def step(self, state: Tensor, u: Tensor, span: Tensor) -> Tensor:
        """The state after `span` steps, `(N, S)`."""

    @abstractmethod
    def linearise(self, state: Tensor, u: Tensor, span: Tensor) -> Pull:
        """The vjps at these points, for intervals `(K, B, ·)`; prepared once, as they are applied many times."""

    def marching(self, u: Tensor, span: Tensor, added: Tensor) -> March | None:
        """A march through all intervals `(K, B, ·)` that adds `added` `(K, B, S)` after each, for generated kernels.

        None if no kernels can be generated for it.
        """
        return None

    def marching_back(self, state: Tensor, u: Tensor, span: Tensor, added: Tensor) -> March | None:
        """The same for their vjps at these states."""
        return None


class Frozen(Coarse):
    """Any cell with its decay d and the rest of its step, `b = f(s) − d s`, frozen for the whole span m:

        s⁺ = d^m s + (1 + d + … + d^(m−1)) b

    Exact for a step that is linear, diagonal and constant. The decay is clamped to [−1, 1].
    """

    def __init__(self, cell: Cell) -> None:
        self.cell = cell

    def _powers(self, state: Tensor, u: Tensor, span: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        decay = self.cell.decay(state, u).detach().clamp(-1.0, 1.0)
        kept = decay.pow(span)
        return decay, kept, geometric(decay, kept, span)

    def step(self, state: Tensor, u: Tensor, span: Tensor) -> Tensor:
        decay, kept, total = self._powers(state, u, span)
        return kept * state + total * (self.cell.step(state, u) - decay * state)

    def linearise(self, state: Tensor, u: Tensor, span: Tensor) -> Pull:
        flat = (state.flatten(0, 1), u.flatten(0, 1), span.flatten(0, 1))
        decay, kept, total = (value.view_as(state) for value in self._powers(*flat))

        def pull(at: slice, grad: Tensor) -> Tensor:
            rows = (state[at].flatten(0, 1), u[at].flatten(0, 1), (total[at] * grad).flatten(0, 1))
            return self.cell.vjp(*rows)[0].view_as(grad) + (kept[at] - total[at] * decay[at]) * grad

        return pull


class UsersOwn(Coarse):
    """A user's coarse step for his own cell, differentiated by autograd."""

    def __init__(self, cell: Cell, function: UserStep) -> None:
        self.cell = cell
        self.function = function

    def step(self, state: Tensor, u: Tensor, span: Tensor) -> Tensor:
        return self.cell.call_own(self.function, state, u, span)

    def linearise(self, state: Tensor, u: Tensor, span: Tensor) -> Pull:
        def pull(at: slice, grad: Tensor) -> Tensor:
            with torch.enable_grad():
                rows = state[at].flatten(0, 1).detach().requires_grad_()
                out = self.step(rows, u[at].flatten(0, 1).detach(), span[at].flatten(0, 1))
            if not out.requires_grad:
                return torch.zeros_like(grad)
            (back,) = torch.autograd.grad(out, rows, grad.flatten(0, 1), allow_unused=True)
            return torch.zeros_like(grad) if back is None else back.view_as(grad)

        return pull


def geometric(ratio: Tensor, power: Tensor, span: Tensor) -> Tensor:
    """`1 + ratio + … + ratio^(span−1)`, given `power = ratio^span`."""
    rest = 1 - ratio
    standing = rest.abs() < 1e-6
    return torch.where(standing, span.expand_as(ratio), (1 - power) / rest.masked_fill(standing, 1.0))
