# mypy: ignore-errors
"""The diagonal linear recurrence on a GPU, in Triton: `h[s] = a[s] h[s-1] + b[s]` for many lanes side by side.

A program owns LANES lanes and walks over its chunk of time in tiles of GROUPS · LENGTH steps. Every thread runs the
LENGTH steps of one group and one lane on its own; the groups' transfers, few as they are, are composed; then every
step adds what its group's start contributes. Where lanes are few, time is cut into chunks: `transfers_kernel` finds
what each chunk does to a state, and `diagonal_kernel` composes those of the chunks before its own.

Everything is `(steps, lanes)`, lanes next to one another. s counts steps in the order in which they are taken; with
REVERSE they lie in memory the other way round. With ADJOINT, b are incoming gradients, and what carries an adjoint into
step s is the `a` of the step before it in that order: `λ[s] = a[s-1] λ[s-1] + g[s]`. The gradient of `a` follows on the
way, if wanted (SLOPES): `λ[s]` times the state that entered this step, which lies at s + 1; at the end it is h0.

The readable twin is `scan/reference.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["diagonal_kernel", "transfers_kernel"]

SIZES = ["steps", "lanes", "tiles"]
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
def load_tile(
    a, b, tile, block, steps, lanes, REVERSE: tl.constexpr, ADJOINT: tl.constexpr, LENGTH: tl.constexpr,
    GROUPS: tl.constexpr, LANES: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """A tile's elements, composed from the start of every group on, and their places: [LENGTH, GROUPS · LANES].

    Column `g LANES + l` is lane l of group g. Each has so many steps `left`, and at most one more than a group takes.
    """
    column = tl.arange(0, GROUPS * LANES)
    lane = block.to(tl.int64) * LANES + column % LANES
    s = tile.to(tl.int64) * (GROUPS * LENGTH) + column // LANES * LENGTH
    left = tl.where(lane < lanes, tl.minimum(tl.maximum(steps - s, 0), LENGTH + 1), 0).to(tl.int32)
    stride = tl.cast(lanes, tl.int64)
    if REVERSE:
        stride = -stride
    first = s * stride + lane
    if REVERSE:
        first += (tl.cast(steps, tl.int64) - 1) * lanes
    j = tl.arange(0, LENGTH)[:, None]
    here = first[None, :] + j * stride
    left = left[None, :]
    if ADJOINT:
        x = tl.load(a + (here - stride), mask=(j < left) & (j >= (s == 0)[None, :].to(tl.int32)), other=0.0)
    else:
        x = tl.load(a + here, mask=j < left, other=0.0)
    y = tl.load(b + here, mask=j < left, other=0.0)
    x, y = tl.associative_scan((x.to(ACC), y.to(ACC)), 0, compose)
    return x, y, here, left


@triton.jit
def last(x, COUNT: tl.constexpr):
    """The last row."""
    return tl.sum(tl.where(tl.arange(0, COUNT)[:, None] == COUNT - 1, x, 0.0), 0)


@triton.jit
def transfers(x, y, LENGTH: tl.constexpr, GROUPS: tl.constexpr, LANES: tl.constexpr):
    """What the groups of a tile do to a state, [GROUPS, LANES]; not a number, where an element is not finite."""
    product = last(x, LENGTH).reshape(GROUPS, LANES)
    return product, last(y, LENGTH).reshape(GROUPS, LANES) + product * 0.0


@triton.jit(do_not_specialize=SIZES)
def transfers_kernel(
    a, b, products, sources, steps, lanes, tiles,
    REVERSE: tl.constexpr, ADJOINT: tl.constexpr, LENGTH: tl.constexpr, GROUPS: tl.constexpr, LANES: tl.constexpr,
    STAGES: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """What whole chunks of `tiles` tiles do to a state, `h → products h + sources`, both (chunks, lanes).

    From the last tile to the first: what was read last is still in the cache when the second launch begins there.
    """
    block, chunk = tl.program_id(0), tl.program_id(1)
    product = tl.full((LANES,), 1.0, ACC)
    source = tl.zeros((LANES,), ACC)
    for i in tl.range(0, tiles, num_stages=STAGES):
        x, y, _, _ = load_tile(
            a, b, chunk * tiles + tiles - 1 - i, block, steps, lanes, REVERSE, ADJOINT, LENGTH, GROUPS, LANES, ACC
        )
        x, y = transfers(x, y, LENGTH, GROUPS, LANES)
        x, y = tl.associative_scan((x, y), 0, link)
        product, source = link(last(x, GROUPS), last(y, GROUPS), product, source)
    lane = block.to(tl.int64) * LANES + tl.arange(0, LANES)
    there = chunk.to(tl.int64) * lanes + lane
    tl.store(products + there, product, mask=lane < lanes)
    tl.store(sources + there, source, mask=lane < lanes)


@triton.jit
def carry(state, products, sources, chunk, lane, lanes, CHUNKS: tl.constexpr):
    """The state before a chunk, from the one before all of them."""
    c = tl.arange(0, CHUNKS)[:, None]
    earlier = (c < chunk) & (lane < lanes)[None, :]
    there = c.to(tl.int64) * lanes + lane[None, :]
    x = tl.load(products + there, mask=earlier, other=1.0)
    y = tl.load(sources + there, mask=earlier, other=0.0)
    x, y = tl.associative_scan((x, y), 0, link)
    return moved(last(x, CHUNKS), state) + last(y, CHUNKS)


@triton.jit(do_not_specialize=SIZES)
def diagonal_kernel(
    a, b, h0, h, states, d_a, products, sources, steps, lanes, tiles,
    REVERSE: tl.constexpr, ADJOINT: tl.constexpr, SLOPES: tl.constexpr, CHUNKS: tl.constexpr, LENGTH: tl.constexpr,
    GROUPS: tl.constexpr, LANES: tl.constexpr, STAGES: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """All states `h` of a chunk; with ADJOINT all adjoints, from nothing, and with SLOPES `d_a` from the `states` too.

    CHUNKS: number of chunks, rounded up to a power of two.
    """
    block, chunk = tl.program_id(0), tl.program_id(1)
    lane = block.to(tl.int64) * LANES + tl.arange(0, LANES)
    initial = tl.load(h0 + lane, mask=lane < lanes, other=0.0).to(ACC)
    state = tl.zeros((LANES,), ACC) if ADJOINT else initial
    if CHUNKS > 1:
        state = carry(state, products, sources, chunk, lane, lanes, CHUNKS)
    if SLOPES:
        first = (initial[None, :] + tl.zeros((GROUPS, LANES), ACC)).reshape(1, GROUPS * LANES)
    group = tl.arange(0, GROUPS)[:, None]
    previous = tl.maximum(group - 1, 0) + tl.zeros((GROUPS, LANES), tl.int32)
    for i in tl.range(0, tiles, num_stages=STAGES):
        x, y, here, left = load_tile(
            a, b, chunk * tiles + i, block, steps, lanes, REVERSE, ADJOINT, LENGTH, GROUPS, LANES, ACC
        )
        product, source = transfers(x, y, LENGTH, GROUPS, LANES)
        source = tl.where(group == 0, moved(product, state[None, :]) + source, source)
        _, ends = tl.associative_scan((product, source), 0, link)  # [GROUPS, LANES]
        starts = tl.where(group == 0, state[None, :], tl.gather(ends, previous, 0))
        state = last(ends, GROUPS)
        y += x * starts.reshape(1, GROUPS * LANES)
        j = tl.arange(0, LENGTH)[:, None]
        tl.store(h + here, y.to(h.dtype.element_ty), mask=j < left)
        if SLOPES:
            inner = j + 1 < left
            entered = tl.load(states + (here - lanes if REVERSE else here + lanes), mask=inner, other=0.0)
            entered = tl.where(inner, entered.to(ACC), first)
            tl.store(d_a + here, (y * entered).to(d_a.dtype.element_ty), mask=j < left)
