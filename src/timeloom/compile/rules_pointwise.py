"""Operations of torch that are pointwise functions of lanes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from timeloom.compile.refusal import NotFused
from timeloom.compile.trace import name_of

if TYPE_CHECKING:
    from timeloom.compile.lanes import Lanes


SOFTPLUS_IS_ITS_ARGUMENT = 20
"""Torch's own threshold: above it, softplus differs from its argument by less than 3e-9."""


def _add(lanes: Lanes, node: fx.Node, a: Any, b: Any, alpha: float = 1) -> Tensor:
    if node.meta["val"].dtype == torch.bool:  # true and true is true
        return _logical_or(lanes, node, a, b)
    return _sum(lanes, "add", a, b, alpha)


def _sub(lanes: Lanes, node: fx.Node, a: Any, b: Any, alpha: float = 1) -> Tensor:
    return _sum(lanes, "sub", a, b, alpha)


def _sum(lanes: Lanes, op: str, a: Any, b: Any, alpha: float) -> Tensor:
    """A sum; constants that are sums of others are added term by term, if these are used elsewhere, too.

    Each term then has one gradient per step, in which uses that cancel do so at once: two sums over all steps would be
    rounded before their small difference is taken.
    """
    if alpha != 1:
        return lanes.pointwise(op, lanes.of(a), lanes.scaled(lanes.of(b), alpha))
    terms = [*_terms(lanes, "add", a), *_terms(lanes, op, b)]
    if len(terms) == 2:
        return lanes.pointwise(op, lanes.of(a), lanes.of(b))
    terms.sort(key=lambda term: lanes.is_constant(term[1]))
    (sign, first), *others = terms
    found = lanes.of(first) if sign == "add" else lanes.pointwise("neg", lanes.of(first))
    for sign, term in others:
        found = lanes.pointwise(sign, found, lanes.of(term))
    return found


def _terms(lanes: Lanes, sign: str, value: Any) -> list[tuple[str, Any]]:
    """The terms of a sum with their signs, expanded as far as a term is used elsewhere, too."""
    if not lanes.is_constant(value) or value.kwargs or name_of(value) not in ("torch.add", "torch.sub"):
        return [(sign, value)]
    left, right = value.args
    if not any(isinstance(term, fx.Node) and len(term.users) > 1 for term in (left, right)):
        return [(sign, value)]
    same = (sign == "add") == (name_of(value) == "torch.add")
    return [*_terms(lanes, sign, left), *_terms(lanes, "add" if same else "sub", right)]


def _rsub(lanes: Lanes, node: fx.Node, a: Any, b: Any, alpha: float = 1) -> Tensor:
    return _sub(lanes, node, b, a, alpha)


def _div(lanes: Lanes, node: fx.Node, a: Any, b: Any, rounding_mode: str | None = None) -> Tensor:
    found = lanes.pointwise("div", lanes.of(a), lanes.of(b))
    if rounding_mode == "trunc":
        raise NotFused("a division that truncates")
    return found if rounding_mode is None else lanes.pointwise("floor", found)


def _square(lanes: Lanes, node: fx.Node, a: Any) -> Tensor:
    return lanes.pointwise("mul", lanes.of(a), lanes.of(a))


def _relu(lanes: Lanes, node: fx.Node, a: Any) -> Tensor:
    return _clamped(lanes, lanes.of(a), 0.0, None, "le")


def _clamp(lanes: Lanes, node: fx.Node, a: Any, min: Any = None, max: Any = None) -> Tensor:
    if isinstance(min, fx.Node) or isinstance(max, fx.Node):
        raise NotFused("torch.clamp by tensors: write torch.maximum and torch.minimum")
    return _clamped(lanes, lanes.of(a), min, max, "lt")


def _clamp_min(lanes: Lanes, node: fx.Node, a: Any, min: Any) -> Tensor:
    return _clamp(lanes, node, a, min)


def _clamp_max(lanes: Lanes, node: fx.Node, a: Any, max: Any) -> Tensor:
    return _clamp(lanes, node, a, None, max)


def _hardtanh(lanes: Lanes, node: fx.Node, a: Any, min: float = -1, max: float = 1) -> Tensor:
    return _clamped(lanes, lanes.of(a), min, max, "le")


