"""A kernel that cannot be compiled or launched is reported once, in one line, and replaced by a slower path.

`guarded(kernel, launch)` runs a kernel. If that fails it warns, marks the kernel as broken and raises `KernelFault`;
the caller then falls back: a sweep to the reference's method of the same name (`or_reference`), a whole layer to the
general solver. Sweepers' `supports` checks `broken(kernel)`, so that later calls fall back at once. A layer's
`supports` does not: its backward pass must match what its forward pass has saved.

A kernel is named by device and cell (`cpu gru`; on a GPU also by width and precision), forward and adjoint alike: the
adjoint kernel could not read what a forward pass by the reference saves.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from timeloom.kernels.reference import ReferenceSweeper

Result = TypeVar("Result")
Method = TypeVar("Method", bound=Callable[..., Any])

_broken: dict[str, str] = {}
_LOST = ("illegal memory access", "device-side assert", "unspecified launch failure", "launch timed out")
"""Errors after which nothing runs on the device any more, so that no fallback is left."""


class KernelFault(RuntimeError):
    """A kernel could not be compiled or launched; the user has been warned."""


def broken(kernel: str) -> str | None:
    """Why a kernel must not be tried again, or None."""
    return _broken.get(kernel)


def guarded(kernel: str, launch: Callable[[], Result]) -> Result:
    """Return `launch()`, or raise KernelFault if the kernel cannot be compiled or launched, now or earlier.

    Running out of memory is not the kernel's fault: it is raised as torch's error. An error that loses the device is
    raised as it is.
    """
    if kernel in _broken:
        raise KernelFault(f"{kernel}: {_broken[kernel]}")
    try:
        return launch()
    except (MemoryError, torch.OutOfMemoryError, KernelFault):
        raise
    except Exception as error:
        if "out of memory" in str(error):  # as the driver words it
            raise torch.OutOfMemoryError(f"the {kernel} kernel: {error}") from error
        if any(words in str(error) for words in _LOST):
            raise
        reason = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"
        _broken[kernel] = reason
        tell(f"the {kernel} kernel cannot run ({reason})", "its work is done another way: same results, slower")
        raise KernelFault(f"{kernel}: {reason}") from error


def tell(what: str, instead: str) -> None:
    """Warn the user in one line; to be called once per subject."""
    warnings.warn(f"timeloom: {what}; {instead}", RuntimeWarning, stacklevel=3)


def or_reference(method: Method) -> Method:
    """Wrap a sweeper's method to fall back to the reference's method of the same name if its kernel is broken.

    Not where a whole layer is swept, which has saved nothing that the reference could continue from.
    """
    reference = getattr(ReferenceSweeper, method.__name__)

    @functools.wraps(method)
    def swept(self: Any, *arguments: Any, **named: Any) -> Any:
        try:
            return method(self, *arguments, **named)
        except KernelFault:
            if self.of_layer:
                raise
            return reference(self, *arguments, **named)

    return swept  # type: ignore[return-value]
