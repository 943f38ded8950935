"""The large products of a wide layer, over all of time, with float32's accuracy on the tensor cores.

The Triton kernels of `product_kernels.py` compute them if they are large enough. Tiles are added up in float32, so
results are at least as precise as those of torch's own products, which are used for all else and without Triton.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from timeloom.cells import base, projection
from timeloom.kernels import faults
from timeloom.kernels.cuda.chain import index_of, on_device
from timeloom.kernels.cuda.programs import shared_room
from timeloom.kernels.launch import has_triton, launch

TOLD_AS = "product"
LEAST = 64
"""Least rows, columns and terms of a product: below, reading takes longer than multiplying."""
LEAST_TERMS = 2**27
"""Rows × columns × terms from which `multiply` is faster by the kernels: 13 µs in place of 16 for 3 · 2^26."""
LEAST_SUMMED = 2**31
"""The same for `sum_outer`, which first reads its factors to find their magnitudes; half of it if these are known."""
MULTIPLE = 16
"""Row lengths and strides must be multiples of this, as the kernels read them."""
LEAST_SHARED = 160 << 10
"""Least bytes of shared memory per block, which data-center GPUs have: two programs fit."""
SHORTEST = 512
"""Least terms in a share of a long sum."""
MOST_PARTIAL = 1 << 24
"""Most elements in the partial results of all shares of a long sum."""
BLOCK = 128
GROUP = 128
"""Rows and columns of a matrix that share one scale in long sums."""
LOOKED_AT_ONCE = 16
"""Rows that `look_kernel` reads at a time."""
SPLIT_AT_ONCE = 64, 16
"""Terms and columns that `split_kernel` reads at a time."""
FEW = 2 * SHORTEST
"""Rows below which torch adds them up itself."""


class Tile(NamedTuple):
    """The tile that a program multiplies at a time, its warps and its pipeline stages."""

    rows: int
    columns: int
    terms: int
    warps: int
    stages: int

    def programs(self, rows: int, columns: int) -> int:
        return math.ceil(rows / self.rows) * math.ceil(columns / self.columns)

    @property
    def at_once(self) -> int:
        """Programs that run on a multiprocessor concurrently."""
        return 8 // self.warps

    @property
    def constants(self) -> dict[str, Any]:
        sizes = {"BM": self.rows, "BN": self.columns, "BK": self.terms}
        return {**sizes, "num_warps": self.warps, "num_stages": self.stages}


WIDE = Tile(64, 128, 32, 4, 3)
LONG = Tile(128, 128, 32, 8, 3)
"""Tiles for products of many rows (WIDE), and for long sums (LONG)."""


class Rows:
    """A matrix `(N, columns)` that takes part in several sums over all rows; its magnitudes are found once."""

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self._most: Tensor | None = None

    @property
    def measured(self) -> bool:
        return self._most is not None

    def most(self) -> Tensor:
        """The largest finite magnitude in each BLOCK rows by GROUP columns, `(blocks, groups)`."""
        if self._most is None:
            self._look(False)
        assert self._most is not None
        return self._most

    def sum(self) -> Tensor:
        """`values.sum(0)`."""
        x = self.values
        if _can_run(x) and len(x) >= FEW and x.stride(1) == 1:
            try:
                sums = faults.guarded(TOLD_AS, partial(self._look, True))
                assert sums is not None
                return sums.sum(0)
            except faults.KernelFault:
                pass
        return x.sum(0)

    def _look(self, summed: bool) -> Tensor | None:
        """Find the largest magnitudes; returns, if `summed`, the column sums of each BLOCK rows."""
        from timeloom.kernels.cuda import product_kernels

        x, (rows, columns) = self.values, self.values.shape
        blocks, groups = math.ceil(rows / BLOCK), math.ceil(columns / GROUP)
        most = x.new_empty(blocks, groups)
        sums = x.new_empty(blocks, columns) if summed else None
        sizes = rows, columns, x.stride(0)
        constants = {"SUMMED": summed, "ROWS": LOOKED_AT_ONCE, "BLOCK": BLOCK, "GROUP": GROUP, "num_warps": 4}
        with on_device(index_of(x.device)):
            launch(product_kernels.look_kernel, (groups, blocks, 1), (x, most, sums), sizes, **constants)
        self._most = most
        return sums


def multiply(a: Tensor, b: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """`a b + bias` of `(N, depth)`, `(depth, width)` and `(width,)`; written to the rows of `out` if given."""
    sizes = *a.shape, b.shape[1]
    if _large(sizes, LEAST_TERMS) and _can_run(a) and _is_aligned(a) and _is_aligned(b):
        c = a.new_empty(len(a), b.shape[1]) if out is None else out
        try:
            faults.guarded(TOLD_AS, partial(_multiply, a, b, bias, c))
            return c
        except faults.KernelFault:
            pass
    return projection.multiply(a, b, bias, out)


def sum_outer(grads: Rows, values: Rows, first: int, last: int, out: Tensor | None = None) -> Tensor:
    """`Σ grads[i, first:last] ⊗ values[i]`: a long sum, cut into shares that run concurrently."""
    if sum_pays(grads, values, first, last):
        try:
            return faults.guarded(TOLD_AS, partial(_sum_outer, grads, values, first, last, out))
        except faults.KernelFault:
            pass
    return base.sum_outer(grads.values[:, first:last], values.values, out)


def sum_pays(grads: Rows, values: Rows, first: int, last: int) -> bool:
    """Whether the kernels can compute this sum, and faster than torch."""
    a, b = grads.values[:, first:last], values.values
    least = LEAST_SUMMED // 2 if grads.measured and values.measured else LEAST_SUMMED
    if not (_large((*a.shape, b.shape[1]), least) and _can_run(a)):
        return False
    return all(x.stride(1) == 1 and _is_aligned(x) for x in (a, b, grads.values))


def _large(sizes: tuple[int, ...], least: int) -> bool:
    return min(sizes) >= LEAST and math.prod(sizes) >= least


def _can_run(x: Tensor) -> bool:
    if x.device.type != "cuda" or x.dtype != torch.float32 or not has_triton():
        return False
    return torch.version.hip is None and shared_room(index_of(x.device)) >= LEAST_SHARED


def _is_aligned(matrix: Tensor) -> bool:
    """Whether the layout of rows or columns allows the kernels' loads of 16 bytes."""
    near, far = sorted((stride, size) for stride, size in zip(matrix.stride(), matrix.shape, strict=True))
    return near[0] == 1 and near[1] % MULTIPLE == 0 and far[0] % MULTIPLE == 0 and matrix.data_ptr() % 16 == 0


