"""`linear_scan`: the public, differentiable linear recurrence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from timeloom.scan import chunked
from timeloom.scan.reference import apply


def linear_scan(a: Tensor, b: Tensor, h0: Tensor | None = None, reverse: bool = False) -> Tensor:
    """Solve `h[t] = a[t] h[t-1] + b[t]` for all t; differentiable, any number of times.

    a: transfers, diagonal with the shape of b, `(T, B, n)`, or dense, `(T, B, n, n)`. Any leading batch shape will do.
    b: sources, `(T, B, n)`.
    h0: state before the first step, `(B, n)`; zero by default.
    reverse: run from the last step to the first: `h[t] = a[t] h[t+1] + b[t]`, with h0 the state after the last.
    Returns h, `(T, B, n)`.
    """
    _check(a, b, h0)
    if h0 is None:
        h0 = b.new_zeros(b.shape[1:])
    result: Tensor = _LinearScan.apply(a.flip(0), b.flip(0), h0).flip(0) if reverse else _LinearScan.apply(a, b, h0)
    return result


def _check(a: Tensor, b: Tensor, h0: Tensor | None) -> None:
    if b.dim() < 1:
        raise ValueError("b must have a time dimension, got a scalar")
    dense = b.dim() >= 2 and a.dim() == b.dim() + 1
    expected = (*b.shape, b.shape[-1]) if dense else tuple(b.shape)
    if tuple(a.shape) != expected:
        raise ValueError(
            f"a has shape {tuple(a.shape)}; with b of shape {tuple(b.shape)} it must be {tuple(b.shape)} (diagonal)"
            + (f" or {(*b.shape, b.shape[-1])} (dense)" if b.dim() >= 2 else "")
        )
    if h0 is not None and h0.shape != b.shape[1:]:
        raise ValueError(f"h0 has shape {tuple(h0.shape)}, expected {tuple(b.shape[1:])} (b without time)")
    for name, other in (("a", a), ("h0", h0)):
        if other is not None and (other.dtype, other.device) != (b.dtype, b.device):
            raise ValueError(
                f"{name} is {other.dtype} on {other.device}, b is {b.dtype} on {b.device}: they must agree"
            )


class _LinearScan(torch.autograd.Function):
    """The adjoint of a linear scan is a linear scan over reversed time, so its backward is differentiable too.

    λ[t] = g[t] + a[t+1]ᵀ λ[t+1];  db = λ,  da[t] = λ[t] ⊗ h[t-1],  dh0 = a[0]ᵀ λ[0].
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, h0: Tensor) -> Tensor:
        states = chunked.scan(a, b, h0)
        ctx.save_for_backward(a, h0, states)
        return states

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        a, h0, states = ctx.saved_tensors
        (grad,) = grads
        if len(states) == 0:
            return torch.zeros_like(a), grad, torch.zeros_like(h0)
        dense = a.dim() > states.dim()
        transposed = a.transpose(-1, -2) if dense else a
        following = torch.cat([transposed[1:], torch.zeros_like(transposed[:1])])
        adjoint = linear_scan(following, grad, reverse=True)
        previous = torch.cat([h0.unsqueeze(0), states[:-1]])
        d_a = None
        if ctx.needs_input_grad[0]:
            d_a = adjoint.unsqueeze(-1) * previous.unsqueeze(-2) if dense else adjoint * previous
        d_h0 = apply(transposed[0], adjoint[0], dense) if ctx.needs_input_grad[2] else None
        return d_a, adjoint, d_h0
