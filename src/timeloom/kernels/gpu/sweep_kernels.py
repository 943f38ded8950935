# mypy: ignore-errors
# ruff: noqa: SIM109 (Triton compiles these branches away; its language has no `in`)
"""Chunk sweeps of GRU, LSTM and RNN on a GPU, in Triton: the recurrent weights stay on the chip for all steps.

A program runs ROWS stretches side by side. Stretch i is `begin[i] ≤ t < end[i]` of sequence `seq[i]`. With a lead-in it
is entered `lead` steps early from a neutral state: warm-up and sweep in one launch. Each step is: products with the
recurrent weights, gates, new state. What the next step reads is fetched while this one is computed.

Layouts: inputs `(T, B, gates · n)`, states `(T + 1, B, n)` with the state *before* step t at index t, weights
`(gates · n, n)`. The readable twin is `sweep/reference.py`; the equations are in `cells/`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from timeloom.kernels.gpu.gates import (
    GRU,
    LSTM,
    RNN_RELU,
    RNN_TANH,
    advance,
    load_gate,
    load_rows,
    load_slopes,
    load_state,
    pull,
    store_decay,
    store_gate_grads,
    store_rows,
    store_slopes,
    store_state,
)

__all__ = [
    "GRU", "LSTM", "RNN_RELU", "RNN_TANH", "adjoint_kernel", "correct_kernel", "forward_kernel", "jumps_kernel",
    "slopes_kernel",
]  # fmt: skip

SPANS = ["longest", "lead"]
"""For these a kernel is not compiled anew: they change as a network is learned. It does pay for the number of rows."""


@triton.jit
def load_inputs(inputs, token, j, n, live, CELL: tl.constexpr):
    """Every gate's input; the first in place of those that a cell does not have."""
    GATES: tl.constexpr = 3 if CELL == GRU else (4 if CELL == LSTM else 1)
    u0 = load_rows(inputs, token, GATES * n, 0, j, n, live)
    u1 = u0
    u2 = u0
    u3 = u0
    if GATES >= 3:
        u1 = load_rows(inputs, token, GATES * n, n, j, n, live)
        u2 = load_rows(inputs, token, GATES * n, 2 * n, j, n, live)
    if GATES == 4:
        u3 = load_rows(inputs, token, GATES * n, 3 * n, j, n, live)
    return u0, u1, u2, u3


@triton.jit
def load_weights(weights, n, j, CELL: tl.constexpr, TRANSPOSED: tl.constexpr):
    w0 = load_gate(weights, 0, n, j, j, TRANSPOSED)
    w1 = w0
    w2 = w0
    w3 = w0
    if CELL == GRU or CELL == LSTM:
        w1 = load_gate(weights, 1, n, j, j, TRANSPOSED)
        w2 = load_gate(weights, 2, n, j, j, TRANSPOSED)
    if CELL == LSTM:
        w3 = load_gate(weights, 3, n, j, j, TRANSPOSED)
    return w0, w1, w2, w3


@triton.jit
def products(h, w0, w1, w2, w3, CELL: tl.constexpr, PRECISION: tl.constexpr):
    """h times every gate's weights."""
    a = h.to(w0.dtype)
    p0 = tl.dot(a, w0, input_precision=PRECISION)
    p1 = p0
    p2 = p0
    p3 = p0
    if CELL == GRU or CELL == LSTM:
        p1 = tl.dot(a, w1, input_precision=PRECISION)
        p2 = tl.dot(a, w2, input_precision=PRECISION)
    if CELL == LSTM:
        p3 = tl.dot(a, w3, input_precision=PRECISION)
    return p0, p1, p2, p3


@triton.jit
def through_weights(g0, g1, g2, g3, w0, w1, w2, w3, CELL: tl.constexpr, PRECISION: tl.constexpr):
    """Gate gradients times the weights of their gates, summed."""
    total = tl.dot(g0.to(w0.dtype), w0, input_precision=PRECISION)
    if CELL == GRU:
        total = tl.dot(g1.to(w0.dtype), w1, total, input_precision=PRECISION)
        total = tl.dot(g3.to(w0.dtype), w2, total, input_precision=PRECISION)
    elif CELL == LSTM:
        total = tl.dot(g1.to(w0.dtype), w1, total, input_precision=PRECISION)
        total = tl.dot(g2.to(w0.dtype), w2, total, input_precision=PRECISION)
        total = tl.dot(g3.to(w0.dtype), w3, total, input_precision=PRECISION)
    return total


