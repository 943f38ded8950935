"""Where lanes come from: `lanes` says what those are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

ROW = 1 << 40
"""Lanes of row r are marked r + 1 times this; those of constants, which belong to no row, are not."""
ZERO = -1
"""The lane of a weight that is not there."""


@dataclass(frozen=True)
class Source:
    """`width` lanes from `base` on, made together."""

    base: int
    width: int
    kind: str
    """state, const, x, number, a pointwise function, product or total."""
    detail: Any = None
    """The part, the node, the number; of a product its weights' lanes, `(blocks, out, in)`."""
    operands: tuple[Tensor, ...] = ()
    """Lanes that each lane is a function of, `(width,)` each; of a product `(blocks, in)`; of a total `(width, in)`."""
