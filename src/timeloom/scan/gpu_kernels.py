# mypy: ignore-errors
"""The diagonal linear recurrence on a GPU, in Triton: `h[s] = a[s] h[s-1] + b[s]` for many lanes side by side.

The algorithm is a chunked scan with decoupled look-back (Merrill and Garland, 2016), whose look-back is bounded. A
program owns a chunk of time for LANES lanes, and walks over it in tiles of GROUPS · LENGTH steps. Every thread runs
the LENGTH steps of one group and one lane on its own; the few transfers of groups are composed; then every step adds
the contribution of its group's start. A chunk first computes its own transfer and publishes it in memory, with a flag,
for the chunks behind it: each of these composes the transfers back to the last multiple of WINDOW, where a chunk also
publishes its state. So all chunks but one of each WINDOW wait for loads only, and results do not depend on the order of
execution; a chunk waits only for programs with lower numbers, which GPUs start first. Then the chunk is read again,
from the cache, and its states are written: each element passes through global memory once. The next tile is fetched
while one is computed. A chunk of ONE tile keeps it instead of reading it again, and one that holds all steps publishes
nothing.

Everything is `(steps, lanes)`, with contiguous lanes. s counts steps in the order of processing; with REVERSE they lie
in memory the other way round. With ADJOINT, b are incoming gradients, and an adjoint is carried into step s by the `a`
of the step before it in that order: `λ[s] = a[s-1] λ[s-1] + g[s]`. If wanted (SLOPES), the gradient of `a` is computed
along with it: `λ[s]` times the state that entered this step, which lies at s + 1; at the end it is h0.

The readable twin is `scan/reference.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["diagonal_kernel"]

SIZES = ["steps", "lanes", "blocks", "tiles"]
"""Arguments that kernels are not specialized on: one compilation for all values. That also keeps Triton from giving a
thread four neighbouring lanes, and a quarter of the steps: threads would have to communicate at every step.
"""


@triton.jit
def compose(a, b, later_a, later_b):
    """Compose `h → a h + b` with a later element."""
    return a * later_a, b * later_a + later_b


@triton.jit
def moved(product, h):
    """A product of many elements times a state: an exact zero stays zero, even if the product has overflowed."""
    return tl.where(h == 0.0, 0.0, product * h)


@triton.jit
def link(a, b, later_a, later_b):
    """`compose` for groups and larger units: an element that is 0 ends a product that has overflowed."""
    return tl.where(later_a == 0.0, 0.0, moved(later_a, a)), moved(later_a, b) + later_b


@triton.jit
def corners(tile, column, steps, pitch, REVERSE: tl.constexpr, LENGTH: tl.constexpr, GROUPS: tl.constexpr):
    """Offsets of the first step of a tile's columns, [1, GROUPS · LANES]; `column` holds the lane of each.

    The columns of a group are adjacent; a step lies `pitch` behind the one before it.
    """
    COLUMNS: tl.constexpr = column.shape[0]
    group = tl.arange(0, COLUMNS).to(tl.int64) // (COLUMNS // GROUPS)
    begin = tile.to(tl.int64) * (GROUPS * LENGTH)
    if REVERSE:
        return ((steps - 1 - begin) * pitch + (column - group * LENGTH * pitch))[None, :]
    return (begin * pitch + (column + group * LENGTH * pitch))[None, :]


@triton.jit
def spread(base, corner, pitch, REVERSE: tl.constexpr, LENGTH: tl.constexpr):
    """Pointers to all elements of a tile, [LENGTH, GROUPS · LANES], from the corners of its columns."""
    stride = tl.cast(pitch, tl.int64)
    if REVERSE:
        stride = -stride
    return base + corner + tl.arange(0, LENGTH).to(tl.int64)[:, None] * stride


@triton.jit
def remaining(tile, column, steps, lanes, LENGTH: tl.constexpr, GROUPS: tl.constexpr):
    """Steps left for each of a tile's columns, capped at one more than a group takes, and the first step of each."""
    COLUMNS: tl.constexpr = column.shape[0]
    group = tl.arange(0, COLUMNS) // (COLUMNS // GROUPS)
    s = tile.to(tl.int64) * (GROUPS * LENGTH) + group * LENGTH
    left = tl.where(column < lanes, tl.minimum(tl.maximum(steps - s, 0), LENGTH + 1), 0).to(tl.int32)
    return left[None, :], s[None, :]


