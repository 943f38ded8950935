# mypy: ignore-errors
"""The linear recurrence of small matrices on a GPU, in Triton: dense n × n ones, or 2 × 2 ones as four diagonals.

Time is cut into chunks of `length` steps. A chain is one chunk of one row, a row one of the recurrences side by side; a
program walks CHAINS of them, step by step. `transfers_kernel` computes the transfers of whole chunks, which form a
recurrence of the same kind over the chunks; `matrix_kernel` runs every chunk from its start.

Layouts: a `(steps, rows / inner, SIZE, SIZE, inner)`, b and h `(steps, rows / inner, SIZE, inner)`: `inner` is 1 for
dense matrices. Starts and transfers of chunks have the SIZE entries of a state side by side. s counts steps in the
order of processing; with REVERSE they lie in memory the other way round.

The readable twin is `scan/reference.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from timeloom.scan.gpu_kernels import moved

__all__ = ["matrix_kernel", "transfers_kernel"]

SIZES = ["steps", "rows", "inner", "length", "chains"]
"""Arguments that kernels are not specialized on: one compilation for all values."""


@triton.jit
def load_step(
    a, b, s, row, alive, steps, rows, inner,
    REVERSE: tl.constexpr, TRANSPOSE: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Matrices and sources of one step of every chain, and the offsets of the sources."""
    t = steps - 1 - s if REVERSE else s
    i = tl.arange(0, PADDED)
    outer, lane = row // inner, row % inner
    first = (t * rows + outer * inner) * SIZE
    entry = i[:, None] + i[None, :] * SIZE if TRANSPOSE else i[:, None] * SIZE + i[None, :]
    real = i < SIZE
    square = alive[:, None, None] & (real[:, None] & real[None, :])[None, :, :]
    corner = (first * SIZE + lane)[:, None, None]
    x = tl.load(a + corner + entry[None, :, :].to(tl.int64) * inner, mask=square, other=0.0)
    here = (first + lane)[:, None] + i[None, :].to(tl.int64) * inner
    y = tl.load(b + here, mask=alive[:, None] & real[None, :], other=0.0)
    return x.to(ACC), y.to(ACC), here


@triton.jit
def weighted(x, h, PRODUCTS: tl.constexpr):
    """`x h`; if x are PRODUCTS of many matrices, which may have overflowed, zeros in h stay zero, as 0 · inf is NaN."""
    return moved(x, h) if PRODUCTS else x * h


@triton.jit(do_not_specialize=SIZES)
def transfers_kernel(
    a, b, products, sources, steps, rows, inner, length, chains,
    REVERSE: tl.constexpr, TRANSPOSE: tl.constexpr, PRODUCTS: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr,
    COLUMNS: tl.constexpr, CHAINS: tl.constexpr, STAGES: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """The transfers of whole chunks, `h → products h + sources`: (chains, SIZE, SIZE) and (chains, SIZE).

    Columns of a product are independent, so a program computes COLUMNS of them, and the first program of a chain the
    sources, too.
    """
    chain = tl.program_id(0).to(tl.int64) * CHAINS + tl.arange(0, CHAINS)
    alive = chain < chains
    begin, row = chain // rows * length, chain % rows
    i, j = tl.arange(0, PADDED), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    real = i < SIZE
    identity = tl.where(i[:, None] == j[None, :], 1.0, 0.0).to(ACC)
    product = tl.zeros([CHAINS, PADDED, COLUMNS], ACC) + identity[None, :, :]
    source = tl.zeros([CHAINS, PADDED], ACC)
    for step in tl.range(0, length, num_stages=STAGES):
        x, y, _ = load_step(a, b, begin + step, row, alive, steps, rows, inner, REVERSE, TRANSPOSE, SIZE, PADDED, ACC)
        product = tl.sum(weighted(x[:, :, :, None], product[:, None, :, :], PRODUCTS), 2)  # [CHAINS, PADDED, COLUMNS]
        source = tl.sum(weighted(x, source[:, None, :], PRODUCTS), 2) + y
        if SIZE != PADDED:  # 0 · ∞ is not 0
            product = tl.where(real[None, :, None], product, 0.0)
            source = tl.where(real[None, :], source, 0.0)
    square = alive[:, None, None] & (real[:, None] & (j < SIZE)[None, :])[None, :, :]
    entry = (i[:, None] * SIZE + j[None, :])[None, :, :]
    tl.store(products + chain[:, None, None] * (SIZE * SIZE) + entry, product, mask=square)
    if tl.program_id(1) == 0:
        tl.store(sources + chain[:, None] * SIZE + i[None, :], source, mask=alive[:, None] & real[None, :])


@triton.jit(do_not_specialize=SIZES)
def matrix_kernel(
    a, b, h0, ends, h, steps, rows, inner, length, chains,
    REVERSE: tl.constexpr, TRANSPOSE: tl.constexpr, PRODUCTS: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr,
    CHAINS: tl.constexpr, STAGES: tl.constexpr, CHUNKED: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """All states h: the first chunk from h0 (rows, SIZE), with CHUNKED the others from the `ends` of those before."""
    chain = tl.program_id(0).to(tl.int64) * CHAINS + tl.arange(0, CHAINS)
    known = chain < chains
    begin, row = chain // rows * length, chain % rows
    i = tl.arange(0, PADDED)[None, :]
    real = i < SIZE
    state = tl.load(h0 + row[:, None] * SIZE + i, mask=(known & (begin == 0))[:, None] & real, other=0.0).to(ACC)
    if CHUNKED:
        later = (known & (begin > 0))[:, None] & real
        state += tl.load(ends + (chain - rows)[:, None] * SIZE + i, mask=later, other=0.0)
    for step in tl.range(0, length, num_stages=STAGES):
        alive = known & (begin + step < steps)
        x, y, here = load_step(
            a, b, begin + step, row, alive, steps, rows, inner, REVERSE, TRANSPOSE, SIZE, PADDED, ACC
        )
        state = tl.sum(weighted(x, state[:, None, :], PRODUCTS), 2) + y
        if SIZE != PADDED:  # 0 · ∞ is not 0
            state = tl.where(real, state, 0.0)
        tl.store(h + here, state.to(h.dtype.element_ty), mask=alive[:, None] & real)
