"""The large products of a wide layer, over all of time, with float32's accuracy on the tensor cores.

Where torch lets cuDNN round to tf32, as by default, the Triton kernels of `product_kernels.py` make them, if they are
large enough: splitting factors tile by tile costs no memory, and sums of tiles are added in float32, so that they are
as precise as torch's own products. Those are made elsewhere, and where Triton cannot run.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from timeloom.cells import base
from timeloom.kernels import faults
from timeloom.kernels.cuda.chain import index_of, on_device
from timeloom.kernels.cuda.programs import shared_room
from timeloom.kernels.launch import has_triton, launch
from timeloom.torch_state import tf32

TOLD_AS = "product"
LEAST = 64
"""Rows, columns and terms from which on a product takes longer to multiply than to read."""
LEAST_TERMS = 2**29
"""Rows times columns times terms from which on it pays."""
MULTIPLE = 16
"""Numbers that lie next to each other are a multiple of these, as the kernels read them."""
LEAST_SHARED = 160 << 10
"""Bytes of shared memory of a block that data centers' GPUs have: two programs fit."""
SHORTEST = 512
"""Terms of a share of a long sum, at least."""
MOST_PARTIAL = 1 << 24
"""Numbers in all shares of a long sum, at most."""
SUMMED_AT_ONCE = 32, 128
"""Rows and columns that a program adds up at a time."""


class Tile(NamedTuple):
    """What a program multiplies at a time, by so many warps, with so many stages in flight."""

    rows: int
    columns: int
    terms: int
    warps: int
    stages: int

    def programs(self, rows: int, columns: int) -> int:
        return math.ceil(rows / self.rows) * math.ceil(columns / self.columns)

    @property
    def at_once(self) -> int:
        """Programs that a multiprocessor runs at a time."""
        return 8 // self.warps


WIDE = Tile(64, 128, 32, 4, 3)
LONG = Tile(64, 128, 32, 4, 3)
"""The tile of products of many rows, and of long sums."""


def multiply(a: Tensor, b: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """`a b + bias`: `(N, depth)` by `(depth, width)`, and `(width,)`; into rows of `out` if given."""
    if pays(a, b):
        c = a.new_empty(len(a), b.shape[1]) if out is None else out
        try:
            faults.guarded(TOLD_AS, partial(_launch, a, b, bias, c.unsqueeze(0), a.shape[1], WIDE))
            return c
        except faults.KernelFault:
            pass
    return torch.mm(a, b, out=out) if bias is None else torch.addmm(bias, a, b, out=out)


def sum_outer(grads: Tensor, values: Tensor, out: Tensor | None = None) -> Tensor:
    """`Σ grads[i] ⊗ values[i]`, as `cells.base.sum_outer`: a long sum in shares, all at the same time."""
    if pays(grads.t(), values):
        try:
            return faults.guarded(TOLD_AS, partial(_sum_outer, grads.t(), values, out))
        except faults.KernelFault:
            pass
    return base.sum_outer(grads, values, out)


def sum_rows(x: Tensor) -> Tensor:
    """`x.sum(0)`, of many rows."""
    if _can_run(x) and len(x) >= 2 * SHORTEST and x.stride(1) == 1:
        try:
            return faults.guarded(TOLD_AS, partial(_sum_rows, x))
        except faults.KernelFault:
            pass
    return x.sum(0)


def pays(a: Tensor, b: Tensor) -> bool:
    """Whether the kernels make this product, and faster than torch."""
    sizes = *a.shape, b.shape[1]
    large = min(sizes) >= LEAST and math.prod(sizes) >= LEAST_TERMS
    return large and _can_run(a) and all(_is_aligned(part) for part in (a, b))


def _can_run(x: Tensor) -> bool:
    if x.device.type != "cuda" or x.dtype != torch.float32 or not tf32.cudnn_rounds() or not has_triton():
        return False
    return torch.version.hip is None and shared_room(index_of(x.device)) >= LEAST_SHARED


def _is_aligned(matrix: Tensor) -> bool:
    """Whether its rows or columns lie as the kernels read them: 16 bytes at a time."""
    near, far = sorted((stride, size) for stride, size in zip(matrix.stride(), matrix.shape, strict=True))
    return near[0] == 1 and near[1] % MULTIPLE == 0 and far[0] % MULTIPLE == 0 and matrix.data_ptr() % 16 == 0


def _sum_outer(a: Tensor, b: Tensor, out: Tensor | None) -> Tensor:
    (rows, terms), columns = a.shape, b.shape[1]
    share = share_of(terms, rows, columns, LONG, _processors(a))
    shares = math.ceil(terms / share)
    if shares == 1 and out is not None:
        _launch(a, b, None, out.unsqueeze(0), share, LONG)
        return out
    partial_sums = a.new_empty(shares, rows, columns)
    _launch(a, b, None, partial_sums, share, LONG)
    return partial_sums[0] if shares == 1 else torch.sum(partial_sums, 0, out=out)


def share_of(terms: int, rows: int, columns: int, tile: Tile, processors: int) -> int:
    """How many terms of a sum a program adds up, for all processors to be busy to the end: a multiple of the tile's."""
    at_once = processors * tile.at_once
    tiles, matrix = tile.programs(rows, columns), rows * columns
    most = max(1, min(terms // SHORTEST, 4 * at_once // tiles, MOST_PARTIAL // matrix))

    def cost(shares: int) -> float:
        """When all is done, in terms that a program adds up: to begin takes it as long as some, and so does to add up
        the matrices of all shares.
        """
        waves = math.ceil(tiles * shares / at_once)
        return waves * (terms / shares + 4 * tile.terms) + shares * matrix / 2**14

    shares = min(range(1, most + 1), key=cost)
    return math.ceil(terms / shares / tile.terms) * tile.terms


def _launch(a: Tensor, b: Tensor, bias: Tensor | None, c: Tensor, share: int, tile: Tile) -> None:
    """`c[i]` is share i of the sum, `(shares, rows, columns)`."""
    from timeloom.kernels.cuda import product_kernels

    (rows, terms), columns = a.shape, b.shape[1]
    even = rows % tile.rows == columns % tile.columns == terms % tile.terms == share % tile.terms == 0
    grid = tile.programs(rows, columns), len(c), 1
    sizes = rows, columns, terms, share, *a.stride(), *b.stride(), c.stride(1), c.stride(0)
    constants: dict[str, Any] = {"SPLIT": True, "BIASED": bias is not None, "EVEN": even}
    constants |= {"BM": tile.rows, "BN": tile.columns, "BK": tile.terms}
    with on_device(index_of(a.device)):
        kernel = product_kernels.product_kernel
        launch(kernel, grid, (a, b, bias, c), sizes, **constants, num_warps=tile.warps, num_stages=tile.stages)


def _sum_rows(x: Tensor) -> Tensor:
    from timeloom.kernels.cuda import product_kernels

    (rows, columns), (at_a_time, width) = x.shape, SUMMED_AT_ONCE
    across = math.ceil(columns / width)
    shares = max(1, min(rows // SHORTEST, 4 * _processors(x) // across))
    share = math.ceil(rows / shares / at_a_time) * at_a_time
    sums = x.new_empty(math.ceil(rows / share), columns)
    with on_device(index_of(x.device)):
        kernel, grid = product_kernels.column_sums_kernel, (across, len(sums), 1)
        launch(kernel, grid, (x, sums), (rows, columns, share, x.stride(0)), ROWS=at_a_time, COLUMNS=width, num_warps=4)
    return sums.sum(0)


def _processors(x: Tensor) -> int:
    return int(torch.cuda.get_device_properties(x.device).multi_processor_count)