@triton.jit
def fetch(
    a, b, tile, column, steps, lanes, pitch, wanted, REVERSE: tl.constexpr, ADJOINT: tl.constexpr, LENGTH: tl.constexpr,
    GROUPS: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """A tile's elements, [LENGTH, GROUPS · LANES], where they are `wanted`."""
    corner = corners(tile, column, steps, pitch, REVERSE, LENGTH, GROUPS)
    left, s = remaining(tile, column, steps, lanes, LENGTH, GROUPS)
    j = tl.arange(0, LENGTH)[:, None]
    known = j < tl.where(wanted, left, 0)
    if ADJOINT:
        before = corner + pitch if REVERSE else corner - pitch
        there = known & (s + j > 0)
        x = tl.load(spread(a, before, pitch, REVERSE, LENGTH), mask=there, other=0.0, eviction_policy=EVICT)
    else:
        x = tl.load(spread(a, corner, pitch, REVERSE, LENGTH), mask=known, other=0.0, eviction_policy=EVICT)
    return x, tl.load(spread(b, corner, pitch, REVERSE, LENGTH), mask=known, other=0.0, eviction_policy=EVICT)


@triton.jit
def fetch_entered(
    states, initial, tile, column, steps, lanes, pitch, REVERSE: tl.constexpr, LENGTH: tl.constexpr,
    GROUPS: tl.constexpr,
):  # fmt: skip
    """The states that entered a tile's steps, which lie at s + 1; `initial` [GROUPS, LANES] at the end."""
    corner = corners(tile, column, steps, pitch, REVERSE, LENGTH, GROUPS)
    left, _ = remaining(tile, column, steps, lanes, LENGTH, GROUPS)
    inner = tl.arange(0, LENGTH)[:, None] + 1 < left
    behind = corner - pitch if REVERSE else corner + pitch
    entered = tl.load(spread(states, behind, pitch, REVERSE, LENGTH), mask=inner, other=0.0)
    return tl.where(inner, entered.to(initial.dtype), initial.reshape(1, column.shape[0]))


@triton.jit
def keep(
    base, values, tile, column, steps, lanes, pitch, REVERSE: tl.constexpr, LENGTH: tl.constexpr, GROUPS: tl.constexpr
):
    """Store a tile that will not be read soon, by streaming writes."""
    corner = corners(tile, column, steps, pitch, REVERSE, LENGTH, GROUPS)
    left, _ = remaining(tile, column, steps, lanes, LENGTH, GROUPS)
    known = tl.arange(0, LENGTH)[:, None] < left
    there = spread(base, corner, pitch, REVERSE, LENGTH)
    tl.store(there, values.to(base.dtype.element_ty), mask=known, cache_modifier=".cs")


@triton.jit
def last(x, COUNT: tl.constexpr):
    """The last row."""
    return tl.sum(tl.where(tl.arange(0, COUNT)[:, None] == COUNT - 1, x, 0.0), 0)


@triton.jit
def composed(x, y, LENGTH: tl.constexpr, GROUPS: tl.constexpr, LANES: tl.constexpr):
    """The steps of a tile composed from their group's start, and the transfers of groups, [GROUPS, LANES].

    The latter are NaN if an element of the group, or their product, is not finite.
    """
    x, y = tl.associative_scan((x, y), 0, compose)
    product = last(x, LENGTH).reshape(GROUPS, LANES)
    return x, y, product, last(y, LENGTH).reshape(GROUPS, LANES) + product * 0.0


@triton.jit
def previous_of(x, first, GROUPS: tl.constexpr, LANES: tl.constexpr):
    """The value of the previous group, [GROUPS, LANES]; `first` for the first group."""
    group = tl.arange(0, GROUPS)[:, None]
    previous = tl.maximum(group - 1, 0) + tl.zeros((GROUPS, LANES), tl.int32)
    return tl.where(group == 0, first, tl.gather(x, previous, 0))


@triton.jit
def behind_all(x, GROUPS: tl.constexpr, LANES: tl.constexpr):
    """The last group's value, broadcast to every group."""
    return tl.gather(x, tl.full((GROUPS, LANES), GROUPS - 1, tl.int32), 0)


@triton.jit
def enter(x, y, product, source, state, LENGTH: tl.constexpr, GROUPS: tl.constexpr, LANES: tl.constexpr):
    """States of a tile from its composed steps and the transfers of its groups, and the state behind it.

    The latter and `state`, the one before the tile, are repeated for every group, [GROUPS, LANES].
    """
    first = tl.arange(0, GROUPS)[:, None] == 0
    source = tl.where(first, moved(product, state) + source, source)
    product, ends = tl.associative_scan((product, source), 0, link)
    entries = previous_of(ends, state, GROUPS, LANES)
    return y + x * entries.reshape(1, GROUPS * LANES), behind_all(ends, GROUPS, LANES)


@triton.jit
def tell(flags, at, value):
    """Set a flag, after everything that this program has stored is visible."""
    tl.debug_barrier()
    tl.atomic_xchg(flags + at, value, sem="release")


@triton.jit
def hear(state, flags, products, sources, starts, chunk, block, blocks, lane, lanes, WINDOW: tl.constexpr):
    """The state before a chunk, from what earlier chunks have published; `state` is the one before all of them."""
    base = (chunk - 1) // WINDOW * WINDOW
    i = base + tl.arange(0, WINDOW)
    before = i < chunk
    wanted = tl.where((i == base) & (base > 0), 2, 1)
    waiting = 1
    while waiting > 0:
        told = tl.load(flags + i * blocks + block, mask=before, other=2, volatile=True)
        waiting = tl.sum((told < wanted).to(tl.int32), 0)
    tl.atomic_add(flags + chunk * blocks + block, 0, sem="acq_rel")  # acquires: nothing below is read earlier
    tl.debug_barrier()
    there = i.to(tl.int64)[:, None] * lanes + lane[None, :]
    known = before[:, None] & (lane < lanes)[None, :]
    x = tl.load(products + there, mask=known, other=1.0, cache_modifier=".cg")
    y = tl.load(sources + there, mask=known, other=0.0, cache_modifier=".cg")
    at = (base // WINDOW).to(tl.int64) * lanes + lane
    start = tl.load(starts + at, mask=tl.where(lane < lanes, base, 0) > 0, other=0.0, cache_modifier=".cg")
    start = tl.where(base > 0, start, state)[None, :]
    x, y = tl.associative_scan((x, tl.where((i == base)[:, None], moved(x, start) + y, y)), 0, link)
    return last(y, WINDOW)


@triton.jit
def tell_and_hear(
    flags, products, sources, starts, factor, summand, state, chunk, block, blocks, lane, lanes, WINDOW: tl.constexpr
):
    """Publish this chunk's transfer and return the state before it; `state` is the one before all chunks."""
    there = chunk.to(tl.int64) * lanes + lane
    tl.store(products + there, factor, mask=lane < lanes)
    tl.store(sources + there, summand, mask=lane < lanes)
    tell(flags, chunk * blocks + block, 1)
    if chunk > 0:
        state = hear(state, flags, products, sources, starts, chunk, block, blocks, lane, lanes, WINDOW)
        if chunk % WINDOW == 0:
            tl.store(starts + (chunk // WINDOW).to(tl.int64) * lanes + lane, state, mask=lane < lanes)
            tell(flags, chunk * blocks + block, 2)
    return state


@triton.jit(do_not_specialize=SIZES)
def diagonal_kernel(
    a, b, h0, h, states, d_a, flags, products, sources, starts, steps, lanes, blocks, tiles,
    REVERSE: tl.constexpr, ADJOINT: tl.constexpr, SLOPES: tl.constexpr, WINDOW: tl.constexpr, ONE: tl.constexpr,
    LENGTH: tl.constexpr, GROUPS: tl.constexpr, LANES: tl.constexpr, PITCH: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """All states `h`, from h0 or zero; with ADJOINT all adjoints, from zero, and with SLOPES `d_a` from the `states`.

    `flags` (chunks, blocks of lanes) are 0 at first: 1 means that a chunk's `products` and `sources` (chunks, lanes)
    are published, 2 that its state in `starts` is, too. `tiles`: tiles of a chunk; with ONE a single one, which is not
    read again. WINDOW is 0 if one chunk holds all steps. PITCH is `lanes` as a constant, or 0 to leave it variable.
    """
    chunk, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    lane = block.to(tl.int64) * LANES + tl.arange(0, LANES)
    column = block.to(tl.int64) * LANES + tl.arange(0, GROUPS * LANES) % LANES
    pitch = lanes
    if PITCH > 0:  # offsets in a tile are constants to the compiler
        column += lanes - PITCH  # which is 0, and hides neighbouring lanes from Triton: see SIZES
        pitch = PITCH
    initial = tl.zeros((LANES,), ACC)
    if h0 is not None:
        initial = tl.load(h0 + lane, mask=lane < lanes, other=0.0).to(ACC)
    state = tl.zeros((LANES,), ACC) if ADJOINT else initial
    nothing = tl.zeros((GROUPS, LANES), ACC)
    initial = initial[None, :] + nothing
    first = chunk * tiles
    if WINDOW > 0 and ONE:
        v, w = fetch(a, b, first, column, steps, lanes, pitch, True, REVERSE, ADJOINT, LENGTH, GROUPS, "evict_first")
        if SLOPES:
            entered = fetch_entered(states, initial, first, column, steps, lanes, pitch, REVERSE, LENGTH, GROUPS)
        x, y, product, source = composed(v.to(ACC), w.to(ACC), LENGTH, GROUPS, LANES)
        factor, summand = tl.associative_scan((product, source), 0, link)
        factor, summand = last(factor, GROUPS), last(summand, GROUPS)
        state = tell_and_hear(
            flags, products, sources, starts, factor, summand, state, chunk, block, blocks, lane, lanes, WINDOW
        )
        y, _ = enter(x, y, product, source, state[None, :] + nothing, LENGTH, GROUPS, LANES)
        keep(h, y, first, column, steps, lanes, pitch, REVERSE, LENGTH, GROUPS)
        if SLOPES:
            keep(d_a, y * entered, first, column, steps, lanes, pitch, REVERSE, LENGTH, GROUPS)
    else:
        v, w = fetch(a, b, first, column, steps, lanes, pitch, True, REVERSE, ADJOINT, LENGTH, GROUPS, "")
        if WINDOW > 0:
            factor, summand = nothing + 1.0, nothing
            for i in range(tiles):
                x, y = v.to(ACC), w.to(ACC)
                after = tl.where(i + 1 < tiles, first + i + 1, first)  # the first one again is the next to be read
                v, w = fetch(a, b, after, column, steps, lanes, pitch, True, REVERSE, ADJOINT, LENGTH, GROUPS, "")
                x, y, product, source = composed(x, y, LENGTH, GROUPS, LANES)
                product, source = tl.associative_scan((product, source), 0, link)
                product, source = behind_all(product, GROUPS, LANES), behind_all(source, GROUPS, LANES)
                factor, summand = link(factor, summand, product, source)
            factor, summand = last(factor, GROUPS), last(summand, GROUPS)
            state = tell_and_hear(
                flags, products, sources, starts, factor, summand, state, chunk, block, blocks, lane, lanes, WINDOW
            )
        every = state[None, :] + nothing
        EVICT: tl.constexpr = "evict_first" if WINDOW > 0 else ""  # read for the last time
        for i in range(tiles):
            tile = first + i
            x, y = v.to(ACC), w.to(ACC)
            more = i + 1 < tiles
            v, w = fetch(a, b, tile + 1, column, steps, lanes, pitch, more, REVERSE, ADJOINT, LENGTH, GROUPS, EVICT)
            if SLOPES:
                entered = fetch_entered(states, initial, tile, column, steps, lanes, pitch, REVERSE, LENGTH, GROUPS)
            x, y, product, source = composed(x, y, LENGTH, GROUPS, LANES)
            y, every = enter(x, y, product, source, every, LENGTH, GROUPS, LANES)
            keep(h, y, tile, column, steps, lanes, pitch, REVERSE, LENGTH, GROUPS)
            if SLOPES:
                keep(d_a, y * entered, tile, column, steps, lanes, pitch, REVERSE, LENGTH, GROUPS)