def _clamped(lanes: Lanes, value: Tensor, low: float | None, high: float | None, below: str) -> Tensor:
    """A clamp with torch's slopes at the edges: 1 for clamp, 0 for relu, hardtanh and hardsigmoid."""
    if high is not None:
        edge = torch.tensor(lanes.number(float(high)))
        value = lanes.pointwise("select", lanes.pointwise("gt" if below == "lt" else "ge", value, edge), edge, value)
    if low is not None:
        edge = torch.tensor(lanes.number(float(low)))
        value = lanes.pointwise("select", lanes.pointwise(below, value, edge), edge, value)
    return value


def _hardsigmoid(lanes: Lanes, node: fx.Node, a: Any) -> Tensor:
    moved = lanes.pointwise("add", lanes.of(a), lanes.of(3.0))
    return lanes.scaled(_clamped(lanes, moved, 0.0, 6.0, "le"), 1 / 6)


def _hardswish(lanes: Lanes, node: fx.Node, a: Any) -> Tensor:
    return lanes.pointwise("mul", lanes.of(a), _hardsigmoid(lanes, node, a))


def _where(lanes: Lanes, node: fx.Node, condition: Any, a: Any, b: Any) -> Tensor:
    return lanes.pointwise("select", *map(lanes.of, (condition, a, b)))


def _logical_not(lanes: Lanes, node: fx.Node, a: Any) -> Tensor:
    return lanes.pointwise("eq", lanes.of(a), torch.tensor(lanes.number(0.0)))


def _truth(lanes: Lanes, a: Any) -> Tensor:
    return lanes.pointwise("ne", lanes.of(a), torch.tensor(lanes.number(0.0)))


def _logical_and(lanes: Lanes, node: fx.Node, a: Any, b: Any) -> Tensor:
    return lanes.pointwise("mul", _truth(lanes, a), _truth(lanes, b))


def _logical_or(lanes: Lanes, node: fx.Node, a: Any, b: Any) -> Tensor:
    return lanes.pointwise("max", _truth(lanes, a), _truth(lanes, b))


def _lerp(lanes: Lanes, node: fx.Node, a: Any, b: Any, weight: Any) -> Tensor:
    start = lanes.of(a)
    step = lanes.pointwise("mul", lanes.of(weight), lanes.pointwise("sub", lanes.of(b), start))
    return lanes.pointwise("add", start, step)


def _pow(lanes: Lanes, node: fx.Node, a: Any, b: Any) -> Tensor:
    if not isinstance(b, (int, float)):
        raise NotFused("torch.pow by an exponent that is not a number of Python's: write exp(b * log(a))")
    value = lanes.of(a)
    if b in (2, 3):
        square = lanes.pointwise("mul", value, value)
        return square if b == 2 else lanes.pointwise("mul", square, value)
    named = {0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}.get(b)
    return lanes.pointwise(named, value) if named else lanes.pointwise("pow", value, lanes.of(float(b)))


def _softplus(lanes: Lanes, node: fx.Node, a: Any, beta: float = 1, threshold: float = 20) -> Tensor:
    value = lanes.of(a)
    inner = value if beta == 1 else lanes.scaled(value, beta)
    found = lanes.pointwise("softplus", inner)
    found = found if beta == 1 else lanes.scaled(found, 1 / beta)
    if threshold >= SOFTPLUS_IS_ITS_ARGUMENT:
        return found
    linear = lanes.pointwise("gt", inner, torch.tensor(lanes.number(float(threshold))))
    return lanes.pointwise("select", linear, value, found)


def _log_sigmoid_forward(lanes: Lanes, node: fx.Node, a: Any) -> tuple[Tensor, Tensor]:
    found = lanes.pointwise("neg", lanes.pointwise("softplus", lanes.pointwise("neg", lanes.of(a))))
    return found, found


def _mish(lanes: Lanes, node: fx.Node, a: Any) -> Tensor:
    value = lanes.of(a)
    return lanes.pointwise("mul", value, lanes.pointwise("tanh", lanes.pointwise("softplus", value)))


def _logaddexp(lanes: Lanes, node: fx.Node, a: Any, b: Any) -> Tensor:
    left, right = lanes.of(a), lanes.of(b)
    apart = lanes.pointwise("neg", lanes.pointwise("abs", lanes.pointwise("sub", left, right)))
    small = lanes.pointwise("log1p", lanes.pointwise("exp", apart))
    return lanes.pointwise("add", lanes.pointwise("max", left, right), small)


