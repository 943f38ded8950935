# mypy: ignore-errors
# ruff: noqa: SIM108, SIM109 (Triton compiles these branches away; its language has no `in`)
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

GRU: tl.constexpr = tl.constexpr(0)
LSTM: tl.constexpr = tl.constexpr(1)
RNN_TANH: tl.constexpr = tl.constexpr(2)
RNN_RELU: tl.constexpr = tl.constexpr(3)


@triton.jit
def tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def load_gate(weights, gate, n, k, j, TRANSPOSED: tl.constexpr):
    """One gate's weights, `[k, j] = W[gate n + j, k]`, or as stored if TRANSPOSED."""
    inside = (k[:, None] < n) & (j[None, :] < n)
    if TRANSPOSED:
        at = (gate * n + k[:, None]) * n + j[None, :]
    else:
        at = (gate * n + j[None, :]) * n + k[:, None]
    return tl.load(weights + at, mask=inside, other=0.0)


@triton.jit
def load_rows(base, token, width, offset, j, n, live):
    """`base[token, offset + j]` for every row, zeros outside: (ROWS, UNITS) in float32."""
    at = token[:, None] * width + offset + j[None, :]
    return tl.load(base + at, mask=live[:, None] & (j[None, :] < n), other=0.0).to(tl.float32)


@triton.jit
def store_rows(base, token, width, offset, j, n, live, value):
    at = token[:, None] * width + offset + j[None, :]
    tl.store(base + at, value.to(base.dtype.element_ty), mask=live[:, None] & (j[None, :] < n))


