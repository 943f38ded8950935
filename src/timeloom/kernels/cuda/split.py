"""Products of float32 matrices on the tensor cores, with about float32's accuracy.

Every row of the left factor and every column of the right one is scaled by a power of two, so that its largest value is
near 2^12, and split into two halves of fp16; three products of halves, added up in float32, are one product of three
times the depth. What is left out is 2^-22 of it. Long sums are cut into short ones: the tensor cores cut off what they
add.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from timeloom.torch_state import tf32

AVAILABLE = hasattr(torch.ops.aten.mm, "dtype_out") and hasattr(torch.ops.aten.bmm, "dtype")
"""Whether torch adds up products of halves in float32: from 2.8 on."""
LARGEST = 12
WORTH = 4e9
"""Operations of a product from which on splitting its factors costs less than it gains."""
SHORT_SUM = 2048
"""Terms that are added up at once."""


class Split(NamedTuple):
    """`(high + low) · undo`, about: two halves of fp16, and powers of two."""

    high: Tensor
    low: Tensor
    undo: Tensor


def split(matrix: Tensor, *along: int) -> Split:
    """Scaled by what is largest along these dimensions; of all without any."""
    largest = matrix.abs().amax(along, keepdim=True) if along else matrix.abs().amax()
    exponent = LARGEST - torch.frexp(largest.clamp(2.0**-90, 2.0**90)).exponent
    scaled = matrix * _power_of_two(exponent)
    high = scaled.half()
    return Split(high, (scaled - high).half(), _power_of_two(-exponent))


def _power_of_two(exponent: Tensor) -> Tensor:
    """Exactly, as torch.pow is not on every GPU: by its bits."""
    return ((exponent.int() + 127) << 23).view(torch.float32)


def product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """`left (m, k) @ right (k, n) + bias (n,)`."""
    if not _pays(left.numel() * right.shape[1], left):
        with tf32.products(False):
            return torch.mm(left, right) if bias is None else torch.addmm(bias, left, right)
    a, b = split(left, 1), split(right, 0)
    rows, columns = torch.cat([a.high, a.low, a.high], 1), torch.cat([b.high, b.high, b.low], 0)
    found = _added_up(rows, columns)
    found.mul_(a.undo)
    return found.mul_(b.undo) if bias is None else torch.addcmul(bias, found, b.undo)


def sum_outer(grads: Tensor, values: Tensor) -> Tensor:
    """`Σ grads[i] ⊗ values[i]`."""
    terms = len(grads)
    sums = max(1, terms // SHORT_SUM)
    whole = terms // sums * sums
    splits = _pays(grads.numel() * values.shape[1], grads)
    if splits:
        a, b = split(grads, 0), split(values, 0)
        rows = torch.cat([_cut(part, sums, whole) for part in (a.high, a.low, a.high)], 1)
        columns = torch.cat([_cut(part, sums, whole) for part in (b.high, b.high, b.low)], 1)
        found = _added_up(rows.transpose(1, 2), columns).sum(0).mul_(a.undo.t()).mul_(b.undo)
    with tf32.products(False):
        if not splits:
            found = torch.bmm(_cut(grads, sums, whole).transpose(1, 2), _cut(values, sums, whole)).sum(0)
        if whole < terms:
            found.addmm_(grads[whole:].t(), values[whole:])
    return found


def _added_up(left: Tensor, right: Tensor) -> Tensor:
    """A product of halves, or a batch of them, in float32."""
    operator: Any = torch.ops.aten.mm if left.dim() == 2 else torch.ops.aten.bmm
    found: Tensor = operator.dtype(left, right, torch.float32)
    return found


def _cut(matrix: Tensor, sums: int, whole: int) -> Tensor:
    """Rows for so many short sums, `(sums, ·, n)`."""
    return matrix[:whole].unflatten(0, (sums, -1))


def _pays(operations: int, factor: Tensor) -> bool:
    return bool(AVAILABLE and factor.is_cuda and 2 * operations >= WORTH)
