"""The kinds of elements of a linear recurrence; applying one to a state, and composing two."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

Structure = Literal["diagonal", "dense", "block"]
"""Shapes of one element `a` and of a state `h`: diagonal `(..., n)` and `(..., n)`; dense `(..., n, n)` and `(..., n)`;
block `(..., 2, 2, n)` and `(..., 2, n)`, n matrices of 2 × 2 stored as four diagonals."""

DIMS: dict[Structure, int] = {"diagonal": 0, "dense": 1, "block": 1}
"""Dimensions that `a` has beyond those of `b`."""


def start(b: Tensor, h0: Tensor | None) -> Tensor:
    """The state before the first step: h0, or zero."""
    return b.new_zeros(b.shape[1:]) if h0 is None else h0


def apply(a: Tensor, h: Tensor, structure: Structure) -> Tensor:
    """Apply an element to a state."""
    if structure == "dense":
        return (a @ h.unsqueeze(-1)).squeeze(-1)
    return a * h if structure == "diagonal" else (a * h.unsqueeze(-3)).sum(-2)


def compose(later: Tensor, earlier: Tensor, structure: Structure) -> Tensor:
    """The element of two steps together."""
    if structure == "dense":
        return later @ earlier
    if structure == "diagonal":
        return later * earlier
    return (later.unsqueeze(-2) * earlier.unsqueeze(-4)).sum(-3)


def transpose(a: Tensor, structure: Structure) -> Tensor:
    """The transposed elements, as a view."""
    if structure == "diagonal":
        return a
    return a.transpose(-1, -2) if structure == "dense" else a.transpose(-3, -2)
