"""Operations of torch that are products of lanes with constant matrices."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from timeloom.compile.refusal import ROWS_MIX, NotFused
from timeloom.compile.sources import ROW

if TYPE_CHECKING:
    from timeloom.compile.lanes import Lanes


def _mm(lanes: Lanes, node: fx.Node, a: Any, b: Any) -> Tensor:
    return product(lanes, lanes.of(a).unsqueeze(0), lanes.of(b).unsqueeze(0)).squeeze(0)


def _bmm(lanes: Lanes, node: fx.Node, a: Any, b: Any) -> Tensor:
    return product(lanes, lanes.of(a), lanes.of(b))


def _mv(lanes: Lanes, node: fx.Node, a: Any, b: Any) -> Tensor:
    return product(lanes, lanes.of(a).unsqueeze(0), lanes.of(b).view(1, -1, 1)).view(-1)


def _addmm(lanes: Lanes, node: fx.Node, c: Any, a: Any, b: Any, beta: float = 1, alpha: float = 1) -> Tensor:
    return _added(lanes, c, _mm(lanes, node, a, b), beta, alpha)


def _baddbmm(lanes: Lanes, node: fx.Node, c: Any, a: Any, b: Any, beta: float = 1, alpha: float = 1) -> Tensor:
    return _added(lanes, c, _bmm(lanes, node, a, b), beta, alpha)


def _added(lanes: Lanes, c: Any, product: Tensor, beta: float, alpha: float) -> Tensor:
    product = product if alpha == 1 else lanes.scaled(product, alpha)
    added = lanes.of(c)
    return lanes.pointwise("add", added if beta == 1 else lanes.scaled(added, beta), product)


def product(lanes: Lanes, a: Tensor, b: Tensor) -> Tensor:
    """`a @ b` of `(G, M, K)` and `(G, K, P)`: one of them must be constant, and rows must not mix."""
    if bool((b < ROW).all()):
        return _by_constant(lanes, a, b.transpose(1, 2))
    if bool((a < ROW).all()):
        return _by_constant(lanes, b.transpose(1, 2), a).transpose(1, 2)
    raise NotFused(
        "a product of two values that both depend on the state or on x: only matrices that are the same "
        "for all rows and steps have a kernel"
    )


def _by_constant(lanes: Lanes, value: Tensor, weights: Tensor) -> Tensor:
    """`out[g, q, j] = Σ_k value[g, q, k] weights[g, j, k]`, where each vector `value[g, q]` belongs to one row."""
    groups, vectors, _ = value.shape
    rows = value.amax(-1) // ROW
    if bool(((value // ROW != rows.unsqueeze(-1)) & (value >= ROW)).any()):
        raise NotFused(f"{ROWS_MIX}: a product sums over rows")
    rows, value = rows.flatten(), value.flatten(0, 1) % ROW
    weights = weights.unsqueeze(1).expand(-1, vectors, -1, -1).flatten(0, 1)
    if len(rows) % lanes.rows or bool(
        (torch.bincount(rows, minlength=lanes.rows + 1)[1:] != len(rows) // lanes.rows).any()
    ):
        raise NotFused(f"{ROWS_MIX}: a product whose rows are not those of the state")
    order = torch.argsort(rows, stable=True).view(lanes.rows, -1)  # (rows, blocks)
    blocks, outputs = order.shape[1], weights.shape[1]
    operand, matrix = value[order[0]], weights[order[0]]
    if bool((value[order] != operand).any()) or bool((weights[order] != matrix).any()):
        raise NotFused("a product whose matrices differ from row to row")
    if blocks > 1 and bool((operand == operand[:1]).all()):  # heads that all read the same units are one product
        operand, matrix = operand[:1], matrix.flatten(0, 1).unsqueeze(0)
    base = lanes.make(blocks * outputs, "product", matrix, (operand,))
    ids = torch.empty(len(rows), outputs, dtype=torch.int64)
    made = base + torch.arange(blocks * outputs).view(blocks, outputs)
    ids[order] = made + (torch.arange(1, lanes.rows + 1) * ROW).view(-1, 1, 1)
    return ids.view(groups, vectors, outputs)


RULES: dict[str, Callable[..., Any]] = {
    "mm": _mm,
    "bmm": _bmm,
    "mv": _mv,
    "addmm": _addmm,
    "baddbmm": _baddbmm,
}
"""As in `rules_pointwise`."""