def _multiply(a: Tensor, b: Tensor, bias: Tensor | None, c: Tensor) -> None:
    from timeloom.kernels.cuda import product_kernels

    (rows, depth), columns = a.shape, b.shape[1]
    high, low = (torch.empty_like(b, dtype=torch.float16) for _ in range(2))
    undo = b.new_empty(columns)
    terms_at_once, columns_at_once = SPLIT_AT_ONCE
    even = rows % WIDE.rows == columns % WIDE.columns == depth % WIDE.terms == 0
    sizes = rows, columns, depth, *a.stride(), *high.stride(), c.stride(0)
    with on_device(index_of(a.device)):
        kernel, grid = product_kernels.split_kernel, (math.ceil(columns / columns_at_once), 1, 1)
        strides = *b.stride(), *high.stride()
        constants = {"BN": columns_at_once, "BK": terms_at_once, "num_warps": 4}
        launch(kernel, grid, (b, high, low, undo), (depth, columns, *strides), **constants)
        kernel, grid = product_kernels.by_split_kernel, (WIDE.programs(rows, columns), 1, 1)
        constants = {"BIASED": bias is not None, "EVEN": even, **WIDE.constants}
        launch(kernel, grid, (a, high, low, undo, bias, c), sizes, **constants)


def _sum_outer(grads: Rows, values: Rows, first: int, last: int, out: Tensor | None) -> Tensor:
    from timeloom.kernels.cuda import product_kernels

    most_a, most_b = grads.most(), values.most()
    a, b = grads.values[:, first:last], values.values
    (terms, rows), columns = a.shape, b.shape[1]
    share = share_of(terms, rows, columns, LONG, _processors(a))
    shares = math.ceil(terms / share)
    straight = shares == 1 and out is not None
    sums = out.unsqueeze(0) if straight and out is not None else a.new_empty(shares, rows, columns)
    even = rows % LONG.rows == columns % LONG.columns == terms % LONG.terms == 0
    sizes = rows, columns, terms, share, a.stride(0), b.stride(0), first, most_a.shape[1], most_b.shape[1]
    constants = {"EVEN": even, **LONG.constants, "BLOCK": BLOCK, "GROUP": GROUP}
    with on_device(index_of(a.device)):
        kernel, grid = product_kernels.outer_kernel, (LONG.programs(rows, columns), shares, 1)
        launch(kernel, grid, (a, b, most_a, most_b, sums), (*sizes, sums.stride(1), sums.stride(0)), **constants)
    return sums[0] if shares == 1 else torch.sum(sums, 0, out=out)


def share_of(terms: int, rows: int, columns: int, tile: Tile, processors: int) -> int:
    """Terms of a sum per program, so that all multiprocessors are busy to the end: a multiple of BLOCK."""
    at_once = processors * tile.at_once
    tiles, matrix = tile.programs(rows, columns), rows * columns
    most = max(1, min(terms // SHORTEST, 4 * at_once // tiles, MOST_PARTIAL // matrix))

    def cost(shares: int) -> float:
        """Time of the whole sum, in terms of one program, including its startup and adding up the shares' matrices."""
        waves = math.ceil(tiles * shares / at_once)
        return waves * (terms / shares + 4 * tile.terms) + shares * matrix / 2**14

    shares = min(range(1, most + 1), key=cost)
    return math.ceil(terms / shares / BLOCK) * BLOCK


def _processors(x: Tensor) -> int:
    return int(torch.cuda.get_device_properties(x.device).multi_processor_count)
