"""Launches of Triton kernels that skip Triton's inspection of all arguments if an earlier launch was like this one.

Triton specializes a kernel on the dtypes and alignment of tensors, on numbers that are 1, divisible by 16 or large, and
on constants; it inspects all of them at every launch, which is most of a launch's host time. Here a launch with
arguments of the same kinds as an earlier one reuses the kernel compiled then.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cache, partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

MOST_KNOWN = 512
"""Largest number of compiled kernels remembered, one for each kind of launch."""
INT32 = 1 << 31


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None


class _Known(NamedTuple):
    """A kernel compiled by an earlier launch."""

    kernel: Any
    """Kept alive, since keys hold its `id`, which another object could take over."""
    compiled: Any
    constants: tuple[Any, ...]
    """The kernel's constant arguments, in the order of its signature."""


_known: dict[Hashable, _Known] = {}


def launch(
    kernel: Any, grid: tuple[int, int, int], tensors: tuple[Tensor | None, ...], numbers: tuple[float, ...],
    **constants: Any,
) -> Callable[..., None]:  # fmt: skip
    """Launch a kernel on tensors, numbers and constants, in this order; the first tensor's device must be current.

    `constants` are its `tl.constexpr` arguments by name, and Triton's options such as `num_warps`. Returns a function
    that repeats the launch with other tensors and numbers of the same kinds, without inspecting them.
    """
    key = _kind(kernel, tensors, numbers, constants)
    known = _known.get(key)
    if known is not None and _as_usual(kernel):
        again = _again(known, grid)
        again(*tensors, *numbers)
        return again
    plain = partial(kernel[grid], **constants)
    compiled = plain(*tensors, *numbers)
    if not hasattr(type(compiled), "__getitem__") or not _as_usual(kernel):
        return plain  # Triton's interpreter compiles nothing, its asynchronous mode later
    in_order = kernel.arg_names[len(tensors) + len(numbers) :]
    if len(_known) >= MOST_KNOWN:
        _known.clear()
    known = _known[key] = _Known(kernel, compiled, tuple(constants[name] for name in in_order))
    return _again(known, grid)


def _again(known: _Known, grid: tuple[int, int, int]) -> Callable[..., None]:
    run, constants = known.compiled[grid], known.constants
    return lambda *arguments: run(*arguments, *constants)


def _kind(
    kernel: Any, tensors: tuple[Tensor | None, ...], numbers: tuple[float, ...], constants: dict[str, Any]
) -> Hashable:
    """The key of a compiled kernel: what Triton specializes on, and slightly more, as some numbers never matter."""
    of_tensors = [None if tensor is None else (tensor.dtype, tensor.data_ptr() % 16 == 0) for tensor in tensors]
    of_numbers = [(type(number), number == 1, number % 16 == 0, -INT32 <= number < INT32) for number in numbers]
    first = tensors[0]
    assert first is not None
    return id(kernel), first.device, *of_tensors, *of_numbers, *constants.items()


def _as_usual(kernel: Any) -> bool:
    """Whether a kernel's arguments alone decide how it is compiled, and no hook or debug mode watches its launches."""
    knobs = _knobs()
    return not (
        knobs is None
        or knobs.runtime.debug
        or getattr(knobs.compilation, "instrumentation_mode", None)
        or getattr(knobs.runtime, "add_stages_inspection_hook", None)
        or kernel.pre_run_hooks
    )


@cache
def _knobs() -> Any:
    """Triton's settings, or None where launches must go through Triton itself.

    Before 3.4 it had no such settings, and before 3.3 compiled kernels took no constants; for AMD GPUs it also
    specializes on the size of tensors.
    """
    if torch.version.hip is not None:
        return None
    try:
        from triton import knobs
    except ImportError:
        return None
    return knobs
