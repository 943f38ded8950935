"""One call of a generated kernel: the host's side of fused.h."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from timeloom.compile.emit_step import Pack
from timeloom.compile.graph import Matrix
from timeloom.kernels.cpu import build
from timeloom.problem import Segments

_SIZES = "batch rows n depth input_stride lead incoming_width"
_POINTERS = """
    seq begin end lengths resets origin final inputs masks mask_strides starts ends decay incoming written sums
    input_grads tape reset_grads states weights units
"""
Held = Tensor | ctypes.Array[Any]
Given = dict[str, Held | None]
"""What a kernel is given the addresses of, by the names of its arguments."""


class _FusedArgs(ctypes.Structure):
    """`fused_args` of fused.h, field by field."""

    _fields_ = [(name, ctypes.c_long) for name in _SIZES.split()] + [
        (name, ctypes.c_void_p) for name in _POINTERS.split()
    ]


Kernel = Callable[[Any, int], int]


def launch(kernel: Kernel, segments: Segments, sizes: dict[str, int], given: Given) -> None:
    """Run a kernel over stretches; what is not given, or None, is NULL to it."""
    held = {name: value for name, value in given.items() if value is not None}
    held |= zip(("seq", "begin", "end"), (column.contiguous() for column in segments.columns), strict=True)
    args = _FusedArgs(rows=len(segments), **sizes, **{name: _address(value) for name, value in held.items()})
    if kernel(ctypes.byref(args), torch.get_num_threads()) != 0:
        raise MemoryError(f"no memory for the sweep's scratch space ({len(segments)} rows)")


def addresses(tensors: Sequence[Tensor | None]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * max(len(tensors), 1))(*[0 if t is None else t.data_ptr() for t in tensors])


def numbers(values: Sequence[int]) -> ctypes.Array[ctypes.c_long]:
    return (ctypes.c_long * max(len(values), 1))(*values)


def _address(value: Held) -> int:
    return value.data_ptr() if isinstance(value, Tensor) else ctypes.addressof(value)


def lanes_of(dtype: torch.dtype) -> int:
    """Numbers of a vector register of the compiled kernels."""
    return _lanes(build.library()) * 4 // dtype.itemsize


@lru_cache
def _lanes(library: ctypes.CDLL) -> int:
    lanes: int = library.timeloom_lanes()
    return lanes


def addresses_along(flat: Tensor, width: int) -> ctypes.Array[ctypes.c_void_p]:
    """Of vectors of so many numbers, one behind the other."""
    count, first, step = len(flat) // width, flat.data_ptr(), width * flat.itemsize
    return (ctypes.c_void_p * count)(*range(first, first + count * step, step))


def pack_units(unit: Tensor) -> Tensor:
    """Per-unit vectors `(..., width)` as kernels read them: to the end of their last register, and beyond."""
    return pad(unit.detach(), (0, 2 * lanes_of(unit.dtype))).contiguous()


def pack(weights: Tensor, matrix: Matrix, how: Pack) -> Tensor:
    """A stack `(count, blocks, out, in)` as the generated loops read it; see `Pack`. Units are padded with zeros;
    of block-diagonal matrices only the band around the blocks is kept.
    """
    if how.transposed:
        weights, matrix = weights.transpose(-1, -2), matrix.transposed
    units, width, whole = (
        how.span * lanes_of(weights.dtype),
        matrix.blocks * matrix.outputs,
        matrix.blocks * matrix.inputs,
    )
    dense = weights[:, 0] if matrix.blocks == 1 else torch.stack([torch.block_diag(*blocks) for blocks in weights])
    dense = pad(dense, (0, 0, 0, -width % units)) if width % units else dense  # (count, out, in)
    dense = dense.reshape(matrix.count, -1, units, dense.shape[-1])  # (count, blocks of units, units, in)
    if matrix.blocks > 1:
        firsts = range(0, width, units)
        lasts = [min(first + units, width) for first in firsts]
        depth = max(
            ((last - 1) // matrix.outputs + 1 - first // matrix.outputs) * matrix.inputs
            for first, last in zip(firsts, lasts, strict=True)
        )
        begins = [min(first // matrix.outputs * matrix.inputs, whole - depth) for first in firsts]
        dense = torch.stack([dense[:, j, :, k : k + depth] for j, k in enumerate(begins)], 1)
    order = (1, 0, 3, 2) if how.transposed else (1, 3, 0, 2)
    return dense.permute(*order).contiguous()
