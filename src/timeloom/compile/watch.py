"""Whether a step is still the one that was compiled: what its code sees is checked in every call.

A few steps of every call are compared with the step itself, but a limit that none of them reaches, or a gradient that
is cut, does not show in their values.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from timeloom.compile.bindings import PLAIN
from timeloom.compile.following import look_around
from timeloom.compile.surroundings import Surroundings, Unseen

if TYPE_CHECKING:
    from timeloom.compile.fuse import Compiled

Kept = TypeVar("Kept")
MOST_LOOKS = 16
"""Most kinds of steps of one function or module that are remembered."""
LOOKED_ROWS = 2
"""Rows that a step is run on when it is examined."""


class Looks(dict[Hashable, "tuple[Compiled, Surroundings | None]"]):
    """What steps saw when they were last known to match their compiled form; None where that cannot be followed.

    Stored on the function or module whose steps they are, since it holds all of that; a copy of it begins empty.
    """

    def __reduce__(self) -> Any:
        return Looks, ()


def kept_with(owner: nn.Module | FunctionType, name: str, make: Callable[[], Kept]) -> Kept:
    """What is stored on a module or function under `name`, made if missing; lives as long as its owner."""
    whose, kept = vars(owner).get(name, (None, None))
    if whose != id(owner):  # functools.wraps and copy copy the attribute
        kept = make()
        vars(owner)[name] = id(owner), kept
    return kept  # type: ignore[no-any-return]


def unchanged(function: Any, compiled: Compiled, state: tuple[Tensor, ...], is_tuple: bool, x: Tensor) -> bool:
    """Whether a step on states `(B, ...)` and x `(rows, ...)` like these is still what was compiled.

    That takes microseconds if its code sees what it saw before; else the step is traced once more.
    """
    owner, kind = _owner(function)
    looks = Looks() if owner is None else kept_with(owner, "_timeloom_looks", Looks)
    key = kind, id(compiled)
    _, around = looks.get(key, (compiled, None))
    if around is not None and around.same() and compiled.indexes_alike(compiled.bindings.tensors(function)):
        return True
    with torch.inference_mode(False):
        if not compiled.traced_alike(function, state, is_tuple, x):
            looks.pop(key, None)
            return False
    if owner is not None and (around is not None or key not in looks):
        if len(looks) >= MOST_LOOKS:
            looks.clear()
        rows = tuple(part[:LOOKED_ROWS] for part in state)
        looks[key] = compiled, _look(function, rows if is_tuple else rows[0], x[: len(rows[0])])
    return True


def _look(function: Any, state: Any, x: Tensor) -> Surroundings | None:
    try:
        return look_around(function, x.device, lambda: function(state, x))
    except Unseen:
        return None


def _owner(function: Any) -> tuple[nn.Module | FunctionType | None, Any]:
    """The object that can store what is known of a step, or None; and the step's key among others stored there."""
    owner: Any = function
    kind: Any = None
    if isinstance(function, MethodType):
        owner, kind = function.__self__, function.__func__
    elif isinstance(function, partial):
        given = *function.args, *function.keywords.values()
        owner = next((one for one in (*given, function.func) if isinstance(one, nn.Module | FunctionType)), None)
        owner = owner if all(map(_is_known, given)) else None
        kind = function.func, function.args, tuple(function.keywords.items())
    return (owner, kind) if isinstance(owner, nn.Module | FunctionType) else (None, None)


def _is_known(given: Any) -> bool:
    """Whether an argument of a step may be part of its key."""
    if isinstance(given, tuple):
        return all(isinstance(one, PLAIN) for one in given)
    return isinstance(given, (nn.Module, FunctionType, *PLAIN))
