"""Gradients of a layer's weights and biases: outer products of gate gradients, summed over all steps."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from timeloom.cells.base import sum_outer
from timeloom.kernels.cuda import products

MOST_AT_ONCE = 2**20
"""Elements of states and inputs up to which the gradients of all weights are one product."""
NARROW, NARROW_ROWS = 40, 2**18
"""Columns of states and inputs together up to which that is the fastest, and rows up to which that was measured, on an
H200: 141 µs in place of 236 for a GRU of 16 units, as many inputs and 2^18 rows; 323 in place of 269 for 32 of each."""


class WeightSums(NamedTuple):
    """Gradients of `w_ih` and `w_hh`, and the sum of gate gradients `(G,)` over all steps if there are biases."""

    w_ih: Tensor
    w_hh: Tensor
    gates: Tensor | None


def weight_sums(kernel: str, gate_grads: Tensor, x: Tensor, before: Tensor, biased: bool) -> WeightSums:
    """The sums for gate gradients `(N, G)`, inputs `(N, D)` and operands of the recurrent product `(N, n)`."""
    narrow = before.shape[1] + x.shape[1] <= NARROW and len(x) <= NARROW_ROWS
    at_once = narrow or before.numel() + x.numel() <= MOST_AT_ONCE
    return (_one_product if at_once else _several)(kernel, gate_grads, x, before, biased)


def input_gates(kernel: str, gate_grads: Tensor) -> Tensor:
    """The gradients of projected inputs: a GRU's fourth gate gradient is of the recurrent product alone."""
    return gate_grads[:, : 3 * gate_grads.shape[1] // 4] if kernel == "gru" else gate_grads


def recurrent_gates(kernel: str, by_gate: Tensor) -> Tensor:
    """The rows that belong to `w_hh`: a GRU's third gate gradient is of its inputs alone."""
    if kernel != "gru":
        return by_gate
    n = len(by_gate) // 4
    return torch.cat([by_gate[: 2 * n], by_gate[3 * n :]])


def _several(kernel: str, gate_grads: Tensor, x: Tensor, before: Tensor, biased: bool) -> WeightSums:
    n, grads, of_h = before.shape[1], products.Rows(gate_grads), products.Rows(before)
    total, d_u = grads.sum() if biased else None, input_gates(kernel, gate_grads)
    w_hh = gate_grads.new_empty(d_u.shape[1], n)
    if kernel == "gru":
        products.sum_outer(grads, of_h, 0, 2 * n, out=w_hh[: 2 * n])
        products.sum_outer(grads, of_h, 3 * n, 4 * n, out=w_hh[2 * n :])
    else:
        products.sum_outer(grads, of_h, 0, len(w_hh), out=w_hh)
    return WeightSums(products.sum_outer(grads, products.Rows(x), 0, d_u.shape[1]), w_hh, total)


def _one_product(kernel: str, gate_grads: Tensor, x: Tensor, before: Tensor, biased: bool) -> WeightSums:
    """Concatenating few numbers takes less time than two more products and a sum."""
    values = [before, x, x.new_ones(len(x), 1)] if biased else [before, x]
    by_h, by_x, *by_one = sum_outer(gate_grads, torch.cat(values, 1)).split([part.shape[1] for part in values], 1)
    w_ih = by_x[: input_gates(kernel, gate_grads).shape[1]].contiguous()
    total = by_one[0].squeeze(1).contiguous() if by_one else None
    return WeightSums(w_ih, recurrent_gates(kernel, by_h).contiguous(), total)
