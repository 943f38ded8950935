"""The pointwise functions of generated code, each in Python, in torch and in C.

Truth values are the numbers 1 and 0. In C the type `V` is a vector of units on a CPU and one float on a GPU; what is
not a C operator is a function `v_…(V …)` that the device's header defines.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Function:
    """One pointwise function of V's."""

    of: Callable[..., float]
    """The function on Python numbers, for constants."""
    on_tensors: Callable[..., Tensor]
    c: str
    """C text; `{0}`, `{1}` … are the arguments."""


def _unary(name: str, of: Callable[[float], float], on_tensors: Callable[..., Tensor]) -> Function:
    return Function(of, on_tensors, f"v_{name}({{0}})")


def _comparison(symbol: str, name: str, of: Callable[[float, float], bool]) -> Function:
    compare = getattr(torch, name)
    return Function(
        lambda a, b: float(of(a, b)), lambda a, b: compare(a, b).to(a.dtype), f"v_where({{0}} {symbol} {{1}})"
    )


def _guarded(function: Callable[..., float]) -> Callable[..., float]:
    """The function, with NaN or torch's result for constants at which Python's raises an error."""

    def of(*numbers: float) -> float:
        try:
            return function(*numbers)
        except ValueError:
            return math.nan
        except (OverflowError, ZeroDivisionError):
            return float(_by_torch(function, *numbers))

    return of


def _by_torch(function: Callable[..., float], *numbers: float) -> Any:
    wide = [torch.tensor(number, dtype=torch.float64) for number in numbers]
    return {math.exp: torch.exp, math.expm1: torch.expm1}.get(function, lambda *_: torch.tensor(math.nan))(*wide)


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


FUNCTIONS: dict[str, Function] = {
    "add": Function(lambda a, b: a + b, torch.add, "{0} + {1}"),
    "sub": Function(lambda a, b: a - b, torch.sub, "{0} - {1}"),
    "mul": Function(lambda a, b: a * b, torch.mul, "{0} * {1}"),
    "div": Function(_guarded(lambda a, b: a / b), torch.div, "{0} / {1}"),
    "neg": Function(lambda a: -a, torch.neg, "-{0}"),
    "max": Function(max, torch.maximum, "v_max({0}, {1})"),
    "min": Function(min, torch.minimum, "v_min({0}, {1})"),
    "pow": Function(_guarded(lambda a, b: a**b), torch.pow, "v_pow({0}, {1})"),
    "select": Function(lambda c, a, b: a if c else b, lambda c, a, b: torch.where(c != 0, a, b),
                       "v_select({0}, {1}, {2})"),
    "lt": _comparison("<", "lt", lambda a, b: a < b),
    "le": _comparison("<=", "le", lambda a, b: a <= b),
    "gt": _comparison(">", "gt", lambda a, b: a > b),
    "ge": _comparison(">=", "ge", lambda a, b: a >= b),
    "eq": _comparison("==", "eq", lambda a, b: a == b),
    "ne": _comparison("!=", "ne", lambda a, b: a != b),
    "relu": Function(lambda a: 0.0 if a <= 0 else a, torch.relu,
                     "v_select(v_where({0} <= v_const(0)), v_const(0), {0})"),
    "abs": _unary("abs", abs, torch.abs),
    "sign": _unary("sign", lambda a: math.copysign(1, a) if a else 0.0, torch.sign),
    "floor": _unary("floor", math.floor, torch.floor),
    "exp": _unary("exp", _guarded(math.exp), torch.exp),
    "expm1": _unary("expm1", _guarded(math.expm1), torch.expm1),
    "log": _unary("log", _guarded(math.log), torch.log),
    "log1p": _unary("log1p", _guarded(math.log1p), torch.log1p),
    "sqrt": _unary("sqrt", _guarded(math.sqrt), torch.sqrt),
    "rsqrt": _unary("rsqrt", _guarded(lambda a: 1 / math.sqrt(a)), torch.rsqrt),
    "reciprocal": _unary("reciprocal", _guarded(lambda a: 1 / a), torch.reciprocal),
    "sigmoid": _unary("sigmoid", _sigmoid, torch.sigmoid),
    "softplus": _unary("softplus", lambda a: max(a, 0.0) + math.log1p(math.exp(-abs(a))), torch.nn.functional.softplus),
    "tanh": _unary("tanh", math.tanh, torch.tanh),
    "sin": _unary("sin", _guarded(math.sin), torch.sin),
    "cos": _unary("cos", _guarded(math.cos), torch.cos),
    "atan": _unary("atan", math.atan, torch.atan),
    "erf": _unary("erf", math.erf, torch.erf),
}  # fmt: skip
