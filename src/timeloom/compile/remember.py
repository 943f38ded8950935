"""Compiled steps, kept as long as the code they came from: a step is compiled once, whatever its parameters do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from timeloom.compile.refusal import NotFused
from timeloom.torch_state.precision import HALF

if TYPE_CHECKING:
    from timeloom.compile.fuse import Compiled

FEWEST_STEPS = 512
"""Steps of a cell, over all calls, from which compiling it pays: that takes a second or two."""
MOST_KEPT = 16
"""Variants of one step that are kept: of other shapes, modes, dtypes."""


@dataclass
class _Kept:
    steps: int = 0
    compiled: Compiled | None = None
    reason: str = ""


_kept: WeakKeyDictionary[Any, dict[Any, _Kept]] = WeakKeyDictionary()


def compiled_for(
    function: Callable[[Any, Tensor], Any],
    state: tuple[Tensor, ...],
    is_tuple: bool,
    xs: Tensor,
    fewest: int | None = None,
) -> Compiled | str:
    """The compiled step for states `(B, ...)` and inputs `(T, B, ...)` like these, or why there is none."""
    reason = _hinders(state) if xs.shape[0] * xs.shape[1] else "there are no rows"
    if reason is not None:
        return reason
    from timeloom.compile.bindings import fingerprint
    from timeloom.compile.fuse import compile_step

    try:
        key = (
            fingerprint(function),
            is_tuple,
            *[(part.shape[1:], part.dtype) for part in state],
            xs.shape[2:],
            xs.dtype,
        )
        variants = _kept.setdefault(_owner(function), {})
        kept = variants.setdefault(key, _Kept())
    except NotFused as error:
        return str(error)
    except TypeError:  # neither to be hashed nor to be weakly referred to
        return "the cell is an object that cannot be told apart from others (give a function or an nn.Module)"
    while len(variants) > MOST_KEPT:
        variants.pop(next(iter(variants)))
    kept.steps += len(xs)
    if kept.compiled is not None or kept.reason:
        return kept.compiled or kept.reason
    if kept.steps < (FEWEST_STEPS if fewest is None else fewest):
        return f"too few steps so far to be worth compiling ({kept.steps} of {FEWEST_STEPS})"
    inferring = torch.is_inference_mode_enabled()
    try:
        with torch.inference_mode(False):  # gradients are compared, too
            folds = xs.device.type == "cpu"
            kept.compiled = compile_step(function, state, is_tuple, xs.flatten(0, 1), folds)
    except NotFused as error:
        kept.reason = str(error)
    except RuntimeError:
        if not inferring:
            raise
        return "the step holds tensors of inference mode: call it once outside of that"
    return kept.compiled or kept.reason


def refuse(function: Callable[[Any, Tensor], Any], reason: str) -> None:
    """Forget what was compiled of a step that turned out to be another one now."""
    for kept in _kept.get(_owner(function), {}).values():
        kept.compiled, kept.reason = None, reason


def _hinders(state: tuple[Tensor, ...]) -> str | None:
    device = state[0].device.type
    if device not in ("cpu", "cuda"):
        return f"no generated kernels for {device}"
    if (state[0].dtype in HALF) != (device == "cuda") and state[0].dtype != torch.float32:
        kinds = "float32 and half precision" if device == "cuda" else "float32 and float64"
        return f"generated kernels on {device} are for {kinds}, and the state is {state[0].dtype}"
    if torch.is_autocast_enabled(device):
        return "torch.autocast is on"
    return None


def _owner(function: Any) -> Any:
    """What a compiled step may live as long as: a module, or the code of a function, which a new lambda shares."""
    if isinstance(function, partial):
        function = function.func
    if isinstance(function, MethodType):
        function = function.__self__
    if isinstance(function, FunctionType):
        return function.__code__
    return function if isinstance(function, nn.Module) else type(function)
