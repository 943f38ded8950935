# mypy: ignore-errors
# ruff: noqa: SIM109 (Triton compiles these branches away; its language has no `in`)
"""One step of all stretches of a wide GRU, LSTM or RNN in Triton: more weights than a multiprocessor holds.

A launch is a step; what the next one reads of all units travels through a buffer. A program makes UNITS units of ROWS
stretches: a product with the recurrent weights, DEPTH deep at a time, and the gates behind it; or the gates alone,
where the products are READY. Layouts and twin are those of `gpu_kernels.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from timeloom.kernels.gpu.gates import (
    GRU,
    LSTM,
    advance,
    load_gate,
    load_rows,
    load_slopes,
    load_state,
    pull,
    store_gate_grads,
    store_rows,
    store_slopes,
    store_state,
)
from timeloom.kernels.gpu.sweep_kernels import load_inputs


@triton.jit
def store_operand(base, row, width, offset, j, n, live, value):
    """As the matrix units are to see it, so that nothing stands between memory and them in the next step."""
    store_rows(base, row, width, offset, j, n, live, value.to(base.dtype.element_ty))


@triton.jit(do_not_specialize=["lead", "step"])
def forward_step(
    inputs, weights, units, initial, starts, ends, decay, h_states, c_states, slopes, state, operand, following,
    following_operand, ready, seq, begin, end, resets, rows, batch, n, lead, step,
    CELL: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr, DEPTH: tl.constexpr, LED: tl.constexpr,
    KEEP: tl.constexpr, TAPE: tl.constexpr, DECAY: tl.constexpr, RESETS: tl.constexpr, READY: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """From `state` (R, S) to `following`: the step that lies `step` behind each stretch's entry, `lead` early.

    `operand` (R, n) is h as the matrix units are to see it: in the weights' dtype.
    `starts` receives the state at the begin of a stretch that is led in, `ends` the one at its end; `decay` is
    multiplied by what the step keeps.
    """
    PARTS: tl.constexpr = 2 if CELL == LSTM else 1
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    j = tl.program_id(1) * UNITS + tl.arange(0, UNITS)
    b = tl.load(seq + row, mask=live, other=0)
    first = tl.load(begin + row, mask=live, other=0)
    last = tl.load(end + row, mask=live, other=0)
    t = first - lead + step
    alive = live & (t >= 0) & (t < last)
    counted = alive & (t >= first)
    token = t * batch + b
    h, c = load_state(state, row, n, j, live, CELL)
    if LED:
        store_state(starts, row, n, j, alive & (t == first), h, c, CELL)
    if RESETS:
        fresh = tl.load(resets + token, mask=alive, other=0) != 0
        origin, origin_c = load_state(initial, b, n, j, fresh, CELL)
        h = tl.where(fresh[:, None], origin, h)
        c = tl.where(fresh[:, None], origin_c, c)
    u0, u1, u2, u3 = load_inputs(inputs, token, j, n, alive, CELL)
    if READY:
        p0, p1, p2, p3 = load_inputs(ready, row, j, n, live, CELL)
    else:
        p0 = tl.zeros((ROWS, UNITS), tl.float32)
        p1 = tl.zeros((ROWS, UNITS), tl.float32)
        p2 = tl.zeros((ROWS, UNITS), tl.float32)
        p3 = tl.zeros((ROWS, UNITS), tl.float32)
        for depth in range(0, n, DEPTH):
            k = depth + tl.arange(0, DEPTH)
            a = tl.load(operand + row[:, None] * n + k[None, :], mask=live[:, None] & (k[None, :] < n), other=0.0)
            if RESETS:
                origin = load_rows(initial, b, PARTS * n, 0, k, n, fresh)
                a = tl.where(fresh[:, None], origin.to(a.dtype), a)
            p0 = tl.dot(a, load_gate(weights, 0, n, k, j, False), p0, input_precision=PRECISION)
            if CELL == GRU or CELL == LSTM:
                p1 = tl.dot(a, load_gate(weights, 1, n, k, j, False), p1, input_precision=PRECISION)
                p2 = tl.dot(a, load_gate(weights, 2, n, k, j, False), p2, input_precision=PRECISION)
            if CELL == LSTM:
                p3 = tl.dot(a, load_gate(weights, 3, n, k, j, False), p3, input_precision=PRECISION)
    unit = tl.load(units + j, mask=j < n, other=0.0).to(tl.float32)[None, :]
    new, new_c, keep = advance(u0, u1, u2, u3, p0, p1, p2, p3, unit, h, c, CELL)
    if TAPE:
        store_slopes(slopes, token, j, n, counted, u0, u1, u2, u3, p0, p1, p2, p3, unit, h, c, CELL)
    if DECAY:
        kept = load_rows(decay, row, PARTS * n, (PARTS - 1) * n, j, n, counted) * keep
        if RESETS:
            kept = tl.where(fresh[:, None], 0.0, kept)
        store_rows(decay, row, PARTS * n, (PARTS - 1) * n, j, n, counted, kept)
    new = tl.where(alive[:, None], new, h)
    new_c = tl.where(alive[:, None], new_c, c)
    store_state(following, row, n, j, live, new, new_c, CELL)
    store_operand(following_operand, row, n, 0, j, n, live, new)
    store_state(ends, row, n, j, alive & (t == last - 1), new, new_c, CELL)
    if KEEP:
        store_rows(h_states, token + batch, n, 0, j, n, counted, new)
        if CELL == LSTM:
            store_rows(c_states, token + batch, n, 0, j, n, counted, new_c)


@triton.jit(do_not_specialize=["lead", "step"])
def adjoint_step(
    slopes, across, units, final, starts, ends, decay, incoming, gate_grads, reset_grads, gates, following, passing,
    ready, seq, begin, end, lengths, resets, rows, batch, n, lead, step,
    CELL: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr, DEPTH: tl.constexpr, LED: tl.constexpr,
    KEEP: tl.constexpr, INCOMING: tl.constexpr, DECAY: tl.constexpr, RESETS: tl.constexpr, PRODUCT: tl.constexpr,
    READY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """From the gate gradients of one step that go through h, `gates` (R, gates · n), to those of the step before,
    `following`.

    `gates` and `across` (n, gates · n), the recurrent weights transposed, are as the matrix units are to see them;
    `passing` (R, S) is what passes by the gates. The first launch has no product: its stretches are entered. The last
    one finds nothing but `ends`.
    """
    GATES: tl.constexpr = 3 if CELL == GRU else (4 if CELL == LSTM else 1)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    j = tl.program_id(1) * UNITS + tl.arange(0, UNITS)
    b = tl.load(seq + row, mask=live, other=0)
    first = tl.load(begin + row, mask=live, other=0)
    last = tl.load(end + row, mask=live, other=0)
    t = last + lead - 1 - step
    if LED:
        length = tl.load(lengths + b, mask=live, other=0)
        enter = tl.minimum(last + lead, length)
        entering = live & (t == enter - 1)
        if final is None:
            d_h = tl.zeros((ROWS, UNITS), tl.float32)
            d_c = d_h
        else:
            d_h, d_c = load_state(final, b, n, j, entering & (enter == length), CELL)
    else:
        enter = last
        entering = live & (t == enter - 1)
        d_h, d_c = load_state(starts, row, n, j, entering, CELL)
    token = t * batch + b
    alive = live & (t < enter) & (t >= first)
    counted = alive & (t < last)
    s0, s1, s2, s3, s4, s5 = load_slopes(slopes, token, j, n, alive, CELL)  # before the product: meanwhile they arrive
    if INCOMING:
        direct = load_rows(incoming, token, n, 0, j, n, alive)
    if PRODUCT:
        crossed = live & (t + 1 < enter) & (t + 1 >= first)
        back, back_c = load_state(passing, row, n, j, crossed, CELL)
        if READY:
            back += load_rows(ready, row, n, 0, j, n, crossed)
        else:
            # Its own sum: see `adjoint_kernel`.
            through = tl.zeros((ROWS, UNITS), tl.float32)
            for depth in range(0, GATES * n, DEPTH):
                k = depth + tl.arange(0, DEPTH)
                at = row[:, None] * (GATES * n) + k[None, :]
                a = tl.load(gates + at, mask=crossed[:, None] & (k[None, :] < GATES * n), other=0.0)
                at = j[None, :] * (GATES * n) + k[:, None]
                w = tl.load(across + at, mask=(k[:, None] < GATES * n) & (j[None, :] < n), other=0.0)
                through = tl.dot(a, w, through, input_precision=PRECISION)
            back += through
        if RESETS:
            fresh = tl.load(resets + token + batch, mask=crossed, other=0) != 0
            if KEEP:
                into = fresh & (t + 1 < last)
                before, before_c = load_state(reset_grads, row, n, j, into, CELL)
                store_state(reset_grads, row, n, j, into, before + back, before_c + back_c, CELL)
            back = tl.where(fresh[:, None], 0.0, back)
            back_c = tl.where(fresh[:, None], 0.0, back_c)
        store_state(ends, row, n, j, crossed & (t + 1 == first), back, back_c, CELL)
        d_h = tl.where(entering[:, None], d_h, back)
        d_c = tl.where(entering[:, None], d_c, back_c)
    if LED:
        store_state(starts, row, n, j, alive & (t == last - 1), d_h, d_c, CELL)
    grad = d_h
    if INCOMING:
        grad += direct
    unit = tl.load(units + j, mask=j < n, other=0.0).to(tl.float32)[None, :]
    g0, g1, g2, g3, back, back_c, keep = pull(grad, d_c, s0, s1, s2, s3, s4, s5, unit, CELL)
    store_operand(following, row, GATES * n, 0, j, n, alive, g0)
    if GATES >= 3:
        store_operand(following, row, GATES * n, n, j, n, alive, g1)
        store_operand(following, row, GATES * n, 2 * n, j, n, alive, g3 if CELL == GRU else g2)
    if GATES == 4:
        store_operand(following, row, GATES * n, 3 * n, j, n, alive, g3)
    store_state(passing, row, n, j, alive, back, back_c, CELL)
    if KEEP:
        store_gate_grads(gate_grads, token, j, n, counted, g0, g1, g2, g3, CELL)
    if DECAY:
        PARTS: tl.constexpr = 2 if CELL == LSTM else 1
        kept = load_rows(decay, row, PARTS * n, (PARTS - 1) * n, j, n, counted) * keep
        if RESETS:
            fresh = tl.load(resets + token, mask=counted, other=0) != 0
            kept = tl.where(fresh[:, None], 0.0, kept)
        store_rows(decay, row, PARTS * n, (PARTS - 1) * n, j, n, counted, kept)
