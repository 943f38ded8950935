"""One call of a generated kernel: the host's side of fused.h."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from timeloom.kernels.cpu.teams import team_of
from timeloom.problem import Segments

_SIZES = "batch rows together members n depth input_stride lead incoming_width"
_POINTERS = """
    seq begin end lengths resets origin final inputs masks mask_strides starts ends decay incoming written sums
    input_grads tape reset_grads states weights units
"""
Held = Tensor | ctypes.Array[Any]
Given = dict[str, Held | None]
"""The tensors and arrays whose addresses a kernel is passed, by argument name."""


class _FusedArgs(ctypes.Structure):
    """`fused_args` of fused.h, field by field."""

    _fields_ = [(name, ctypes.c_long) for name in _SIZES.split()] + [
        (name, ctypes.c_void_p) for name in _POINTERS.split()
    ]


Kernel = Callable[[Any, int], int]


def launch(kernel: Kernel, segments: Segments, sizes: dict[str, int], given: Given, work: int) -> None:
    """Run a kernel over stretches; arguments missing or None are passed as NULL. `work`: see `team_of`."""
    rows, threads = len(segments), torch.get_num_threads()
    together, members = team_of(rows, threads, work)
    held = {name: value for name, value in given.items() if value is not None}
    held |= zip(("seq", "begin", "end"), (column.contiguous() for column in segments.columns), strict=True)
    pointers = {name: _address(value) for name, value in held.items()}
    args = _FusedArgs(rows=rows, together=together, members=members, **sizes, **pointers)
    if kernel(ctypes.byref(args), threads) != 0:
        raise MemoryError(f"no memory for the sweep's scratch space ({rows} rows)")


def addresses(tensors: Sequence[Tensor | None]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * max(len(tensors), 1))(*[0 if t is None else t.data_ptr() for t in tensors])


def numbers(values: Sequence[int]) -> ctypes.Array[ctypes.c_long]:
    return (ctypes.c_long * max(len(values), 1))(*values)


def _address(value: Held) -> int:
    return value.data_ptr() if isinstance(value, Tensor) else ctypes.addressof(value)


def addresses_along(tensors: Sequence[Tensor], width: int) -> ctypes.Array[ctypes.c_void_p]:
    """Addresses of vectors of `width` numbers that lie one behind the other in tensors."""
    found: list[int] = []
    for tensor in tensors:
        first, step = tensor.data_ptr(), width * tensor.itemsize
        found += range(first, first + tensor.numel() * tensor.itemsize, step)
    return (ctypes.c_void_p * max(len(found), 1))(*found)
