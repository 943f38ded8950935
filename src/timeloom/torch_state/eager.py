"""Keep torch.compile out of a function."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

Params = ParamSpec("Params")
Result = TypeVar("Result")


def eager(function: Callable[Params, Result]) -> Callable[Params, Result]:
    """`torch.compiler.disable` that imports the compiler only if one is at work.

    A solve is a loop controlled by its own residuals: split into graphs, it would be slower, and recompiled for each
    length.
    """

    @wraps(function)
    def run(*args: Params.args, **kwargs: Params.kwargs) -> Result:
        if torch.compiler.is_compiling():
            disabled: Any = torch.compiler.disable(function)
            result: Result = disabled(*args, **kwargs)
            return result
        return function(*args, **kwargs)

    # Its own code object, as the compiler counts compilations of each and gives up at the eighth.
    run.__code__ = run.__code__.replace(co_name=function.__name__)  # type: ignore[attr-defined]
    return run
