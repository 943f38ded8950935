"""The right-hand side of an ODE, evaluated at many times at once, and its Jacobian."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Function = Callable[[Tensor, Tensor], Tensor]


class Field:
    """A user's `f(t, y)` over rows, lifted to trajectories: t `(K, 1, 1)` or `(K, B, 1)`, y `(K, B, n)`."""

    def __init__(self, function: Function) -> None:
        self.function = function

    def __call__(self, t: Tensor, y: Tensor) -> Tensor:
        """`f` at every point, `(K, B, n)`, by one call on K·B rows."""
        rows = y.flatten(0, 1)
        out: Any = self.function(t.expand(*y.shape[:2], 1).flatten(0, 1), rows)
        if not isinstance(out, Tensor):
            raise TypeError(f"f(t, y) returned {type(out).__name__}, expected a tensor of the shape of y")
        if out.shape != rows.shape:
            raise ValueError(
                f"f(t, y) returned shape {tuple(out.shape)} for y of shape {tuple(rows.shape)} and t of shape "
                f"{(len(rows), 1)}: dy/dt must have the shape of y. f is given many times as rows; write it batched."
            )
        if out.dtype != y.dtype:
            raise TypeError(
                f"f(t, y) returned {out.dtype} for y of {y.dtype}: cast what f holds, or y0, so that they agree"
            )
        return out.reshape(y.shape)

    def jacobian(self, t: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """`f` and `∂f/∂y`, `(K, B, n)` and `(K, B, n, n)`, by n vjps over all rows.

        On autograd's tape if gradients are enabled, else detached.
        """
        on_tape = torch.is_grad_enabled()
        with torch.enable_grad():
            point = y if on_tape and y.requires_grad else y.detach().requires_grad_()
            value = self(t, point)
            rows = []
            for unit in range(y.shape[-1]):
                seed = torch.zeros_like(value)
                seed[..., unit] = 1
                rows.append(pull_back(value, point, seed, on_tape))
        jacobian = torch.stack(rows, -2)
        return (value, jacobian) if on_tape else (value.detach(), jacobian.detach())


def pull_back(out: Tensor, point: Tensor, seed: Tensor, on_tape: bool = False) -> Tensor:
    """`(∂out/∂point)ᵀ seed`, zero where out does not depend on the point; the graph is kept."""
    if not out.requires_grad:
        return torch.zeros_like(point)
    (grad,) = torch.autograd.grad(out, point, seed, retain_graph=True, create_graph=on_tape, allow_unused=True)
    return torch.zeros_like(point) if grad is None else grad