@triton.jit(do_not_specialize=SPANS)
def forward_kernel(
    inputs, weights, units, initial, starts, ends, decay, h_states, c_states, slopes, seq, begin, end, resets,
    rows, batch, n, longest, lead,
    CELL: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr, LED: tl.constexpr, KEEP: tl.constexpr,
    TAPE: tl.constexpr, DECAY: tl.constexpr, RESETS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Run stretches from `starts` (R, S); or, led in from `initial`, put the states at their begins there."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    j = tl.arange(0, UNITS)
    b = tl.load(seq + row, mask=live, other=0)
    first = tl.load(begin + row, mask=live, other=0)
    last = tl.load(end + row, mask=live, other=0)
    w0, w1, w2, w3 = load_weights(weights, n, j, CELL, False)
    unit = tl.load(units + j, mask=j < n, other=0.0).to(tl.float32)[None, :]
    if LED:
        enter = first - lead
        h, c = load_state(initial, b, n, j, live, CELL)
    else:
        enter = first
        h, c = load_state(starts, row, n, j, live, CELL)
    kept = tl.full((ROWS, UNITS), 1.0, tl.float32)
    u0, u1, u2, u3 = load_inputs(inputs, enter * batch + b, j, n, live & (enter >= 0) & (enter < last), CELL)
    OWN: tl.constexpr = 1
    for phase in tl.static_range(0 if LED else OWN, OWN + 1):
        t = first
        steps = longest
        if phase < OWN:
            t = enter
            steps = lead
        elif LED:
            store_state(starts, row, n, j, live & (first < last), h, c, CELL)
        for _ in range(steps):
            alive = live & (t < last)
            fetch = live & (t + 1 < last)
            if phase < OWN:  # before a sequence begins, its state stays where it is
                alive = alive & (t >= 0)
                fetch = fetch & (t + 1 >= 0)
            if RESETS:
                fresh = tl.load(resets + t * batch + b, mask=alive, other=0) != 0
                origin, origin_c = load_state(initial, b, n, j, fresh, CELL)
                h = tl.where(fresh[:, None], origin, h)
                c = tl.where(fresh[:, None], origin_c, c)
                if DECAY and phase == OWN:
                    kept = tl.where(fresh[:, None], 0.0, kept)
            token = t * batch + b
            v0, v1, v2, v3 = load_inputs(inputs, token + batch, j, n, fetch, CELL)
            p0, p1, p2, p3 = products(h, w0, w1, w2, w3, CELL, PRECISION)
            new, new_c, keep = advance(u0, u1, u2, u3, p0, p1, p2, p3, unit, h, c, CELL)
            if TAPE and phase == OWN:
                store_slopes(slopes, token, j, n, alive, u0, u1, u2, u3, p0, p1, p2, p3, unit, h, c, CELL)
            h = tl.where(alive[:, None], new, h)
            c = tl.where(alive[:, None], new_c, c)
            if DECAY and phase == OWN:
                kept = tl.where(alive[:, None], kept * keep, kept)
            if KEEP and phase == OWN:
                store_rows(h_states, token + batch, n, 0, j, n, alive, h)
                if CELL == LSTM:
                    store_rows(c_states, token + batch, n, 0, j, n, alive, c)
            u0 = v0
            u1 = v1
            u2 = v2
            u3 = v3
            t += 1
    store_state(ends, row, n, j, live, h, c, CELL)
    if DECAY:
        store_decay(decay, row, n, j, live, kept, CELL)


@triton.jit
def slopes_kernel(
    inputs, weights, units, initial, h_states, c_states, resets, slopes, tokens, batch, n,
    CELL: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr, RESETS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What the adjoint needs of every step, all steps at once, into `slopes` (T, B, SLOPES n): see `store_slopes`."""
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = token < tokens
    j = tl.arange(0, UNITS)
    h = load_rows(h_states, token, n, 0, j, n, live)
    c = h
    if CELL == LSTM:
        c = load_rows(c_states, token, n, 0, j, n, live)
    if RESETS:
        fresh = tl.load(resets + token, mask=live, other=0) != 0
        origin, origin_c = load_state(initial, token % batch, n, j, fresh, CELL)
        h = tl.where(fresh[:, None], origin, h)
        c = tl.where(fresh[:, None], origin_c, c)
    unit = tl.load(units + j, mask=j < n, other=0.0).to(tl.float32)[None, :]
    w0, w1, w2, w3 = load_weights(weights, n, j, CELL, False)
    u0, u1, u2, u3 = load_inputs(inputs, token, j, n, live, CELL)
    p0, p1, p2, p3 = products(h, w0, w1, w2, w3, CELL, PRECISION)
    store_slopes(slopes, token, j, n, live, u0, u1, u2, u3, p0, p1, p2, p3, unit, h, c, CELL)


@triton.jit(do_not_specialize=SPANS)
def adjoint_kernel(
    slopes, weights, units, final, starts, ends, decay, incoming, gate_grads, sums, reset_grads,
    seq, begin, end, lengths, resets,
    rows, batch, n, longest, lead,
    CELL: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr, LED: tl.constexpr, KEEP: tl.constexpr,
    SUM: tl.constexpr, INCOMING: tl.constexpr, DECAY: tl.constexpr, RESETS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Carry gradients back along stretches, from `starts` (R, S), given at their ends, to `ends`, at their begins.

    With a lead-in, a stretch is entered `lead` steps behind its end with a zero gradient, or at its sequence's end with
    `final`, where there is one; `starts` then receives the gradient at its end. `sums` (R, G) receives the sum of its
    gate gradients.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    j = tl.arange(0, UNITS)
    b = tl.load(seq + row, mask=live, other=0)
    first = tl.load(begin + row, mask=live, other=0)
    last = tl.load(end + row, mask=live, other=0)
    w0, w1, w2, w3 = load_weights(weights, n, j, CELL, True)
    unit = tl.load(units + j, mask=j < n, other=0.0).to(tl.float32)[None, :]
    length = last
    enter = last
    if LED:
        length = tl.load(lengths + b, mask=live, other=0)
        enter = last + lead
        if final is None:
            d_h = tl.zeros((ROWS, UNITS), tl.float32)
            d_c = d_h
        else:
            d_h, d_c = load_state(final, b, n, j, live & (enter >= length), CELL)
    else:
        d_h, d_c = load_state(starts, row, n, j, live, CELL)
    kept = tl.full((ROWS, UNITS), 1.0, tl.float32)
    diverted = tl.zeros((ROWS, UNITS), tl.float32)
    diverted_c = tl.zeros((ROWS, UNITS), tl.float32)
    sum0 = tl.zeros((ROWS, UNITS), tl.float32)
    sum1 = tl.zeros((ROWS, UNITS), tl.float32)
    sum2 = tl.zeros((ROWS, UNITS), tl.float32)
    sum3 = tl.zeros((ROWS, UNITS), tl.float32)
    token = (enter - 1) * batch + b
    fetch = live & (enter > first) & (enter <= length)
    s0, s1, s2, s3, s4, s5 = load_slopes(slopes, token, j, n, fetch, CELL)
    if INCOMING:
        direct = load_rows(incoming, token, n, 0, j, n, fetch)
    OWN: tl.constexpr = 1
    for phase in tl.static_range(0 if LED else OWN, OWN + 1):
        t = last - 1
        steps = longest
        if phase < OWN:
            t = enter - 1
            steps = lead
        for _ in range(steps):
            alive = live & (t >= first)
            fetch = live & (t > first)
            if phase < OWN:  # behind a sequence's end, its gradient stays what it is
                alive = alive & (t < length)
                fetch = fetch & (t <= length)
            elif LED:  # in the loop, not before it: gate gradients are then computed in the layout of their stores, too
                store_state(starts, row, n, j, alive & (t == last - 1), d_h, d_c, CELL)
            token = t * batch + b
            q0, q1, q2, q3, q4, q5 = load_slopes(slopes, token - batch, j, n, fetch, CELL)
            grad = d_h
            if INCOMING:
                grad += direct
                direct = load_rows(incoming, token - batch, n, 0, j, n, fetch)
            g0, g1, g2, g3, back, back_c, keep = pull(grad, d_c, s0, s1, s2, s3, s4, s5, unit, CELL)
            # A sum of its own: the matrix units cut off as they add, which over a long memory wears down what passes.
            back += through_weights(g0, g1, g2, g3, w0, w1, w2, w3, CELL, PRECISION)
            if KEEP and phase == OWN:
                store_gate_grads(gate_grads, token, j, n, alive, g0, g1, g2, g3, CELL)
            if SUM and phase == OWN:
                sum0 += tl.where(alive[:, None], g0, 0.0)
                sum1 += tl.where(alive[:, None], g1, 0.0)
                sum2 += tl.where(alive[:, None], g2, 0.0)
                sum3 += tl.where(alive[:, None], g3, 0.0)
            if DECAY and phase == OWN:
                kept = tl.where(alive[:, None], kept * keep, kept)
            if RESETS:
                fresh = tl.load(resets + token, mask=alive, other=0) != 0
                if phase == OWN:
                    diverted += tl.where(fresh[:, None], back, 0.0)
                    diverted_c += tl.where(fresh[:, None], back_c, 0.0)
                    kept = tl.where(fresh[:, None], 0.0, kept)
                back = tl.where(fresh[:, None], 0.0, back)
                back_c = tl.where(fresh[:, None], 0.0, back_c)
            d_h = tl.where(alive[:, None], back, d_h)
            d_c = tl.where(alive[:, None], back_c, d_c)
            s0 = q0
            s1 = q1
            s2 = q2
            s3 = q3
            s4 = q4
            s5 = q5
            t -= 1
    store_state(ends, row, n, j, live, d_h, d_c, CELL)
    if SUM:
        store_gate_grads(sums, row, j, n, live, sum0, sum1, sum2, sum3, CELL)
    if RESETS and KEEP:
        store_state(reset_grads, row, n, j, live, diverted, diverted_c, CELL)
    if DECAY:
        store_decay(decay, row, n, j, live, kept, CELL)


@triton.jit(do_not_specialize=["rows"])
def jumps_kernel(
    starts, there, worst, rows, batch, shift, n, floor,
    ROWS: tl.constexpr, UNITS: tl.constexpr, PARTS: tl.constexpr, JOINT: tl.constexpr,
):  # fmt: skip
    """The largest jump from a stretch's start to what is `there`, relative to the larger of the two.

    Stretches stand link by link, `batch` to a link; for each behind the first link there is row − `shift`. The first
    part of the state counts as `floor` large at least; JOINT measures all parts against the largest of them.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inner = (row >= batch) & (row < rows)
    j = tl.arange(0, UNITS)
    least = tl.zeros((ROWS,), tl.float32) + floor
    if JOINT:
        for unit in range(0, PARTS * n, UNITS):
            start = load_rows(starts, row, PARTS * n, 0, unit + j, PARTS * n, inner)
            other = load_rows(there, row - shift, PARTS * n, 0, unit + j, PARTS * n, inner)
            least = tl.maximum(least, tl.max(tl.maximum(tl.abs(start), tl.abs(other)), 1))
    found = 0.0
    for part in tl.static_range(PARTS):
        scale = least if part == 0 or JOINT else tl.zeros((ROWS,), tl.float32)
        jump = tl.zeros((ROWS,), tl.float32)
        for unit in range(0, n, UNITS):
            start = load_rows(starts, row, PARTS * n, part * n, unit + j, n, inner)
            other = load_rows(there, row - shift, PARTS * n, part * n, unit + j, n, inner)
            scale = tl.maximum(scale, tl.max(tl.maximum(tl.abs(start), tl.abs(other)), 1))
            difference = other - start
            finite = tl.where(difference == difference, tl.abs(difference), float("inf"))
            jump = tl.maximum(jump, tl.max(finite, 1))
        relative = jump / tl.maximum(scale, 1e-37)
        relative = tl.where(relative == relative, relative, float("inf"))  # an infinite scale says nothing
        found = tl.maximum(found, tl.max(tl.where(jump > 0, relative, 0.0), 0))
    tl.atomic_max(worst, found)


@triton.jit
def compose(a, b, later_a, later_b):
    """First `y = a x + b`, then the later one."""
    return a * later_a, b * later_a + later_b


@triton.jit(do_not_specialize=["links"])
def correct_kernel(
    starts, ends, decay, bound, corrected, links, width, BOXED: tl.constexpr, LINKS: tl.constexpr, COLUMNS: tl.constexpr
):
    """New starts from the jumps between stretches, carried along by their decay: `δ[p] = decay[p−1] δ[p−1] + jump[p]`.

    All are `(links, width)`; `bound` `(width,)` is a box that starts stay in.
    """
    column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    delta = tl.zeros((COLUMNS,), tl.float32)
    if BOXED:
        box = tl.load(bound + column, mask=inside, other=0.0)[None, :]
    link = tl.arange(0, LINKS)
    for done in range(0, links, LINKS):
        p = (done + link).to(tl.int64)
        here = p[:, None] * width + column[None, :]
        known = (p[:, None] < links) & inside[None, :]
        after = known & (p[:, None] > 0)
        start = tl.load(starts + here, mask=known, other=0.0)
        end = tl.load(ends + here - width, mask=after, other=0.0)
        keep = tl.load(decay + here - width, mask=after, other=0.0)
        jump = tl.where(after, end - start, 0.0)
        product, total = tl.associative_scan((keep, jump), 0, compose)
        moved = product * delta[None, :] + total
        new = tl.where(after, end + (moved - jump), start)
        if BOXED:
            new = tl.where(after, tl.minimum(tl.maximum(new, -box), box), new)
        tl.store(corrected + here, new, mask=known)
        delta = tl.sum(tl.where((link == LINKS - 1)[:, None], moved, 0.0), 0)
