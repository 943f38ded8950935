"""Compiled steps, kept as long as the code they came from: a step is compiled once, even if its parameters change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules import module as every_module

from timeloom.compile.bindings import GRADIENT_HOOKS
from timeloom.compile.refusal import NotFused
from timeloom.torch_state.precision import HALF

if TYPE_CHECKING:
    from timeloom.compile.fuse import Compiled

FEWEST_STEPS = 512
"""Steps of a cell, over all calls, after which kernels are made for it: that takes seconds, and pays if more calls
follow, as in training."""
MOST_KEPT = 16
"""Most variants of one step that are kept: with other shapes, modes, dtypes."""
MOST_AT_ONCE = 3
"""Variants of one step that are compiled right away although they differ only in plain values."""
CALLS_THAT_PAY = 16
"""Calls after which further variants are compiled, too: a plain value might be different in every call."""
ROUNDING = 32
"""Units of rounding between a step and its kernels that are not investigated."""


@dataclass
class _Kept:
    steps: int = 0
    calls: int = 0
    compiled: Compiled | None = None
    reason: str = ""
    rounding: float = 0.0
    """The largest difference from the step itself that turned out to be no change of the step."""
    checked: int = 0
    """Calls since its rows were first seen not to mix."""

    def now_and_then(self, check: Callable[[], None]) -> None:
        """Run the check in calls 1, 2, 4, 8 …"""
        if self.checked & (self.checked + 1) == 0:
            check()
        self.checked += 1


@dataclass
class _Owner:
    """What is known of the steps of one piece of code."""

    variants: dict[Any, _Kept] = field(default_factory=dict)
    compiled: dict[Any, list[Any]] = field(default_factory=dict)
    """The last fingerprints that were compiled, by shapes and dtypes."""


_kept: WeakKeyDictionary[Any, _Owner] = WeakKeyDictionary()


def compiled_for(
    function: Callable[[Any, Tensor], Any],
    state: tuple[Tensor, ...],
    is_tuple: bool,
    xs: Tensor,
    fewest: int | None = None,
    check: Callable[[], None] | None = None,
) -> Compiled | str:
    """The compiled step for states `(B, ...)` and inputs `(T, B, ...)` like these, or why there is none.

    fewest: steps after which to compile it, whatever variants there are. check: called first, as by
        `now_and_then`.
    """
    reason = _hinders(state) if xs.shape[0] * xs.shape[1] else "there are no rows"
    if reason is not None:
        if check is not None:
            now_and_then(function, state, is_tuple, xs, check)
        return reason
    from timeloom.compile.fuse import compile_step

    try:
        owner, kept, kind, seen = _look_up(function, state, is_tuple, xs)
    except (NotFused, TypeError) as error:  # a TypeError: not hashable, or not weakly referenceable
        if check is not None:
            check()
        unknown = "the cell is an object that cannot be told apart from others (give a function or an nn.Module)"
        return str(error) if isinstance(error, NotFused) else unknown
    if check is not None:
        kept.now_and_then(check)
    kept.steps += len(xs)
    kept.calls += 1
    if kept.compiled is not None or kept.reason:
        return kept.compiled or kept.reason
    if kept.steps < (FEWEST_STEPS if fewest is None else fewest):
        return f"too few steps so far to be worth compiling ({kept.steps} of {FEWEST_STEPS})"
    before = owner.compiled.setdefault(kind, [])
    alike = [other for other in before if _same_code(other, seen)]
    if fewest is None and len(alike) >= MOST_AT_ONCE and kept.calls < CALLS_THAT_PAY:
        return f"{_changed(alike[-1], seen)}, and would be compiled anew for each: hold it in a tensor"
    inferring = torch.is_inference_mode_enabled()
    try:
        with torch.inference_mode(False):  # gradients are compared, too
            folds = xs.device.type == "cpu"
            kept.compiled = compile_step(function, state, is_tuple, xs.flatten(0, 1), folds)
        before[:] = [*before[1 - MOST_KEPT :], seen]
    except NotFused as error:
        kept.reason = str(error)
    except RuntimeError:
        if not inferring:
            raise
        return "the step holds tensors of inference mode: call it once outside of that"
    return kept.compiled or kept.reason


def doubted(
    function: Callable[[Any, Tensor], Any], state: tuple[Tensor, ...], is_tuple: bool, xs: Tensor, gap: float
) -> str | None:
    """Why a compiled step no longer matches the function, given the `gap` between them on a few rows.

    None if that is rounding. The compiled form of a step that has changed is dropped.
    """
    from timeloom.compile.fuse import AGREES

    if gap <= rounding_of(state[0].dtype):
        return None
    _, kept, _, _ = _look_up(function, state, is_tuple, xs)
    if kept.compiled is None or gap <= kept.rounding:
        return None
    with torch.inference_mode(False):
        alike = kept.compiled.traced_alike(function, state, is_tuple, xs.flatten(0, 1))
    if not alike:
        forget(function, state, is_tuple, xs)
        return "the step is another one than when it was compiled"
    if gap <= AGREES[state[0].dtype]:
        kept.rounding = 4 * gap
        return None
    refuse(function, "the step gives other values than when it was compiled")
    return kept.reason


def now_and_then(
    function: Callable[[Any, Tensor], Any],
    state: tuple[Tensor, ...],
    is_tuple: bool,
    xs: Tensor,
    check: Callable[[], None],
) -> None:
    """Run a check of a step in calls 1, 2, 4, 8 …, and until it passes; of a step that cannot be remembered in every
    call.
    """
    try:
        kept = _look_up(function, state, is_tuple, xs)[1]
    except (NotFused, TypeError):
        check()
    else:
        kept.now_and_then(check)


def forget(function: Callable[[Any, Tensor], Any], state: tuple[Tensor, ...], is_tuple: bool, xs: Tensor) -> None:
    """Drop the compiled form of a step that has changed."""
    _, kept, _, _ = _look_up(function, state, is_tuple, xs)
    kept.compiled, kept.calls, kept.checked = None, 0, 0


def rounding_of(dtype: torch.dtype) -> float:
    """The difference between a step and its kernels that is not investigated."""
    return ROUNDING * torch.finfo(dtype).eps


def refuse(function: Callable[[Any, Tensor], Any], reason: str) -> None:
    """Drop the compiled forms of a step, for good."""
    known = _kept.get(_owner(function))
    for kept in known.variants.values() if known is not None else ():
        kept.compiled, kept.reason = None, reason


def _look_up(
    function: Any, state: tuple[Tensor, ...], is_tuple: bool, xs: Tensor
) -> tuple[_Owner, _Kept, tuple[Any, ...], tuple[Any, ...]]:
    """What is known of a step, and its key: shapes and dtypes, and the fingerprint of what it refers to."""
    from timeloom.compile.bindings import fingerprint

    seen = fingerprint(function)
    kind = (is_tuple, *[(part.shape[1:], part.dtype) for part in state], xs.shape[2:], xs.dtype)
    owner = _kept.setdefault(_owner(function), _Owner())
    kept = owner.variants.setdefault((seen, kind), _Kept())
    while len(owner.variants) > MOST_KEPT:
        others = [key for key, one in owner.variants.items() if one is not kept]
        owner.variants.pop(next((key for key in others if owner.variants[key].compiled is None), others[0]))
    return owner, kept, kind, seen


def _same_code(before: tuple[Any, ...], now: tuple[Any, ...]) -> bool:
    """Whether two steps differ only in plain values, not in classes or code of what they refer to."""
    if [path for path, *_ in before] != [path for path, *_ in now]:
        return False
    return all(one == other for one, other in zip(before, now, strict=True) if one[0][-1] in ("type", "code"))


def _changed(before: tuple[Any, ...], now: tuple[Any, ...]) -> str:
    """Say which of the values that a step refers to has changed."""
    for (path, *one), (place, *other) in zip(before, now, strict=False):
        if path == place and one != other:
            return f"the value of {'.'.join(map(str, path))} changes from call to call"
    return "what the step refers to changes from call to call"


def _hinders(state: tuple[Tensor, ...]) -> str | None:
    device = state[0].device.type
    if device not in ("cpu", "cuda"):
        return f"no generated kernels for {device}"
    if (state[0].dtype in HALF) != (device == "cuda") and state[0].dtype != torch.float32:
        kinds = "float32 and half precision" if device == "cuda" else "float32 and float64"
        return f"generated kernels on {device} are for {kinds}, and the state is {state[0].dtype}"
    if torch.is_autocast_enabled(device):
        return "torch.autocast is on"
    if any(getattr(every_module, f"_global{name}") for name in GRADIENT_HOOKS):
        return "there are hooks on the gradients of all modules"
    return None


def _owner(function: Any) -> Any:
    """The object that a compiled step lives as long as: a module, or a function's code, which a new lambda shares."""
    if isinstance(function, partial):
        function = function.func
    if isinstance(function, MethodType):
        function = function.__self__
    if isinstance(function, FunctionType):
        return function.__code__
    return function if isinstance(function, nn.Module) else type(function)
