"""The linear recurrence by Triton kernels on a GPU; their readable twin is the reference.

The constants are tuned for an H200: `python -m benchmarks.gpu_scan` measures the result.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from timeloom.kernels.launch import has_triton, launch
from timeloom.scan.elements import Structure, start

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
LARGEST = 32
"""Largest dense matrices that a few threads multiply well; larger ones are left to torch's own products."""

# Diagonal elements
THREADS = 256
"""Threads of a program: groups of steps in a tile times lanes; twice as many if a program that walks over all of time
has a multiprocessor to itself."""
LENGTH = 16
"""Most consecutive steps of a thread in a tile; half as many in float64."""
ROWS = (64, 128, 256)
"""Bytes of neighbouring lanes that a program owns: the least, those with chunks of time, and the most."""
PROCESSORS = 132
"""Multiprocessors of an H200; each runs two programs at a time."""
ALONE = 64
"""Programs that keep the memory busy, each walking over all of time; twice as many do so better."""
SHORT = 2
"""Most tiles of a sequence that a program walks alone in any case."""
TILES = 4
"""Most tiles of a chunk otherwise: those of all programs in flight stay in the cache until they are read again."""
WINDOW = 64
"""Chunks from one that publishes its state to the next."""
REGISTERS = 128
"""Registers of a thread: two programs fit on a multiprocessor."""

# Matrices
ENTRIES = (256, 512)
"""Numbers that a program of 32 threads multiplies at once, when it composes matrices and when it applies them."""
COLUMNS = 8
"""Columns of a product that a program computes, if a whole product exceeds its registers."""
WHOLE = 16
"""Sizes up to which one warp computes whole products."""
WARPS = 2
"""Warps of a program for larger sizes."""
LEAST = 64
"""Fewest steps of a chunk."""
SERIAL = 256
"""Steps up to which a single walk is fastest."""
CHAINS_AT_ONCE = 4096
"""Programs of 32 threads that are in flight together."""
AHEAD = 4
"""Pipeline stages of a program: steps that are loaded ahead."""


def supports(b: Tensor, structure: Structure) -> bool:
    small = structure != "dense" or b.shape[-1] <= LARGEST
    return b.device.type == "cuda" and b.dtype in DTYPES and small and has_triton()


def scan(
    a: Tensor, b: Tensor, h0: Tensor | None, structure: Structure, reverse: bool = False, transposed: bool = False
) -> Tensor:
    """Same as `timeloom.scan.reference.scan`, over reversed time and with transposed elements too, without copies.

    Without h0, the start is zero. Sums are float32 where a, b and h are half precision.
    """
    if structure == "dense" and a.stride(-1) != 1 and a.stride(-2) == 1:
        a, transposed = a.transpose(-1, -2), not transposed
    a, b = a.contiguous(), b.contiguous()
    h = torch.empty_like(b)
    if h.numel() == 0:
        return h
    with torch.cuda.device_of(b):
        if a.numel() == b.numel():  # matrices of 1 × 1 are diagonal too
            _diagonal(a, b, h0, h, reverse)
            return h
        h0 = start(b, h0).contiguous()
        if structure == "dense":
            _matrices(a, b, h0, h, (b.shape[-1], 1), reverse, transposed)
        else:
            starts = h0.transpose(-1, -2).contiguous()  # the two entries of a state next to each other
            _matrices(a, b, starts, h, (2, b.shape[-1]), reverse, transposed)
    return h


def diagonal_adjoint(
    a: Tensor, grad: Tensor, h0: Tensor | None, states: Tensor, reverse: bool, want_a: bool
) -> tuple[Tensor, Tensor | None]:
    """Adjoints of all steps of a diagonal scan and the gradient of its elements, in one pass.

    `λ[t] = g[t] + a[t+1] λ[t+1]` and `da[t] = λ[t] h[t-1]`, with h0 before the first step; in the opposite direction
    of time for a scan that was reversed.
    """
    a, grad, states = (tensor.contiguous() for tensor in (a, grad, states))
    adjoint, d_a = torch.empty_like(grad), torch.empty_like(a) if want_a else None
    with torch.cuda.device_of(grad):
        _diagonal(a, grad, h0, adjoint, not reverse, states, d_a)
    return adjoint, d_a


