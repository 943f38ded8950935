# mypy: ignore-errors
"""Products of float32 matrices on the tensor cores with about float32's accuracy, in Triton.

Elements are scaled by a power of two that takes the largest of their neighbours to about 2^14, and split into two fp16
halves. The tensor cores add up three products of halves, small ones first: what is lost of an element is 2^-22 of it,
and 2^-38 of the largest one. The tensor cores truncate as they accumulate, so their sums are as short as a tile, and
the results of tiles are added in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["by_split_kernel", "look_kernel", "outer_kernel", "split_kernel"]


@triton.jit
def scales(most):
    """The power of two that scales numbers before they are split, and its inverse, from their largest magnitude."""
    exponent = tl.minimum(tl.maximum(most.to(tl.int32, bitcast=True) >> 23, 15), 254)
    return ((268 - exponent) << 23).to(tl.float32, bitcast=True), ((exponent - 14) << 23).to(tl.float32, bitcast=True)


@triton.jit
def halves(x):
    """Two fp16 halves that nearly add up to x; the first is x rounded to 11 significant bits by integer arithmetic."""
    high = ((x.to(tl.int32, bitcast=True) + 4096) & -8192).to(tl.float32, bitcast=True)
    return high.to(tl.float16), (x - high).to(tl.float16)


@triton.jit
def multiplied(a_high, a_low, b_high, b_low):
    found = tl.dot(a_low, b_high)
    found = tl.dot(a_high, b_low, found)
    return tl.dot(a_high, b_high, found)


@triton.jit
def split_kernel(
    b, high, low, undo, depth, columns, b_step, b_column, half_step, half_column, BN: tl.constexpr, BK: tl.constexpr
):
    """Splits the right factor of `by_split_kernel` into halves, each column scaled by its largest element."""
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    step = tl.arange(0, BK)
    of_b = column[None, :] * b_column
    most = tl.zeros((BN,), tl.float32)
    for at in range(0, depth, BK):
        inside = (at + step < depth)[:, None] & (column < columns)[None, :]
        value = tl.load(b + (at + step)[:, None] * b_step + of_b, inside, 0.0)
        most = tl.maximum(most, tl.max(tl.abs(value), 0))
    scale, back = scales(most)
    tl.store(undo + column, back, column < columns)
    for at in range(0, depth, BK):
        inside = (at + step < depth)[:, None] & (column < columns)[None, :]
        value = tl.load(b + (at + step)[:, None] * b_step + of_b, inside, 0.0)
        value_high, value_low = halves(value * scale[None, :])
        to = (at + step)[:, None] * half_step + column[None, :] * half_column
        tl.store(high + to, value_high, inside)
        tl.store(low + to, value_low, inside)


@triton.jit(do_not_specialize=["rows"])
def by_split_kernel(
    a, high, low, undo, bias, c, rows, columns, depth, a_row, a_step, b_step, b_column, c_row,
    BIASED: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """`c[row, column] = Σ a[row, step] b[step, column]` (+ bias), one tile of (BM, BN) per program.

    b comes split by `split_kernel`. Every row of a tile of a is scaled by its largest element. EVEN: all sizes are
    multiples of the tile's, so that no bounds are checked.
    """
    across = tl.cdiv(columns, BN)
    row0, column0 = (tl.program_id(0) // across) * BM, (tl.program_id(0) % across) * BN
    row, column, step = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
    in_rows, in_columns = row0 + row < rows, column0 + column < columns
    a += row0.to(tl.int64) * a_row
    high += column0.to(tl.int64) * b_column
    low += column0.to(tl.int64) * b_column
    of_a = row[:, None] * a_row + step[None, :] * a_step
    of_b = step[:, None] * b_step + column[None, :] * b_column
    total = tl.zeros((BM, BN), tl.float32)
    for at in range(0, depth, BK):
        if EVEN:
            x, b_high, b_low = tl.load(a + of_a), tl.load(high + of_b), tl.load(low + of_b)
        else:
            inside = (at + step < depth)[:, None] & in_columns[None, :]
            x = tl.load(a + of_a, in_rows[:, None] & (at + step < depth)[None, :], 0.0)
            b_high, b_low = tl.load(high + of_b, inside, 0.0), tl.load(low + of_b, inside, 0.0)
        of_rows, undo_rows = scales(tl.max(tl.abs(x), 1))
        a_high, a_low = halves(x * of_rows[:, None])
        total += multiplied(a_high, a_low, b_high, b_low) * undo_rows[:, None]
        a += BK * a_step
        high += BK * b_step
        low += BK * b_step
    total *= tl.load(undo + column0 + column, in_columns, 0.0)[None, :]
    if BIASED:
        total += tl.load(bias + column0 + column, in_columns, 0.0)[None, :]
    c += row0.to(tl.int64) * c_row + column0
    tl.store(c + row[:, None] * c_row + column[None, :], total, in_rows[:, None] & in_columns[None, :])


@triton.jit(do_not_specialize=["rows"])
def look_kernel(
    x, most, sums, rows, columns, x_row,
    SUMMED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """For BLOCK rows and GROUP columns of x per program: the largest finite magnitude, `(blocks, groups)`, and the
    sums of columns, `(blocks, columns)`.
    """
    column = tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    first = tl.program_id(1) * BLOCK
    x += first.to(tl.int64) * x_row
    total, largest = tl.zeros((ROWS, GROUP), tl.float32), tl.zeros((ROWS, GROUP), tl.float32)
    for at in tl.static_range(0, BLOCK, ROWS):
        row = at + tl.arange(0, ROWS)
        inside = (first + row < rows)[:, None] & (column < columns)[None, :]
        value = tl.load(x + row[:, None] * x_row + column[None, :], inside, 0.0)
        size = tl.abs(value)
        largest = tl.maximum(largest, tl.where(size < float("inf"), size, 0.0))
        total += value
    tl.store(most + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), tl.max(tl.max(largest, 1), 0))
    if SUMMED:
        to = sums + tl.program_id(1).to(tl.int64) * columns + column
        tl.store(to, tl.sum(total, 0), column < columns)


@triton.jit(do_not_specialize=["terms", "first_row", "groups_a", "groups_b"])
def outer_kernel(
    a, b, most_a, most_b, c, rows, columns, terms, share, a_step, b_step, first_row, groups_a, groups_b, c_row, c_share,
    EVEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """`c[row, column] = Σ a[step, row] b[step, column]`, one tile of (BM, BN) per program.

    The sum is cut into shares of `share` terms, each summed by its own program into its own matrix. Tiles are scaled by
    the largest magnitudes that `look_kernel` found per BLOCK steps and GROUP columns; since a is a range of the columns
    it saw, a tile of a may lie in two groups. EVEN: sizes are multiples of the tile's.
    """
    across = tl.cdiv(columns, BN)
    row0, column0 = (tl.program_id(0) // across) * BM, (tl.program_id(0) % across) * BN
    first = tl.program_id(1) * share
    last = tl.minimum(first + share, terms)
    row, column, step = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
    in_rows, in_columns = row0 + row < rows, column0 + column < columns
    most_a0 = most_a + (first_row + row0) // GROUP
    most_a1 = most_a + (first_row + tl.minimum(row0 + BM, rows) - 1) // GROUP
    most_b += column0 // GROUP
    a += first.to(tl.int64) * a_step + row0
    b += first.to(tl.int64) * b_step + column0
    of_a = row[:, None] + step[None, :] * a_step
    of_b = step[:, None] * b_step + column[None, :]
    total = tl.zeros((BM, BN), tl.float32)
    block = first // BLOCK
    next_a = tl.maximum(tl.load(most_a0 + block * groups_a), tl.load(most_a1 + block * groups_a))
    next_b = tl.load(most_b + block * groups_b)
    for at in range(first, last, BK):
        if EVEN:
            x, y = tl.load(a + of_a), tl.load(b + of_b)
        else:
            x = tl.load(a + of_a, in_rows[:, None] & (at + step < last)[None, :], 0.0)
            y = tl.load(b + of_b, (at + step < last)[:, None] & in_columns[None, :], 0.0)
        scale_a, undo_a = scales(next_a)
        scale_b, undo_b = scales(next_b)
        block = tl.minimum(at + BK, last - 1) // BLOCK
        next_a = tl.maximum(tl.load(most_a0 + block * groups_a), tl.load(most_a1 + block * groups_a))
        next_b = tl.load(most_b + block * groups_b)
        a_high, a_low = halves(x * scale_a)
        b_high, b_low = halves(y * scale_b)
        total += multiplied(a_high, a_low, b_high, b_low) * (undo_a * undo_b)
        a += BK * a_step
        b += BK * b_step
    c += tl.program_id(1).to(tl.int64) * c_share + row0.to(tl.int64) * c_row + column0
    tl.store(c + row[:, None] * c_row + column[None, :], total, in_rows[:, None] & in_columns[None, :])
