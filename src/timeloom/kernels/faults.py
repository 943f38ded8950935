"""A kernel that cannot be compiled or launched is told once, in one line, and its work is done another way.

`guarded(kernel, launch)` runs a kernel. Where that fails it warns, remembers the kernel as broken, and raises
`KernelFault`; whoever called it then takes the next way: a sweep the reference's method of the same name
(`or_reference`), a whole layer the general solver. `supports` of sweepers asks `broken(kernel)`, so that later calls
take that way at once. A layer's `supports` does not: what its forward pass has kept, its backward pass must meet.

A kernel is named by device and cell (`cpu gru`; on a GPU by its width and precision too), forward and adjoint together:
what a forward pass by the reference leaves behind is nothing that the kernel's adjoint could read.
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
"""After these nothing runs on the device any more: no other way is left to take."""


class KernelFault(RuntimeError):
    """A kernel could not be compiled or launched, and that has been told."""


def broken(kernel: str) -> str | None:
    """Why a kernel is not to be tried again, or None."""
    return _broken.get(kernel)


def guarded(kernel: str, launch: Callable[[], Result]) -> Result:
    """What `launch()` returns; KernelFault where it cannot be compiled or launched, now or at an earlier call.

    A lack of memory is not the kernel's fault and goes through as torch's error, as does one that cost the device.
    """
    if kernel in _broken:
        raise KernelFault(f"{kernel}: {_broken[kernel]}")
    try:
        return launch()
    except (MemoryError, torch.OutOfMemoryError, KernelFault):
        raise
    except Exception as error:
        if "out of memory" in str(error):  # a driver's words
            raise torch.OutOfMemoryError(f"the {kernel} kernel: {error}") from error
        if any(words in str(error) for words in _LOST):
            raise
        reason = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"
        _broken[kernel] = reason
        tell(f"the {kernel} kernel cannot run ({reason})", "its work is done another way: same results, slower")
        raise KernelFault(f"{kernel}: {reason}") from error


def tell(what: str, instead: str) -> None:
    """One line for the user; call it once for each thing."""
    warnings.warn(f"timeloom: {what}; {instead}", RuntimeWarning, stacklevel=3)


def or_reference(method: Method) -> Method:
    """A sweeper's method, or the reference's of the same name where its kernel is broken.

    Not where a whole layer is swept: it has kept nothing that the reference could go on with.
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