def _diagonal(
    a: Tensor,
    b: Tensor,
    h0: Tensor | None,
    h: Tensor,
    reverse: bool,
    states: Tensor | None = None,
    d_a: Tensor | None = None,
) -> None:
    """Scan into `h`; given the `states` of a scan, its adjoints, and its elements' gradient into `d_a`, if given."""
    from timeloom.scan import gpu_kernels  # Triton is imported only where it is used

    steps = len(b)
    lanes = b.numel() // steps
    if lanes == 0:
        return
    h0 = None if h0 is None else h0.contiguous()
    tiling = _tiling(steps, lanes, b.dtype)
    blocks, chunks = -(-lanes // tiling.lanes), tiling.chunks
    flags = products = sources = starts = None
    if chunks > 1:
        flags = torch.zeros(chunks * blocks, dtype=torch.int32, device=b.device)
        products, sources = b.new_empty(2, chunks, lanes, dtype=_precise(b.dtype)).unbind()
        starts = torch.empty_like(products[: -(-chunks // WINDOW)])
    tensors = (a, b, h0, h, states, d_a, flags, products, sources, starts)
    launch(
        gpu_kernels.diagonal_kernel, (chunks * blocks, 1, 1), tensors, (steps, lanes, blocks, tiling.tiles),
        REVERSE=reverse, ADJOINT=states is not None, SLOPES=d_a is not None, WINDOW=WINDOW if chunks > 1 else 0,
        ONE=tiling.tiles == 1, LENGTH=tiling.length, GROUPS=tiling.groups, LANES=tiling.lanes,
        PITCH=lanes if lanes & (lanes - 1) == 0 else 0,  # powers of two are few: few kernels are compiled
        ACC=_accumulator(gpu_kernels, b.dtype), num_warps=max(1, tiling.groups * tiling.lanes // 32), maxnreg=REGISTERS,
    )  # fmt: skip


class Tiling(NamedTuple):
    """How programs share steps and lanes."""

    lanes: int
    """Lanes of a program."""
    groups: int
    """Groups of steps in a tile: each thread has one of them in one lane."""
    length: int
    """Steps of a group."""
    tiles: int
    """Tiles of a chunk."""
    chunks: int


def _tiling(steps: int, lanes: int, dtype: torch.dtype) -> Tiling:
    narrow, middle, broad = (row // dtype.itemsize for row in ROWS)
    wide = min(broad, max(narrow, _power_below(lanes // (2 * ALONE))), _power_above(lanes))
    blocks = -(-lanes // wide)
    walk = _tiles(steps, (THREADS if blocks > PROCESSORS else 2 * THREADS) // wide, dtype)
    if blocks >= ALONE or walk[-1] <= SHORT:
        return Tiling(wide, *walk, 1)
    wide = min(middle if lanes > middle else narrow, _power_above(lanes))
    groups, length, tiles = _tiles(steps, THREADS // wide, dtype)
    together = max(1, min(TILES, -(-tiles * -(-lanes // wide) // PROCESSORS)))
    return Tiling(wide, groups, length, together, -(-tiles // together))


def _tiles(steps: int, groups: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Groups of a tile, their length, and the number of such tiles that hold all steps."""
    length = min(LENGTH // 2 if dtype == torch.float64 else LENGTH, _power_above(-(-steps // groups)))
    return groups, length, -(-steps // (groups * length))


def _matrices(
    a: Tensor,
    b: Tensor,
    h0: Tensor,
    h: Tensor,
    shape: tuple[int, int],
    reverse: bool = False,
    transposed: bool = False,
    products: bool = False,
) -> None:
    """Scan matrices (size, size), `inner` of them stored as diagonals: `shape` is (size, inner).

    products: whether the matrices are themselves products of many.
    """
    from timeloom.scan import gpu_matrix_kernels

    size, inner = shape
    steps, rows = len(b), h0.numel() // size
    padded = _power_above(size)
    columns = padded if padded <= WHOLE else COLUMNS
    composed, applied = max(1, ENTRIES[0] // (padded**2 * columns)), max(1, ENTRIES[1] // padded**2)
    chunks = min(CHAINS_AT_ONCE * applied // rows, -(-steps // LEAST)) if steps > SERIAL else 1
    length = -(-steps // max(1, chunks))
    chunks = -(-steps // length)
    options: dict[str, Any] = {
        "REVERSE": reverse,
        "TRANSPOSE": transposed,
        "PRODUCTS": products,
        "SIZE": size,
        "PADDED": padded,
        "STAGES": AHEAD,
        "ACC": _accumulator(gpu_matrix_kernels, b.dtype),
    }
    sizes, ends = (steps, rows, inner, length), None
    if chunks > 1:
        chains = (chunks - 1) * rows
        transfers = b.new_empty(chunks - 1, rows, size, size, dtype=_precise(b.dtype))
        sources = b.new_empty(chunks - 1, rows, size, dtype=_precise(b.dtype))
        grid, tensors = (-(-chains // composed), padded // columns, 1), (a, b, transfers, sources)
        launch(
            gpu_matrix_kernels.transfers_kernel, grid, tensors, (*sizes, chains),
            COLUMNS=columns, CHAINS=composed, num_warps=1 if padded <= WHOLE else WARPS, **options,
        )  # fmt: skip
        ends = torch.empty_like(sources)
        _matrices(transfers, sources, h0, ends, (size, 1), products=True)
    chains = chunks * rows
    grid, applying = (-(-chains // applied), 1, 1), {"CHAINS": applied, "CHUNKED": chunks > 1, "num_warps": 1}
    launch(gpu_matrix_kernels.matrix_kernel, grid, (a, b, h0, ends, h), (*sizes, chains), **applying, **options)


def _accumulator(kernels: Any, dtype: torch.dtype) -> Any:
    """Triton's type for `_precise(dtype)`."""
    return kernels.tl.float64 if dtype == torch.float64 else kernels.tl.float32


def _precise(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums of such numbers are accumulated."""
    return dtype if dtype.itemsize > 2 else torch.float32


def _power_above(count: int) -> int:
    """The smallest power of two that is at least `count`."""
    return 1 << max(0, count - 1).bit_length()


def _power_below(count: int) -> int:
    """The largest power of two that is at most `count`; 1 for 0."""
    return 1 << max(0, count.bit_length() - 1)
