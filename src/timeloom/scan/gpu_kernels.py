# mypy: ignore-errors
"""The diagonal linear recurrence on a GPU, in Triton: `h[s] = a[s] h[s-1] + b[s]` for many lanes side by side.

A program owns a chunk of time for LANES lanes, and walks over it in tiles of GROUPS · LENGTH steps. Every thread runs
the LENGTH steps of one group and one lane on its own; the groups' transfers, few as they are, are composed; then every
step adds what its group's start contributes. What a chunk does to a state is found first and left in memory for the
chunks behind it, and a flag says so: a chunk composes those between it and the last of every WINDOW, which also tells
the state that it found. So all chunks but one of each WINDOW wait for loads alone, and results do not depend on who was
first; a chunk waits only for programs of lower numbers, which GPUs start first. Then the chunk is read again, from the
cache, and its states are written: memory sees everything once. The next tile is fetched while one is computed.

Everything is `(steps, lanes)`, lanes next to one another. s counts steps in the order in which they are taken; with
REVERSE they lie in memory the other way round. With ADJOINT, b are incoming gradients, and what carries an adjoint into
step s is the `a` of the step before it in that order: `λ[s] = a[s-1] λ[s-1] + g[s]`. The gradient of `a` follows on the
way, if wanted (SLOPES): `λ[s]` times the state that entered this step, which lies at s + 1; at the end it is h0.

The readable twin is `scan/reference.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["diagonal_kernel"]

SIZES = ["steps", "lanes", "blocks", "tiles"]
"""Not looked at when a kernel is compiled: one compilation for all of them. It also keeps Triton from giving a thread
four neighbouring lanes, and with them a quarter of the steps: threads would have to talk to one another on every step.
"""


@triton.jit
def compose(a, b, later_a, later_b):
    """First `h → a h + b`, then the later one."""
    return a * later_a, b * later_a + later_b


@triton.jit
def moved(product, h):
    """A product of many elements times a state: where it has overflowed, it leaves an exact zero what it is."""
    return tl.where(h == 0.0, 0.0, product * h)


@triton.jit
def link(a, b, later_a, later_b):
    """`compose` for groups and more."""
    return moved(later_a, a), moved(later_a, b) + later_b


@triton.jit
def places(lane, lanes, REVERSE: tl.constexpr, LENGTH: tl.constexpr, GROUPS: tl.constexpr, INDEX: tl.constexpr):
    """Where a tile's elements lie behind its first one, [LENGTH, GROUPS · LANES].

    `lane` says each column's; the columns of a group stand together.
    """
    COLUMNS: tl.constexpr = lane.shape[0]
    group = tl.arange(0, COLUMNS) // (COLUMNS // GROUPS)
    stride = tl.cast(lanes, INDEX)
    if REVERSE:
        stride = -stride
    step = (group * LENGTH)[None, :] + tl.arange(0, LENGTH)[:, None]
    return step.to(INDEX) * stride + lane[None, :].to(INDEX)


@triton.jit
def extent(tile, lane, steps, lanes, REVERSE: tl.constexpr, LENGTH: tl.constexpr, GROUPS: tl.constexpr):
    """A tile's first place in memory, each column's first step, and how many steps it has left, at most one more than a
    group takes."""
    COLUMNS: tl.constexpr = lane.shape[0]
    group = tl.arange(0, COLUMNS) // (COLUMNS // GROUPS)
    begin = tile.to(tl.int64) * (GROUPS * LENGTH)
    s = begin + group * LENGTH
    left = tl.where(lane < lanes, tl.minimum(tl.maximum(steps - s, 0), LENGTH + 1), 0).to(tl.int32)
    origin = begin * lanes
    if REVERSE:
        origin = (steps - 1 - begin) * lanes
    return origin, s[None, :], left[None, :]


@triton.jit
def fetch(
    a, b, tile, here, lane, steps, lanes, wanted, REVERSE: tl.constexpr, ADJOINT: tl.constexpr, LENGTH: tl.constexpr,
    GROUPS: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """A tile's elements, [LENGTH, GROUPS · LANES], where they are `wanted`."""
    origin, s, left = extent(tile, lane, steps, lanes, REVERSE, LENGTH, GROUPS)
    j = tl.arange(0, LENGTH)[:, None]
    known = j < tl.where(wanted, left, 0)
    if ADJOINT:
        before = origin + lanes if REVERSE else origin - lanes
        x = tl.load(a + before + here, mask=known & (s + j > 0), other=0.0, eviction_policy=EVICT)
    else:
        x = tl.load(a + origin + here, mask=known, other=0.0, eviction_policy=EVICT)
    return x, tl.load(b + origin + here, mask=known, other=0.0, eviction_policy=EVICT)


