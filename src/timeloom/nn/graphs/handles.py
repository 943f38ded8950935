"""What torch.compile needs before it traces a module: a separate function to trace, and a handle.

The handle is the number by which the operators of a graph find the module.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar
from weakref import WeakValueDictionary

import torch

if TYPE_CHECKING:
    from timeloom.nn.base import Recurrent

Params = ParamSpec("Params")
Result = TypeVar("Result")
_modules: WeakValueDictionary[int, Recurrent] = WeakValueDictionary()
_numbers = itertools.count()


def handle_of(module: Recurrent) -> int:
    """A new number for a module, valid for the module's lifetime; get only one per module, or the table grows."""
    handle = next(_numbers)
    _modules[handle] = module
    return handle


def module_of(handle: int) -> Recurrent:
    module = _modules.get(handle)
    if module is None:
        raise RuntimeError("the timeloom layer that this graph was made for is gone: keep the model, or compile anew")
    return module


def traced_apart(
    forward: Callable[Concatenate[Recurrent, Params], Result],
) -> Callable[Concatenate[Recurrent, Params], Result]:
    """A module's forward pass, for which torch.compile traces `timeloom.nn.graphs.call`, imported only then."""

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            from timeloom.nn.graphs import call as traced

            # If torch keeps recurrent layers out of its graphs, the graph breaks here, before torch sees the module.
            call = traced.call if traced.allowed() else traced.call_outside()
            return call(*args, **kwargs)
        return forward(*args, **kwargs)

    return run
