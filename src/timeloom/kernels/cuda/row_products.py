"""Products of many rows by one matrix, with float32's accuracy on the tensor cores (row_products.cu)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from timeloom.kernels.cuda import nvrtc
from timeloom.kernels.cuda.chain import index_of, on_device
from timeloom.kernels.cuda.driver import Function
from timeloom.kernels.cuda.programs import RowProductsArgs, architecture, headers, source_of

ROWS, TERMS, THREADS = 128, 32, 256
"""As in row_products.cu: rows of a tile, terms that are multiplied at a time, threads of a block."""
COLUMNS = {32: 2, 64: 2, 96: 1, 128: 1}
"""Columns that a tile may have, and how many such blocks run on a multiprocessor concurrently."""


@dataclass(frozen=True)
class Variant:
    """What the kernel is compiled for: see row_products.cu."""

    columns: int
    by_terms: bool
    aligned: bool
    even: bool

    @property
    def shared_bytes(self) -> int:
        """Two buffers of halves, and the inverse of the scales of their rows and columns."""
        return 2 * (ROWS + self.columns) * (TERMS * 2 * 2 + 4)

    @property
    def source(self) -> str:
        flags = {"BY_TERMS": self.by_terms, "ALIGNED": self.aligned, "EVEN": self.even}
        defines = {"COLUMNS": self.columns} | {name: int(flag) for name, flag in flags.items()}
        return source_of(defines, "row_products.cu")


def can_run(a: Tensor, b: Tensor) -> bool:
    on_gpu = a.device.type == "cuda" and a.dtype == b.dtype == torch.float32
    return on_gpu and a.stride(1) == 1 and 1 in b.stride()


def multiply(a: Tensor, b: Tensor, bias: Tensor | None, more: Tensor | None, out: Tensor | None) -> Tensor:
    """`a b + bias` of `(N, depth)`, `(depth, width)` and `(width,)`, into `out` if given; see `products.multiply`."""
    (rows, terms), columns, device = a.shape, b.shape[1], index_of(a.device)
    c = a.new_empty(rows, columns) if out is None else out
    if not c.numel():
        return c
    variant = variant_of(a, b, c)
    tiles = math.ceil(rows / ROWS) * math.ceil(columns / variant.columns)
    args = RowProductsArgs(
        rows=rows, columns=columns, terms=terms, also=0 if more is None else len(more),
        a_stride=a.stride(0), b_stride=b.stride(1 if variant.by_terms else 0), c_stride=c.stride(0),
    )  # fmt: skip
    for name, tensor in (("a", a), ("b", b), ("bias", bias), ("more", more), ("c", c)):
        if tensor is not None:
            setattr(args, name, tensor.data_ptr())
    with on_device(device):
        function(device, variant)(min(tiles, processors(device) * COLUMNS[variant.columns]), args)
    return c


def variant_of(a: Tensor, b: Tensor, c: Tensor) -> Variant:
    by_terms = b.stride(0) == 1
    aligned = _is_aligned(a, 4) and _is_aligned(b.t() if by_terms else b, 4)
    return Variant(columns_of(b.shape[1]), by_terms, aligned, _is_aligned(c, 2))


@cache
def columns_of(columns: int) -> int:
    """Columns of a tile: the fewest numbers to read in all."""
    return min(COLUMNS, key=lambda one: math.ceil(columns / one) * (ROWS + one))


@cache
def function(device: int, variant: Variant) -> Function:
    code = nvrtc.compile_source(variant.source, architecture(device), headers())
    return Function(device, code, "multiply_rows", THREADS, variant.shared_bytes)


@cache
def processors(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _is_aligned(rows: Tensor, numbers: int) -> bool:
    """Whether all rows may be read or written in vectors of so many numbers."""
    return rows.shape[1] % numbers == rows.stride(0) % numbers == rows.data_ptr() % (4 * numbers) == 0