@triton.jit
def forward_kernel(
    inputs, weights, units, initial, starts, ends, leak, h_states, c_states, seq, begin, end, resets,
    rows, batch, n, longest, lead,
    CELL: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr, LED: tl.constexpr, KEEP: tl.constexpr,
    LEAK: tl.constexpr, RESETS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Run stretches from `starts` (R, S); or, led in from `initial`, put the states at their begins there."""
    GATES: tl.constexpr = 3 if CELL == GRU else (4 if CELL == LSTM else 1)
    PARTS: tl.constexpr = 2 if CELL == LSTM else 1
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    j = tl.arange(0, UNITS)
    b = tl.load(seq + row, mask=live, other=0)
    first = tl.load(begin + row, mask=live, other=0)
    last = tl.load(end + row, mask=live, other=0)
    w0 = load_gate(weights, 0, n, j, j, False)
    if GATES >= 3:
        w1 = load_gate(weights, 1, n, j, j, False)
        w2 = load_gate(weights, 2, n, j, j, False)
    if GATES == 4:
        w3 = load_gate(weights, 3, n, j, j, False)
    if CELL != LSTM:
        unit = tl.load(units + j, mask=j < n, other=0.0)[None, :]
    if LED:
        enter = tl.maximum(first - lead, 0)
        h = load_rows(initial, b, PARTS * n, 0, j, n, live)
        if CELL == LSTM:
            c = load_rows(initial, b, PARTS * n, n, j, n, live)
    else:
        enter = first
        h = load_rows(starts, row, PARTS * n, 0, j, n, live)
        if CELL == LSTM:
            c = load_rows(starts, row, PARTS * n, n, j, n, live)
    kept = tl.full((ROWS, UNITS), 1.0, tl.float32)
    steps = longest + lead if LED else longest
    token = enter * batch + b
    fetch = live & (enter < last)
    u0 = load_rows(inputs, token, GATES * n, 0, j, n, fetch)
    if GATES >= 3:
        u1 = load_rows(inputs, token, GATES * n, n, j, n, fetch)
        u2 = load_rows(inputs, token, GATES * n, 2 * n, j, n, fetch)
    if GATES == 4:
        u3 = load_rows(inputs, token, GATES * n, 3 * n, j, n, fetch)
    for step in range(steps):
        t = enter + step
        alive = live & (t < last)
        if LED:
            at_begin = alive & (t == first)
            store_rows(starts, row, PARTS * n, 0, j, n, at_begin, h)
            if CELL == LSTM:
                store_rows(starts, row, PARTS * n, n, j, n, at_begin, c)
        if RESETS:
            fresh = tl.load(resets + t * batch + b, mask=alive, other=0) != 0
            h = tl.where(fresh[:, None], load_rows(initial, b, PARTS * n, 0, j, n, fresh), h)
            if CELL == LSTM:
                c = tl.where(fresh[:, None], load_rows(initial, b, PARTS * n, n, j, n, fresh), c)
            if LEAK:
                kept = tl.where(fresh[:, None], 0.0, kept)
        token = (t + 1) * batch + b
        fetch = live & (t + 1 < last)
        v0 = load_rows(inputs, token, GATES * n, 0, j, n, fetch)
        if GATES >= 3:
            v1 = load_rows(inputs, token, GATES * n, n, j, n, fetch)
            v2 = load_rows(inputs, token, GATES * n, 2 * n, j, n, fetch)
        if GATES == 4:
            v3 = load_rows(inputs, token, GATES * n, 3 * n, j, n, fetch)
        a = h.to(w0.dtype)
        if CELL == GRU:
            reset = tl.sigmoid(u0 + tl.dot(a, w0, input_precision=PRECISION))
            update = tl.sigmoid(u1 + tl.dot(a, w1, input_precision=PRECISION))
            candidate = tanh(u2 + reset * (unit + tl.dot(a, w2, input_precision=PRECISION)))
            new = candidate + update * (h - candidate)
            keep = update
        elif CELL == LSTM:
            write = tl.sigmoid(u0 + tl.dot(a, w0, input_precision=PRECISION))
            forget = tl.sigmoid(u1 + tl.dot(a, w1, input_precision=PRECISION))
            candidate = tanh(u2 + tl.dot(a, w2, input_precision=PRECISION))
            output = tl.sigmoid(u3 + tl.dot(a, w3, input_precision=PRECISION))
            new_c = forget * c + write * candidate
            new = output * tanh(new_c)
            keep = forget
            c = tl.where(alive[:, None], new_c, c)
        else:
            argument = u0 + tl.dot(a, w0, input_precision=PRECISION)
            if CELL == RNN_TANH:
                new = tanh(argument)
                keep = (1 - new * new) * unit
            else:
                new = tl.where(argument > 0, argument, 0.0 * argument)
                keep = tl.where(new > 0, unit, 0.0)
        h = tl.where(alive[:, None], new, h)
        counted = alive & (t >= first)
        if LEAK:
            kept = tl.where(counted[:, None], kept * keep, kept)
        if KEEP:
            store_rows(h_states, token, n, 0, j, n, counted, h)
            if CELL == LSTM:
                store_rows(c_states, token, n, 0, j, n, counted, c)
        u0 = v0
        if GATES >= 3:
            u1 = v1
            u2 = v2
        if GATES == 4:
            u3 = v3
    store_rows(ends, row, PARTS * n, 0, j, n, live, h)
    if CELL == LSTM:
        store_rows(ends, row, PARTS * n, n, j, n, live, c)
    if LEAK:
        if CELL == LSTM:
            store_rows(leak, row, PARTS * n, 0, j, n, live, 0.0 * kept)
            store_rows(leak, row, PARTS * n, n, j, n, live, kept)
        else:
            store_rows(leak, row, n, 0, j, n, live, kept)


@triton.jit
def slopes_kernel(
    inputs, weights, units, initial, h_states, c_states, resets, slopes, tokens, batch, n,
    CELL: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr, RESETS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What the adjoint needs of every step, all steps at once: derivatives of the new state by the gates' arguments.

    `slopes` is (T, B, SLOPES n). GRU: by reset, update, candidate, inner product, and what passes by (the update gate).
    LSTM: of c by h, then by input, forget and candidate gate, of h by the output gate, and what passes by (the forget
    gate). RNN: by the argument.
    """
    GATES: tl.constexpr = 3 if CELL == GRU else (4 if CELL == LSTM else 1)
    PARTS: tl.constexpr = 2 if CELL == LSTM else 1
    WIDTH: tl.constexpr = 5 if CELL == GRU else (6 if CELL == LSTM else 1)
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = token < tokens
    j = tl.arange(0, UNITS)
    h = load_rows(h_states, token, n, 0, j, n, live)
    if CELL == LSTM:
        c = load_rows(c_states, token, n, 0, j, n, live)
    if RESETS:
        fresh = tl.load(resets + token, mask=live, other=0) != 0
        b = token % batch
        h = tl.where(fresh[:, None], load_rows(initial, b, PARTS * n, 0, j, n, fresh), h)
        if CELL == LSTM:
            c = tl.where(fresh[:, None], load_rows(initial, b, PARTS * n, n, j, n, fresh), c)
    w = load_gate(weights, 0, n, j, j, False)
    a = h.to(w.dtype)
    u0 = load_rows(inputs, token, GATES * n, 0, j, n, live) + tl.dot(a, w, input_precision=PRECISION)
    if GATES >= 3:
        w = load_gate(weights, 1, n, j, j, False)
        u1 = load_rows(inputs, token, GATES * n, n, j, n, live) + tl.dot(a, w, input_precision=PRECISION)
        w = load_gate(weights, 2, n, j, j, False)
        inner = tl.dot(a, w, input_precision=PRECISION)
        u2 = load_rows(inputs, token, GATES * n, 2 * n, j, n, live)
    if GATES == 4:
        w = load_gate(weights, 3, n, j, j, False)
        u3 = load_rows(inputs, token, GATES * n, 3 * n, j, n, live) + tl.dot(a, w, input_precision=PRECISION)
    if CELL == GRU:
        reset = tl.sigmoid(u0)
        update = tl.sigmoid(u1)
        inner += tl.load(units + j, mask=j < n, other=0.0)[None, :]
        candidate = tanh(u2 + reset * inner)
        by_candidate = (1 - update) * (1 - candidate * candidate)
        store_rows(slopes, token, WIDTH * n, 0, j, n, live, by_candidate * inner * reset * (1 - reset))
        store_rows(slopes, token, WIDTH * n, n, j, n, live, (h - candidate) * update * (1 - update))
        store_rows(slopes, token, WIDTH * n, 2 * n, j, n, live, by_candidate)
        store_rows(slopes, token, WIDTH * n, 3 * n, j, n, live, by_candidate * reset)
        store_rows(slopes, token, WIDTH * n, 4 * n, j, n, live, update)
    elif CELL == LSTM:
        write = tl.sigmoid(u0)
        forget = tl.sigmoid(u1)
        candidate = tanh(u2 + inner)
        output = tl.sigmoid(u3)
        squashed = tanh(forget * c + write * candidate)
        store_rows(slopes, token, WIDTH * n, 0, j, n, live, output * (1 - squashed * squashed))
        store_rows(slopes, token, WIDTH * n, n, j, n, live, candidate * write * (1 - write))
        store_rows(slopes, token, WIDTH * n, 2 * n, j, n, live, c * forget * (1 - forget))
        store_rows(slopes, token, WIDTH * n, 3 * n, j, n, live, write * (1 - candidate * candidate))
        store_rows(slopes, token, WIDTH * n, 4 * n, j, n, live, squashed * output * (1 - output))
        store_rows(slopes, token, WIDTH * n, 5 * n, j, n, live, forget)
    else:
        if CELL == RNN_TANH:
            new = tanh(u0)
            slope = 1 - new * new
        else:
            slope = tl.where(u0 > 0, 1.0, 0.0)
        store_rows(slopes, token, n, 0, j, n, live, slope)


@triton.jit
def adjoint_kernel(
    slopes, weights, units, final, starts, ends, leak, incoming, gate_grads, reset_grads,
    seq, begin, end, lengths, resets,
    rows, batch, n, longest, lead,
    CELL: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr, LED: tl.constexpr, KEEP: tl.constexpr,
    INCOMING: tl.constexpr, LEAK: tl.constexpr, RESETS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Carry gradients back along stretches, from `starts` (R, S), given at their ends, to `ends`, at their begins.

    With a lead-in, a stretch is entered `lead` steps behind its end with a zero gradient, or at its sequence's end with
    `final`; `starts` then receives the gradient at its end.
    """
    GRADS: tl.constexpr = 4 if CELL == GRU or CELL == LSTM else 1
    PARTS: tl.constexpr = 2 if CELL == LSTM else 1
    WIDTH: tl.constexpr = 5 if CELL == GRU else (6 if CELL == LSTM else 1)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    j = tl.arange(0, UNITS)
    b = tl.load(seq + row, mask=live, other=0)
    first = tl.load(begin + row, mask=live, other=0)
    last = tl.load(end + row, mask=live, other=0)
    w0 = load_gate(weights, 0, n, j, j, True)
    if GRADS == 4:
        w1 = load_gate(weights, 1, n, j, j, True)
        w2 = load_gate(weights, 2, n, j, j, True)
    if CELL == LSTM:
        w3 = load_gate(weights, 3, n, j, j, True)
    if LED:
        length = tl.load(lengths + b, mask=live, other=0)
        enter = tl.minimum(last + lead, length)
        at_end = live & (enter == length)
        d_h = load_rows(final, b, PARTS * n, 0, j, n, at_end)
        if CELL == LSTM:
            d_c = load_rows(final, b, PARTS * n, n, j, n, at_end)
    else:
        enter = last
        d_h = load_rows(starts, row, PARTS * n, 0, j, n, live)
        if CELL == LSTM:
            d_c = load_rows(starts, row, PARTS * n, n, j, n, live)
    kept = tl.full((ROWS, UNITS), 1.0, tl.float32)
    diverted = tl.zeros((ROWS, UNITS), tl.float32)
    diverted_c = tl.zeros((ROWS, UNITS), tl.float32)
    steps = longest + lead if LED else longest
    token = (enter - 1) * batch + b
    fetch = live & (enter > first)
    s0 = load_rows(slopes, token, WIDTH * n, 0, j, n, fetch)
    if GRADS == 4:
        s1 = load_rows(slopes, token, WIDTH * n, n, j, n, fetch)
        s2 = load_rows(slopes, token, WIDTH * n, 2 * n, j, n, fetch)
        s3 = load_rows(slopes, token, WIDTH * n, 3 * n, j, n, fetch)
        s4 = load_rows(slopes, token, WIDTH * n, 4 * n, j, n, fetch)
    if CELL == LSTM:
        s5 = load_rows(slopes, token, WIDTH * n, 5 * n, j, n, fetch)
    if INCOMING:
        direct = load_rows(incoming, token, n, 0, j, n, fetch)
    for step in range(steps):
        t = enter - 1 - step
        alive = live & (t >= first)
        if LED:
            at_last = alive & (t == last - 1)
            store_rows(starts, row, PARTS * n, 0, j, n, at_last, d_h)
            if CELL == LSTM:
                store_rows(starts, row, PARTS * n, n, j, n, at_last, d_c)
        token = t * batch + b
        before = token - batch
        fetch = live & (t > first)
        p0 = load_rows(slopes, before, WIDTH * n, 0, j, n, fetch)
        if GRADS == 4:
            p1 = load_rows(slopes, before, WIDTH * n, n, j, n, fetch)
            p2 = load_rows(slopes, before, WIDTH * n, 2 * n, j, n, fetch)
            p3 = load_rows(slopes, before, WIDTH * n, 3 * n, j, n, fetch)
            p4 = load_rows(slopes, before, WIDTH * n, 4 * n, j, n, fetch)
        if CELL == LSTM:
            p5 = load_rows(slopes, before, WIDTH * n, 5 * n, j, n, fetch)
        grad = d_h
        if INCOMING:
            grad += direct
            direct = load_rows(incoming, before, n, 0, j, n, fetch)
        if CELL == GRU:
            g0 = grad * s0
            g1 = grad * s1
            g2 = grad * s2
            g3 = grad * s3
            back = tl.dot(g0.to(w0.dtype), w0, input_precision=PRECISION)
            back += tl.dot(g1.to(w0.dtype), w1, input_precision=PRECISION)
            back += tl.dot(g3.to(w0.dtype), w2, input_precision=PRECISION)
            back += grad * s4
            keep = s4
        elif CELL == LSTM:
            d_cell = d_c + grad * s0
            g0 = d_cell * s1
            g1 = d_cell * s2
            g2 = d_cell * s3
            g3 = grad * s4
            back = tl.dot(g0.to(w0.dtype), w0, input_precision=PRECISION)
            back += tl.dot(g1.to(w0.dtype), w1, input_precision=PRECISION)
            back += tl.dot(g2.to(w0.dtype), w2, input_precision=PRECISION)
            back += tl.dot(g3.to(w0.dtype), w3, input_precision=PRECISION)
            back_c = d_cell * s5
            keep = s5
        else:
            g0 = grad * s0
            back = tl.dot(g0.to(w0.dtype), w0, input_precision=PRECISION)
            keep = s0 * tl.load(units + j, mask=j < n, other=0.0)[None, :]
        counted = alive & (t < last)
        if KEEP:
            store_rows(gate_grads, token, GRADS * n, 0, j, n, counted, g0)
            if GRADS == 4:
                store_rows(gate_grads, token, GRADS * n, n, j, n, counted, g1)
                store_rows(gate_grads, token, GRADS * n, 2 * n, j, n, counted, g2)
                store_rows(gate_grads, token, GRADS * n, 3 * n, j, n, counted, g3)
        if LEAK:
            kept = tl.where(counted[:, None], kept * keep, kept)
        if RESETS:
            fresh = tl.load(resets + token, mask=alive, other=0) != 0
            into = (fresh & counted)[:, None]
            diverted += tl.where(into, back, 0.0)
            back = tl.where(fresh[:, None], 0.0, back)
            if CELL == LSTM:
                diverted_c += tl.where(into, back_c, 0.0)
                back_c = tl.where(fresh[:, None], 0.0, back_c)
            if LEAK:
                kept = tl.where(into, 0.0, kept)
        d_h = tl.where(alive[:, None], back, d_h)
        if CELL == LSTM:
            d_c = tl.where(alive[:, None], back_c, d_c)
        s0 = p0
        if GRADS == 4:
            s1 = p1
            s2 = p2
            s3 = p3
            s4 = p4
        if CELL == LSTM:
            s5 = p5
    store_rows(ends, row, PARTS * n, 0, j, n, live, d_h)
    if CELL == LSTM:
        store_rows(ends, row, PARTS * n, n, j, n, live, d_c)
    if RESETS and KEEP:
        store_rows(reset_grads, row, PARTS * n, 0, j, n, live, diverted)
        if CELL == LSTM:
            store_rows(reset_grads, row, PARTS * n, n, j, n, live, diverted_c)
    if LEAK:
        if CELL == LSTM:
            store_rows(leak, row, PARTS * n, 0, j, n, live, 0.0 * kept)
            store_rows(leak, row, PARTS * n, n, j, n, live, kept)
        else:
            store_rows(leak, row, n, 0, j, n, live, kept)


@triton.jit
def jumps_kernel(
    starts, ends, worst, rows, batch, n, floor, ROWS: tl.constexpr, UNITS: tl.constexpr, PARTS: tl.constexpr
):
    """The largest jump between a stretch's end and the next one's start, relative to the larger of the two there.

    Stretches stand link by link, `batch` to a link. The first part of the state counts as `floor` large at least.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inner = (row >= batch) & (row < rows)
    j = tl.arange(0, UNITS)
    found = 0.0
    for part in tl.static_range(PARTS):
        start = load_rows(starts, row, PARTS * n, part * n, j, n, inner)
        end = load_rows(ends, row - batch, PARTS * n, part * n, j, n, inner)
        scale = tl.maximum(tl.max(tl.maximum(tl.abs(start), tl.abs(end)), 1), floor if part == 0 else 0.0)
        difference = end - start
        jump = tl.max(tl.where(difference == difference, tl.abs(difference), float("inf")), 1)
        relative = jump / tl.maximum(scale, 1e-37)
        relative = tl.where(relative == relative, relative, float("inf"))  # an infinite scale says nothing
        found = tl.maximum(found, tl.max(tl.where(jump > 0, relative, 0.0), 0))
    tl.atomic_max(worst, found)
