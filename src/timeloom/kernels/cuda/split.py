"""Float32 matrices for the tensor cores: scaled and split into two fp16 halves.

Three products of halves, added up in float32, make a product of about float32's accuracy: its relative error is 2^-22.
The recurrent products of wide layers, short sums for many rows, are computed so. Long sums are not, as the tensor cores
truncate when they accumulate: a sum of 65,536 outer products was off by 1e-5 that way, by 3e-7 in plain float32. Long
sums split their factors tile by tile (see products.py).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

LARGEST = 12
"""Exponent of the power of two that the largest value is scaled to: products do not overflow, small values keep their
digits."""


class Split(NamedTuple):
    """A matrix as about `(high + low) · undo`: two fp16 halves, and a power of two."""

    high: Tensor
    low: Tensor
    undo: Tensor


def split(matrix: Tensor) -> Split:
    exponent = LARGEST - torch.frexp(matrix.abs().amax().clamp(2.0**-90, 2.0**90)).exponent
    scaled = matrix * _power_of_two(exponent)
    high = scaled.half()
    return Split(high, (scaled - high).half(), _power_of_two(-exponent))


def _power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent from its bits: exact, which torch.pow is not on every GPU."""
    return ((exponent.int() + 127) << 23).view(torch.float32)