@triton.jit
def last(x, COUNT: tl.constexpr):
    """The last row."""
    return tl.sum(tl.where(tl.arange(0, COUNT)[:, None] == COUNT - 1, x, 0.0), 0)


@triton.jit
def transfers(x, y, LENGTH: tl.constexpr, GROUPS: tl.constexpr, LANES: tl.constexpr):
    """What the groups of a tile do to a state, [GROUPS, LANES]; not a number, where an element is not finite."""
    product = last(x, LENGTH).reshape(GROUPS, LANES)
    return product, last(y, LENGTH).reshape(GROUPS, LANES) + product * 0.0


@triton.jit
def tell(flags, at, value):
    """All that this program has stored is there before the flag is."""
    tl.debug_barrier()
    tl.atomic_xchg(flags + at, value, sem="release")


@triton.jit
def hear(state, flags, products, sources, starts, chunk, block, blocks, lane, lanes, WINDOW: tl.constexpr):
    """The state before a chunk, `state` being the one before all of them."""
    base = (chunk - 1) // WINDOW * WINDOW
    i = base + tl.arange(0, WINDOW)
    before = i < chunk
    wanted = tl.where((i == base) & (base > 0), 2, 1)
    waiting = 1
    while waiting > 0:
        told = tl.load(flags + i * blocks + block, mask=before, other=2, volatile=True)
        waiting = tl.sum((told < wanted).to(tl.int32), 0)
    tl.atomic_add(flags + chunk * blocks + block, 0, sem="acq_rel")  # nothing is read before that
    tl.debug_barrier()
    there = i.to(tl.int64)[:, None] * lanes + lane[None, :]
    known = before[:, None] & (lane < lanes)[None, :]
    x = tl.load(products + there, mask=known, other=1.0, cache_modifier=".cg")
    y = tl.load(sources + there, mask=known, other=0.0, cache_modifier=".cg")
    x, y = tl.associative_scan((x, y), 0, link)
    at = (base // WINDOW).to(tl.int64) * lanes + lane
    start = tl.load(starts + at, mask=tl.where(lane < lanes, base, 0) > 0, other=0.0, cache_modifier=".cg")
    return moved(last(x, WINDOW), tl.where(base > 0, start, state)) + last(y, WINDOW)


@triton.jit(do_not_specialize=SIZES)
def diagonal_kernel(
    a, b, h0, h, states, d_a, flags, products, sources, starts, steps, lanes, blocks, tiles,
    REVERSE: tl.constexpr, ADJOINT: tl.constexpr, SLOPES: tl.constexpr, WINDOW: tl.constexpr, LENGTH: tl.constexpr,
    GROUPS: tl.constexpr, LANES: tl.constexpr, INDEX: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """All states `h`; with ADJOINT all adjoints, from nothing, and with SLOPES `d_a` from the `states` too.

    `flags` (chunks, blocks of lanes) are 0 at first: 1 says that a chunk's `products` and `sources` (chunks, lanes) are
    there, 2 that its state in `starts` is, too. A chunk has so many `tiles`. WINDOW is 0 where one chunk holds all
    steps. INDEX is a type that holds places inside a tile.
    """
    chunk, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    lane = block.to(tl.int64) * LANES + tl.arange(0, LANES)
    column = block.to(tl.int64) * LANES + tl.arange(0, GROUPS * LANES) % LANES
    here = places(column, lanes, REVERSE, LENGTH, GROUPS, INDEX)
    initial = tl.load(h0 + lane, mask=lane < lanes, other=0.0).to(ACC)
    state = tl.zeros((LANES,), ACC) if ADJOINT else initial
    first = chunk * tiles
    AHEAD: tl.constexpr = not SLOPES  # registers do not suffice for both
    if WINDOW > 0:
        factor = tl.full((LANES,), 1.0, ACC)
        summand = tl.zeros((LANES,), ACC)
        v, w = fetch(a, b, first, here, column, steps, lanes, True, REVERSE, ADJOINT, LENGTH, GROUPS, "")
        for i in range(tiles):
            x, y = v.to(ACC), w.to(ACC)
            more = i + 1 < tiles
            after, wanted = tl.where(more, first + i + 1, first), more | AHEAD
            v, w = fetch(a, b, after, here, column, steps, lanes, wanted, REVERSE, ADJOINT, LENGTH, GROUPS, "")
            x, y = tl.associative_scan((x, y), 0, compose)
            x, y = transfers(x, y, LENGTH, GROUPS, LANES)
            x, y = tl.associative_scan((x, y), 0, link)
            factor, summand = link(factor, summand, last(x, GROUPS), last(y, GROUPS))
        there = chunk.to(tl.int64) * lanes + lane
        tl.store(products + there, factor, mask=lane < lanes)
        tl.store(sources + there, summand, mask=lane < lanes)
        tell(flags, chunk * blocks + block, 1)
        if chunk > 0:
            state = hear(state, flags, products, sources, starts, chunk, block, blocks, lane, lanes, WINDOW)
            if chunk % WINDOW == 0:
                tl.store(starts + (chunk // WINDOW).to(tl.int64) * lanes + lane, state, mask=lane < lanes)
                tell(flags, chunk * blocks + block, 2)
    elif AHEAD:
        v, w = fetch(a, b, first, here, column, steps, lanes, True, REVERSE, ADJOINT, LENGTH, GROUPS, "")
    group = tl.arange(0, GROUPS)[:, None]
    previous = tl.maximum(group - 1, 0) + tl.zeros((GROUPS, LANES), tl.int32)
    j = tl.arange(0, LENGTH)[:, None]
    EVICT: tl.constexpr = "evict_first" if WINDOW > 0 else ""  # read for the last time
    for i in range(tiles):
        origin, _, left = extent(first + i, column, steps, lanes, REVERSE, LENGTH, GROUPS)
        if not AHEAD:
            v, w = fetch(a, b, first + i, here, column, steps, lanes, True, REVERSE, ADJOINT, LENGTH, GROUPS, EVICT)
        x, y = v.to(ACC), w.to(ACC)
        if AHEAD:
            more = i + 1 < tiles
            v, w = fetch(a, b, first + i + 1, here, column, steps, lanes, more, REVERSE, ADJOINT, LENGTH, GROUPS, EVICT)
        x, y = tl.associative_scan((x, y), 0, compose)
        product, source = transfers(x, y, LENGTH, GROUPS, LANES)
        source = tl.where(group == 0, moved(product, state[None, :]) + source, source)
        product, ends = tl.associative_scan((product, source), 0, link)  # [GROUPS, LANES]
        entries = tl.where(group == 0, state[None, :], tl.gather(ends, previous, 0))
        state = last(ends, GROUPS)
        y += x * entries.reshape(1, GROUPS * LANES)
        tl.store(h + origin + here, y.to(h.dtype.element_ty), mask=j < left, cache_modifier=".cs")
        if SLOPES:
            entry = (initial[None, :] + tl.zeros((GROUPS, LANES), ACC)).reshape(1, GROUPS * LANES)
            inner = j + 1 < left
            entered = tl.load(states + origin + (here - lanes if REVERSE else here + lanes), mask=inner, other=0.0)
            entered = tl.where(inner, entered.to(ACC), entry)
            tl.store(d_a + origin + here, (y * entered).to(d_a.dtype.element_ty), mask=j < left, cache_modifier=".cs")
