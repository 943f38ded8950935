"""The linear recurrence one step at a time: the truth."""

from __future__ import annotations

import torch
from torch import Tensor


def apply(a: Tensor, h: Tensor, dense: bool) -> Tensor:
    """One transfer: elementwise for diagonal elements, a matrix-vector product for dense ones."""
    return (a @ h.unsqueeze(-1)).squeeze(-1) if dense else a * h


def compose(later: Tensor, earlier: Tensor, dense: bool) -> Tensor:
    """The transfer of two steps."""
    return later @ earlier if dense else later * earlier


def scan(a: Tensor, b: Tensor, h0: Tensor) -> Tensor:
    """`h[t] = a[t] h[t-1] + b[t]`: a `(T, ..., n)` or `(T, ..., n, n)`, b `(T, ..., n)`, h0 `(..., n)` to h `(T,
    ..., n)`.
    """
    states, h, dense = [], h0, a.dim() > b.dim()
    for transfer, source in zip(a.unbind(0), b.unbind(0), strict=True):
        h = apply(transfer, h, dense) + source
        states.append(h)
    return torch.stack(states) if states else b
