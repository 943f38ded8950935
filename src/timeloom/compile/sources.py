"""Where lanes come from; `lanes` explains what they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

ROW = 1 << 40
"""Lanes of row r are offset by r + 1 times this; lanes of constants, which belong to no row, are not."""
ZERO = -1
"""The lane of a missing weight, which counts as zero."""


@dataclass(frozen=True)
class Source:
    """`width` lanes from `base` on, created together."""

    base: int
    width: int
    kind: str
    """state, const, x, number, a pointwise function, product or total."""
    detail: Any = None
    """The part, the node or the number; for a product, the lanes of its weights, `(blocks, out, in)`."""
    operands: tuple[Tensor, ...] = ()
    """Lanes of the arguments, `(width,)` each; for a product `(blocks, in)`, for a total `(width, in)`."""