def _elu(lanes: Lanes, node: fx.Node, a: Any, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Tensor:
    value, zero = lanes.of(a), torch.tensor(lanes.number(0.0))
    above = lanes.pointwise("gt", value, zero)
    below = lanes.pointwise("select", above, zero, value)  # what the exponential never sees cannot overflow
    curved = lanes.scaled(lanes.pointwise("expm1", lanes.scaled(below, input_scale)), alpha * scale)
    return lanes.pointwise("select", above, lanes.scaled(value, scale), curved)


def _celu(lanes: Lanes, node: fx.Node, a: Any, alpha: float = 1) -> Tensor:
    return _elu(lanes, node, a, alpha, 1, 1 / alpha)


def _exp2(lanes: Lanes, node: fx.Node, a: Any) -> Tensor:
    return lanes.pointwise("exp", lanes.scaled(lanes.of(a), math.log(2)))


def _log2(lanes: Lanes, node: fx.Node, a: Any) -> Tensor:
    return lanes.scaled(lanes.pointwise("log", lanes.of(a)), 1 / math.log(2))


def _log10(lanes: Lanes, node: fx.Node, a: Any) -> Tensor:
    return lanes.scaled(lanes.pointwise("log", lanes.of(a)), 1 / math.log(10))


def _prelu_kernel(lanes: Lanes, node: fx.Node, a: Any, weight: Any) -> Tensor:
    value = lanes.of(a)
    below = lanes.pointwise("mul", value, lanes.of(weight))
    return lanes.pointwise("select", lanes.pointwise("gt", value, torch.tensor(lanes.number(0.0))), value, below)


def _full_like(lanes: Lanes, node: fx.Node, a: Any, fill: float, **_: Any) -> Tensor:
    return torch.tensor(lanes.number(float(fill))).expand(node.meta["val"].shape)


def _zeros_like(lanes: Lanes, node: fx.Node, a: Any, **_: Any) -> Tensor:
    return torch.tensor(lanes.number(0.0)).expand(node.meta["val"].shape)


def _ones_like(lanes: Lanes, node: fx.Node, a: Any, **_: Any) -> Tensor:
    return torch.tensor(lanes.number(1.0)).expand(node.meta["val"].shape)


def _new_zeros(lanes: Lanes, node: fx.Node, a: Any, size: Any, **_: Any) -> Tensor:
    return torch.tensor(lanes.number(0.0)).expand(node.meta["val"].shape)


def _new_ones(lanes: Lanes, node: fx.Node, a: Any, size: Any, **_: Any) -> Tensor:
    return torch.tensor(lanes.number(1.0)).expand(node.meta["val"].shape)


def _new_full(lanes: Lanes, node: fx.Node, a: Any, size: Any, fill: float, **_: Any) -> Tensor:
    return torch.tensor(lanes.number(float(fill))).expand(node.meta["val"].shape)


RULES: dict[str, Callable[..., Any]] = {
    "add": _add,
    "sub": _sub,
    "rsub": _rsub,
    "div": _div,
    "square": _square,
    "relu": _relu,
    "clamp": _clamp,
    "clamp_min": _clamp_min,
    "clamp_max": _clamp_max,
    "hardtanh": _hardtanh,
    "hardsigmoid": _hardsigmoid,
    "hardswish": _hardswish,
    "where": _where,
    "logical_not": _logical_not,
    "logical_and": _logical_and,
    "logical_or": _logical_or,
    "lerp": _lerp,
    "pow": _pow,
    "softplus": _softplus,
    "log_sigmoid_forward": _log_sigmoid_forward,
    "mish": _mish,
    "logaddexp": _logaddexp,
    "elu": _elu,
    "celu": _celu,
    "exp2": _exp2,
    "log2": _log2,
    "log10": _log10,
    "_prelu_kernel": _prelu_kernel,
    "full_like": _full_like,
    "zeros_like": _zeros_like,
    "ones_like": _ones_like,
    "new_zeros": _new_zeros,
    "new_ones": _new_ones,
    "new_full": _new_full,
    "bitwise_not": _logical_not,
    "bitwise_and": _logical_and,
    "bitwise_or": _logical_or,
}
"""By name of the operation: `rule(lanes, node, *args, **kwargs)` returns the lanes of its result."""
