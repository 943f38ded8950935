"""Put timeloom's layer under a user's subclass of torch's, if the subclass leaves the recurrence to `super()`."""

from __future__ import annotations

import copyreg
import inspect
from collections.abc import Callable, Iterator
from functools import cache
from types import CodeType
from typing import Any

from torch import nn

from timeloom.nn.base import Recurrent
from timeloom.nn.modules import GRU, LSTM, RNN

_PAIRS: dict[type[nn.RNNBase], type[Recurrent]] = {nn.GRU: GRU, nn.LSTM: LSTM, nn.RNN: RNN}
"""Torch's layers, each with its counterpart in timeloom."""
UNASKED = ("check_input", "check_forward_args", "get_expected_hidden_size", "permute_hidden", "_flat_weights")
"""Attributes that torch's forward pass uses and timeloom's does not: a subclass that overrides one would run a
different network."""
_GROWN = "_timeloom_grown"
"""Marks the classes that are made here."""


def why_not(cls: type) -> str:
    """Why timeloom's layer cannot go under this class; empty if it can."""
    below = torch_class(cls)
    if below is None:
        return "it derives from none of nn.GRU, nn.LSTM and nn.RNN"
    names = reserved(below)
    for ancestor in cls.__mro__[: cls.__mro__.index(below)]:
        overridden = [name for name in UNASKED if name in vars(ancestor)]
        if overridden:
            return f"it has a {overridden[0]} of its own, which timeloom's forward pass would not ask"
        taken = sorted(names & vars(ancestor).keys())
        if taken:
            return f"its {taken[0]} is a name that timeloom's layer has, too: rename it"
        forward = vars(ancestor).get("forward")
        if forward is not None and not _calls_super(forward):
            return f"the forward of {ancestor.__name__} does not call super().forward"
    return ""


@cache
def reserved(theirs: Any) -> frozenset[str]:
    """Names of attributes that timeloom's layer has and torch's has not."""
    return attributes_added(theirs) | {name for name in dir(_PAIRS[theirs]) if not hasattr(theirs, name)}


def torch_class(cls: type) -> Any:
    """The layer of torch's that a class is or derives from; None if there is none."""
    return next((theirs for theirs in _PAIRS if issubclass(cls, theirs)), None)


def grown(cls: type) -> type:
    """The class with timeloom's layer between its own methods and torch's: `super().forward` is then timeloom's.

    This follows from Python's method resolution order: of the bases (cls, tl.LSTM), both come before nn.LSTM. All
    modules share one such class, which is looked up among the subclasses of `cls` and lives as long as it.
    """
    theirs = torch_class(cls)
    if cls is theirs:
        return _PAIRS[theirs]
    subclasses: list[type] = type.__subclasses__(cls)
    for known in subclasses:
        if _GROWN in vars(known):
            return known
    body = {_GROWN: True, "__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    made: Any = type(cls)(cls.__name__, (cls, _PAIRS[theirs]), body)
    made.__reduce_ex__ = _pickled_by(cls, made)
    return made  # type: ignore[no-any-return]


def ungrown(cls: type) -> type | None:
    """The user's or torch's class before the swap; None for a class that derives from timeloom's by itself."""
    if _GROWN in vars(cls):
        return cls.__bases__[0]
    return next((theirs for theirs, ours in _PAIRS.items() if cls is ours), None)


@cache
def attributes_added(theirs: Any) -> frozenset[str]:
    """Names of the attributes that an object of timeloom's layer has in addition to those of torch's."""
    mine, plain = (vars(kind(1, 1, device="meta")) for kind in (_PAIRS[theirs], theirs))  # type: ignore[call-arg, arg-type]
    return frozenset(mine.keys() - plain.keys())


def _pickled_by(cls: type, made: Any) -> Callable[[Any, Any], Any]:
    """How to pickle an object of a class that no module contains: by the user's class, which is grown again."""

    def reduce(self: Any, protocol: Any) -> Any:
        make, arguments, *state = super(made, self).__reduce_ex__(protocol)
        if make is copyreg.__newobj__ and arguments[0] is made:  # type: ignore[attr-defined]
            make, arguments = _new, (cls, *arguments[1:])
        return make, arguments, *state

    return reduce


def _new(cls: type, *arguments: Any) -> Any:
    swapped = grown(cls)
    return swapped.__new__(swapped, *arguments)


def _calls_super(forward: Any) -> bool:
    """Whether a method calls `super().forward`, as far as its code shows."""
    function: Callable[..., Any] = inspect.unwrap(forward) if callable(forward) else forward
    code = getattr(function, "__code__", None)
    return code is not None and any({"super", "forward"} <= set(part.co_names) for part in codes_of(code))


def codes_of(code: CodeType) -> Iterator[CodeType]:
    """A function's code object and those of all functions nested in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_of(constant)
