# mypy: ignore-errors
"""Products of float32 matrices on the tensor cores with about float32's accuracy, in Triton.

A tile of each factor is read once, in float32. Every row of the left tile, and every column of the right one, is scaled
by a power of two, so that its largest value is near 2^12, and split into two halves of fp16. Three products of halves
are added up by the tensor cores, the small ones first: what is left out is 2^-22 of it, and no value is lost that
matters beside the largest of its row and tile. The tensor cores cut off what they add; so a sum of theirs is as short
as a tile, and what tiles come to is added in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["column_sums_kernel", "product_kernel"]


@triton.jit
def scales(most):
    """What numbers are multiplied by before they are split, and what undoes it: powers of two, of the largest."""
    exponent = tl.minimum(tl.maximum(most.to(tl.int32, bitcast=True) >> 23, 13), 254)
    return ((266 - exponent) << 23).to(tl.float32, bitcast=True), ((exponent - 12) << 23).to(tl.float32, bitcast=True)


@triton.jit
def halves(x):
    """Two halves of fp16 that add up to x, nearly: the first is rounded to its 11 digits by the bits of x."""
    high = ((x.to(tl.int32, bitcast=True) + 4096) & -8192).to(tl.float32, bitcast=True)
    return high.to(tl.float16), (x - high).to(tl.float16)


@triton.jit
def multiplied(a, b, SPLIT: tl.constexpr):
    """The product of two tiles in float32: of halves, or as Triton has it, of three products in tf32."""
    if not SPLIT:
        return tl.dot(a, b, input_precision="tf32x3")
    of_rows, undo_rows = scales(tl.max(tl.abs(a), 1))
    of_columns, undo_columns = scales(tl.max(tl.abs(b), 0))
    a_high, a_low = halves(a * of_rows[:, None])
    b_high, b_low = halves(b * of_columns[None, :])
    found = tl.dot(a_low, b_high)
    found = tl.dot(a_high, b_low, found)
    found = tl.dot(a_high, b_high, found)
    return found * undo_rows[:, None] * undo_columns[None, :]


@triton.jit
def product_kernel(
    a, b, bias, c, rows, columns, depth, share, a_row, a_step, b_step, b_column, c_row, c_share,
    SPLIT: tl.constexpr, BIASED: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """`c[row, column] = Σ a[row, step] b[step, column]` (+ bias), a tile of (BM, BN) by each program.

    The sum over all of `depth` is cut into shares of so many steps, each by a program of its own, into a matrix of its
    own. EVEN: all sizes are multiples of the tile's, and nothing is beyond an edge.
    """
    across = tl.cdiv(columns, BN)
    row0, column0 = (tl.program_id(0) // across) * BM, (tl.program_id(0) % across) * BN
    first = tl.program_id(1) * share
    last = tl.minimum(first + share, depth)
    row, column, step = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
    in_rows, in_columns = row0 + row < rows, column0 + column < columns
    a += row0.to(tl.int64) * a_row + first.to(tl.int64) * a_step
    b += column0.to(tl.int64) * b_column + first.to(tl.int64) * b_step
    of_a = row[:, None] * a_row + step[None, :] * a_step
    of_b = step[:, None] * b_step + column[None, :] * b_column
    total = tl.zeros((BM, BN), tl.float32)
    for at in range(first, last, BK):
        if EVEN:
            x, y = tl.load(a + of_a), tl.load(b + of_b)
        else:
            x = tl.load(a + of_a, in_rows[:, None] & (at + step < last)[None, :], 0.0)
            y = tl.load(b + of_b, (at + step < last)[:, None] & in_columns[None, :], 0.0)
        total += multiplied(x, y, SPLIT)
        a += BK * a_step
        b += BK * b_step
    if BIASED:
        total += tl.load(bias + column0 + column, in_columns, 0.0)[None, :]
    c += tl.program_id(1).to(tl.int64) * c_share + row0.to(tl.int64) * c_row + column0
    tl.store(c + row[:, None] * c_row + column[None, :], total, in_rows[:, None] & in_columns[None, :])


@triton.jit
def column_sums_kernel(x, sums, rows, columns, share, x_row, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The sums of `share` rows of x each, `(shares, columns)`: COLUMNS of them by each program, ROWS at a time."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.program_id(1) * share
    last = tl.minimum(first + share, rows)
    x += first.to(tl.int64) * x_row
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for at in range(first, last, ROWS):
        row = tl.arange(0, ROWS)
        inside = (at + row < last)[:, None] & (column < columns)[None, :]
        total += tl.load(x + row[:, None] * x_row + column[None, :], inside, 0.0)
        x += ROWS * x_row
    tl.store(sums + tl.program_id(1) * columns + column, tl.sum(total, 0), column < columns)
