"""Operations of torch that are sums of lanes, and norms made of such sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from timeloom.compile.refusal import ROWS_MIX, NotFused
from timeloom.compile.sources import ROW

if TYPE_CHECKING:
    from timeloom.compile.lanes import Lanes


def total(lanes: Lanes, value: Tensor, dims: Any, keepdim: bool) -> tuple[Tensor, int]:
    """Sums over these dimensions, and the number of terms of each."""
    dims = range(value.dim()) if dims is None or dims == [] else [dims] if isinstance(dims, int) else dims
    summed = sorted(dim % value.dim() for dim in dims)
    row = lanes.row_dim(value // ROW)
    if row in summed:
        raise NotFused(f"{ROWS_MIX}: a reduction over dimension 0, that of the rows")
    kept = [dim for dim in range(value.dim()) if dim not in summed]
    moved = value.permute(*kept, *summed)
    terms = moved.flatten(len(kept))
    at = kept.index(row)
    operand = terms.select(at, 0).reshape(-1, terms.shape[-1]) % ROW
    ids = lanes.fresh_rows(terms.shape[:-1], at, "total", None, (operand,))
    if keepdim:
        for dim in summed:
            ids = ids.unsqueeze(dim)
    return ids, terms.shape[-1]


def _sum(lanes: Lanes, node: fx.Node, a: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
    return total(lanes, lanes.of(a), dim, keepdim)[0]


def _mean(lanes: Lanes, node: fx.Node, a: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
    found, terms = total(lanes, lanes.of(a), dim, keepdim)
    return lanes.scaled(found, 1 / terms)


def _variance(lanes: Lanes, value: Tensor, dim: Any, correction: Any, keepdim: bool) -> tuple[Tensor, Tensor]:
    whole, terms = total(lanes, value, dim, True)
    mean = lanes.scaled(whole, 1 / terms)
    apart = lanes.pointwise("sub", value, mean)
    squares, _ = total(lanes, lanes.pointwise("mul", apart, apart), dim, keepdim)
    correction = 1 if correction is None else correction
    return lanes.scaled(squares, 1 / max(terms - correction, 0) if terms > correction else float("nan")), (
        mean if keepdim else lanes.scaled(total(lanes, value, dim, False)[0], 1 / terms)
    )


def _var_mean(
    lanes: Lanes, node: fx.Node, a: Any, dim: Any = None, correction: Any = None, keepdim: bool = False
) -> Any:
    return _variance(lanes, lanes.of(a), dim, correction, keepdim)


def _var(lanes: Lanes, node: fx.Node, a: Any, dim: Any = None, correction: Any = None, keepdim: bool = False) -> Tensor:
    return _variance(lanes, lanes.of(a), dim, correction, keepdim)[0]


def _std(lanes: Lanes, node: fx.Node, a: Any, dim: Any = None, correction: Any = None, keepdim: bool = False) -> Tensor:
    """With torch's gradient of a row that is the same number everywhere: zero, where that of the root is infinite."""
    variance, zero, one = _variance(lanes, lanes.of(a), dim, correction, keepdim)[0], lanes.of(0.0), lanes.of(1.0)
    none = lanes.pointwise("eq", variance, zero)
    root = lanes.pointwise("sqrt", lanes.pointwise("select", none, one, variance))
    return lanes.pointwise("select", none, zero, root)


def _native_layer_norm(
    lanes: Lanes, node: fx.Node, a: Any, shape: Sequence[int], weight: Any, bias: Any, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Torch's layer norm, which also returns the mean and 1 / standard deviation."""
    variance, mean = _variance(lanes, lanes.of(a), _last(shape), 0, True)
    scale = lanes.pointwise("rsqrt", lanes.pointwise("add", variance, lanes.of(eps)))
    apart = lanes.pointwise("sub", lanes.of(a), mean)
    return _affine(lanes, lanes.pointwise("mul", apart, scale), weight, bias), mean, scale


def _fused_rms_norm(
    lanes: Lanes, node: fx.Node, a: Any, shape: Sequence[int], weight: Any, eps: float | None
) -> tuple[Tensor, Tensor]:
    """Torch's RMS norm, which also returns 1 / root of the mean square."""
    value, least = lanes.of(a), torch.finfo(node.meta["val"][0].dtype).eps if eps is None else eps
    squares, terms = total(lanes, lanes.pointwise("mul", value, value), _last(shape), True)
    scale = lanes.pointwise("rsqrt", lanes.pointwise("add", lanes.scaled(squares, 1 / terms), lanes.of(least)))
    return _affine(lanes, lanes.pointwise("mul", value, scale), weight, None), scale


def _native_group_norm(
    lanes: Lanes, node: fx.Node, a: Any, weight: Any, bias: Any, rows: int, channels: int, each: int, groups: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Torch's group norm, which also returns the mean and 1 / standard deviation of every group. Rows come first."""
    value = lanes.of(a)
    grouped = value.reshape(rows, groups, -1)
    variance, mean = _variance(lanes, grouped, -1, 0, True)
    scale = lanes.pointwise("rsqrt", lanes.pointwise("add", variance, lanes.of(eps)))
    found = lanes.pointwise("mul", lanes.pointwise("sub", grouped, mean), scale).reshape(rows, channels, each)
    weight, bias = (None if one is None else lanes.of(one).unsqueeze(-1) for one in (weight, bias))
    found = found if weight is None else lanes.pointwise("mul", found, weight)
    found = found if bias is None else lanes.pointwise("add", found, bias)
    return found.reshape(value.shape), mean.squeeze(-1), scale.squeeze(-1)


def _last(shape: Sequence[int]) -> list[int]:
    return list(range(-len(shape), 0))


def _affine(lanes: Lanes, value: Tensor, weight: Any, bias: Any) -> Tensor:
    value = value if weight is None else lanes.pointwise("mul", value, lanes.of(weight))
    return value if bias is None else lanes.pointwise("add", value, lanes.of(bias))


RULES: dict[str, Callable[..., Any]] = {
    "sum": _sum,
    "mean": _mean,
    "var_mean": _var_mean,
    "var": _var,
    "std": _std,
    "native_layer_norm": _native_layer_norm,
    "native_group_norm": _native_group_norm,
    "_fused_rms_norm": _fused_rms_norm,
}
"""As in `rules_pointwise`."""
