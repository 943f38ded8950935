"""Packs weights for generated kernels, and unpacks their gradients to torch's layout: the host's side of pack.c."""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from timeloom.compile.emit_step import Pack
from timeloom.compile.graph import Matrix
from timeloom.kernels.cpu import build


class _Shape(ctypes.Structure):
    """`shape` of pack.c, field by field."""

    _fields_ = [(name, ctypes.c_long) for name in ("count", "outputs", "inputs", "units", "transposed", "turned")]


def pack(stack: Tensor, matrix: Matrix, how: Pack, turned: int = 0) -> Tensor:
    """A stack of matrices, `(count, blocks, out, in)` in any shape, in the layout of the generated loops; see `Pack`.

    Units are padded with zeros. Matrix i of the packed stack is matrix i − `turned` of the stack.
    """
    if matrix.blocks > 1:
        return packed_by_torch(stack.detach().reshape(matrix.shape), matrix, how, turned)
    stack = stack.detach().contiguous()
    shape, numbers = _packed(matrix, how, turned, _lanes_of(stack.dtype))
    found = stack.new_empty(numbers)
    function = "timeloom_pack_4" if stack.dtype == torch.float32 else "timeloom_pack_8"
    getattr(build.library(), function)(_at(stack), _at(found), shape)
    return found


def unpack(sums: Tensor, at: int, matrix: Matrix, turned: int = 0) -> Tensor:
    """The gradient `(count · out, in)` of a stack of dense matrices from each thread's sums `(threads, ·)`.

    There it lies at offset `at`, as `(in, count, out)`.
    """
    shape, _ = _packed(matrix, None, turned, 1)
    found = sums.new_empty(matrix.count * matrix.outputs, matrix.inputs)
    threads, apart = sums.shape
    first = ctypes.c_void_p(sums.data_ptr() + at * sums.itemsize)
    build.library().timeloom_unpack(first, _at(found), shape, ctypes.c_long(threads), ctypes.c_long(apart))
    return found


def packed_by_torch(stack: Tensor, matrix: Matrix, how: Pack, turned: int = 0) -> Tensor:
    """The readable twin of `pack`, for stacks `(count, blocks, out, in)`.

    Of block-diagonal matrices only the band around the blocks is kept.
    """
    stack = stack.roll(turned, 0) if turned else stack
    if how.transposed:
        stack, matrix = stack.transpose(-1, -2), matrix.transposed
    units = how.span * _lanes_of(stack.dtype)
    width, whole = matrix.blocks * matrix.outputs, matrix.blocks * matrix.inputs
    dense = stack[:, 0] if matrix.blocks == 1 else torch.stack([torch.block_diag(*blocks) for blocks in stack])
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
    return dense.permute(*order).contiguous().flatten()


@lru_cache(maxsize=1024)
def _packed(matrix: Matrix, how: Pack | None, turned: int, lanes: int) -> tuple[ctypes.Array[_Shape], int]:
    """The C structure that describes a stack, and the size of the packed stack in numbers."""
    units, transposed = (how.span * lanes, how.transposed) if how else (1, False)
    width, depth = (matrix.inputs, matrix.outputs) if transposed else (matrix.outputs, matrix.inputs)
    shape = _Shape(matrix.count, matrix.outputs, matrix.inputs, units, transposed, turned)
    return (_Shape * 1)(shape), -(-width // units) * units * matrix.count * depth


def _at(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _lanes_of(dtype: torch.dtype) -> int:
    """Elements in a vector register of the compiled kernels."""
    return _lanes(build.library()) * 4 // dtype.itemsize


@lru_cache
def _lanes(library: ctypes.CDLL) -> int:
    lanes: int = library.timeloom_lanes()
    return lanes
