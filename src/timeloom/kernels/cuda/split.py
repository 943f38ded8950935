"""Matrices of float32 for the tensor cores: scaled and split into two halves of fp16.

Three products of halves, added up in float32, are then a product of about float32's accuracy: what is left out is 2^-22
of it. The recurrent products of wide layers, short sums of many rows, are made so. Long sums are not, for the tensor
cores cut off what they add: a sum of 65,536 outer products was off by 1e-5 that way, by 3e-7 in plain float32. Those
split their factors tile by tile (see products.py).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

LARGEST = 12
"""Power of two near which the largest value is: products do not overflow, and small values keep their digits."""


class Split(NamedTuple):
    """`(high + low) · undo`, about: two halves of fp16, and a power of two."""

    high: Tensor
    low: Tensor
    undo: Tensor


def split(matrix: Tensor) -> Split:
    exponent = LARGEST - torch.frexp(matrix.abs().amax().clamp(2.0**-90, 2.0**90)).exponent
    scaled = matrix * _power_of_two(exponent)
    high = scaled.half()
    return Split(high, (scaled - high).half(), _power_of_two(-exponent))


def _power_of_two(exponent: Tensor) -> Tensor:
    """Exactly, as torch.pow is not on every GPU: by its bits."""
    return ((exponent.int() + 127) << 23).view(torch.float32)
