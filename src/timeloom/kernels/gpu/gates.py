# mypy: ignore-errors
# ruff: noqa: SIM108, SIM109 (Triton compiles these branches away; its language has no `in`)
"""The cells' mathematics in Triton, tile by tile, and how tiles are read and written: what all kernels share.

A cell of fewer gates than four is given its first one in place of those that it does not have.
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
def advance(u0, u1, u2, u3, p0, p1, p2, p3, unit, h, c, CELL: tl.constexpr):
    """The new h and c, and what a step keeps, from inputs u and products p of h with the recurrent weights."""
    new_c = c
    if CELL == GRU:
        reset = tl.sigmoid(u0 + p0)
        keep = tl.sigmoid(u1 + p1)
        candidate = tanh(u2 + reset * (unit + p2))
        new = candidate + keep * (h - candidate)
    elif CELL == LSTM:
        write = tl.sigmoid(u0 + p0)
        keep = tl.sigmoid(u1 + p1)
        candidate = tanh(u2 + p2)
        output = tl.sigmoid(u3 + p3)
        new_c = keep * c + write * candidate
        new = output * tanh(new_c)
    else:
        argument = u0 + p0
        if CELL == RNN_TANH:
            new = tanh(argument)
            keep = (1 - new * new) * unit
        else:
            new = tl.where(argument <= 0, 0.0, argument)  # not a number stays one
            keep = tl.where(new > 0, unit, 0.0)
    return new, new_c, keep


@triton.jit
def store_slopes(slopes, token, j, n, live, u0, u1, u2, u3, p0, p1, p2, p3, unit, h, c, CELL: tl.constexpr):
    """Derivatives of a step's new state by its gates' arguments: all that the adjoint needs of it.

    GRU: by reset, update, candidate, inner product, and what passes by (the update gate). LSTM: of c by h, then by
    input, forget and candidate gate, of h by the output gate, and what passes by (the forget gate). RNN: by the
    argument.
    """
    if CELL == GRU:
        reset = tl.sigmoid(u0 + p0)
        update = tl.sigmoid(u1 + p1)
        inner = unit + p2
        candidate = tanh(u2 + reset * inner)
        by_candidate = (1 - update) * (1 - candidate * candidate)
        store_rows(slopes, token, 5 * n, 0, j, n, live, by_candidate * inner * reset * (1 - reset))
        store_rows(slopes, token, 5 * n, n, j, n, live, (h - candidate) * update * (1 - update))
        store_rows(slopes, token, 5 * n, 2 * n, j, n, live, by_candidate)
        store_rows(slopes, token, 5 * n, 3 * n, j, n, live, by_candidate * reset)
        store_rows(slopes, token, 5 * n, 4 * n, j, n, live, update)
    elif CELL == LSTM:
        write = tl.sigmoid(u0 + p0)
        forget = tl.sigmoid(u1 + p1)
        candidate = tanh(u2 + p2)
        output = tl.sigmoid(u3 + p3)
        squashed = tanh(forget * c + write * candidate)
        store_rows(slopes, token, 6 * n, 0, j, n, live, output * (1 - squashed * squashed))
        store_rows(slopes, token, 6 * n, n, j, n, live, candidate * write * (1 - write))
        store_rows(slopes, token, 6 * n, 2 * n, j, n, live, c * forget * (1 - forget))
        store_rows(slopes, token, 6 * n, 3 * n, j, n, live, write * (1 - candidate * candidate))
        store_rows(slopes, token, 6 * n, 4 * n, j, n, live, squashed * output * (1 - output))
        store_rows(slopes, token, 6 * n, 5 * n, j, n, live, forget)
    else:
        argument = u0 + p0
        if CELL == RNN_TANH:
            new = tanh(argument)
            slope = 1 - new * new
        else:
            slope = tl.where(argument > 0, 1.0, 0.0)
        store_rows(slopes, token, n, 0, j, n, live, slope)


@triton.jit
def load_slopes(slopes, token, j, n, live, CELL: tl.constexpr):
    """What `store_slopes` wrote; the first in place of those that a cell does not have."""
    WIDTH: tl.constexpr = 5 if CELL == GRU else (6 if CELL == LSTM else 1)
    s0 = load_rows(slopes, token, WIDTH * n, 0, j, n, live)
    s1 = s0
    s2 = s0
    s3 = s0
    s4 = s0
    s5 = s0
    if WIDTH > 1:
        s1 = load_rows(slopes, token, WIDTH * n, n, j, n, live)
        s2 = load_rows(slopes, token, WIDTH * n, 2 * n, j, n, live)
        s3 = load_rows(slopes, token, WIDTH * n, 3 * n, j, n, live)
        s4 = load_rows(slopes, token, WIDTH * n, 4 * n, j, n, live)
    if CELL == LSTM:
        s5 = load_rows(slopes, token, WIDTH * n, 5 * n, j, n, live)
    return s0, s1, s2, s3, s4, s5


@triton.jit
def pull(grad, d_c, s0, s1, s2, s3, s4, s5, unit, CELL: tl.constexpr):
    """Back through a step: gate gradients, what passes by them to the h and the c before, and what a step keeps.

    For a GRU the gate gradients are of reset, update, candidate and inner product, for an LSTM of its four gates.
    """
    into = grad
    back = 0.0 * grad
    back_c = d_c
    keep = s4
    if CELL == GRU:
        back = grad * s4
    elif CELL == LSTM:
        into = d_c + grad * s0
        s0 = s1
        s1 = s2
        s2 = s3
        s3 = s4
        back_c = into * s5
        keep = s5
    else:
        keep = s0 * unit
    g3 = grad * s3
    return into * s0, into * s1, into * s2, g3, back, back_c, keep


@triton.jit
def store_gate_grads(gate_grads, token, j, n, live, g0, g1, g2, g3, CELL: tl.constexpr):
    GRADS: tl.constexpr = 4 if CELL == GRU or CELL == LSTM else 1
    store_rows(gate_grads, token, GRADS * n, 0, j, n, live, g0)
    if GRADS == 4:
        store_rows(gate_grads, token, GRADS * n, n, j, n, live, g1)
        store_rows(gate_grads, token, GRADS * n, 2 * n, j, n, live, g2)
        store_rows(gate_grads, token, GRADS * n, 3 * n, j, n, live, g3)


@triton.jit
def load_state(base, row, n, j, live, CELL: tl.constexpr):
    """h and c of rows `(·, S)`; h twice where there is no c."""
    PARTS: tl.constexpr = 2 if CELL == LSTM else 1
    h = load_rows(base, row, PARTS * n, 0, j, n, live)
    c = h
    if CELL == LSTM:
        c = load_rows(base, row, PARTS * n, n, j, n, live)
    return h, c


@triton.jit
def store_state(base, row, n, j, live, h, c, CELL: tl.constexpr):
    PARTS: tl.constexpr = 2 if CELL == LSTM else 1
    store_rows(base, row, PARTS * n, 0, j, n, live, h)
    if CELL == LSTM:
        store_rows(base, row, PARTS * n, n, j, n, live, c)


@triton.jit
def store_decay(decay, row, n, j, live, kept, CELL: tl.constexpr):
    """What stretches keep of their start: of an LSTM's state, the c alone."""
    store_state(decay, row, n, j, live, 0.0 * kept if CELL == LSTM else kept, kept, CELL)
