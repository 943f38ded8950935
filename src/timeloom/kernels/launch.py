"""Launches of Triton's kernels, without its look at every argument where a launch is like an earlier one.

Triton compiles a kernel anew for tensors of other dtypes or alignments, for numbers that are 1, divisible by 16 or
large, and for other constants; so it looks at all of them on every launch, which is most of the host's time of one.
Here a launch whose arguments are of the kinds of an earlier one's takes the kernel that was compiled then.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cache, partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

MOST_KNOWN = 512
"""Compiled kernels that are remembered: one for each kind of launch."""
INT32 = 1 << 31


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None


class _Known(NamedTuple):
    """What an earlier launch compiled."""

    kernel: Any
    """Kept alive: keys hold its address, which another kernel could have after it."""
    compiled: Any
    constants: tuple[Any, ...]
    """In the kernel's order, as its arguments of that kind."""


_known: dict[Hashable, _Known] = {}


def launch(
    kernel: Any, grid: tuple[int, int, int], tensors: tuple[Tensor | None, ...], numbers: tuple[float, ...],
    **constants: Any,
) -> Callable[..., None]:  # fmt: skip
    """Launch a kernel of tensors, numbers and constants, in this order; the first tensor's device is the current one.

    `constants` are what the kernel is compiled for, by name, and Triton's own options such as `num_warps`. Returns what
    launches it again, with other tensors and numbers of the same kinds and no look at them.
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
        return plain  # Triton's interpreter compiles nothing, its asynchronous mode not yet
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
    """All that decides which compiled kernel is the right one, and a little more: some numbers never do."""
    of_tensors = [None if tensor is None else (tensor.dtype, tensor.data_ptr() % 16 == 0) for tensor in tensors]
    of_numbers = [(type(number), number == 1, number % 16 == 0, -INT32 <= number < INT32) for number in numbers]
    first = tensors[0]
    assert first is not None
    return id(kernel), first.device, *of_tensors, *of_numbers, *constants.items()


def _as_usual(kernel: Any) -> bool:
    """Whether nothing but its arguments decides how a kernel is compiled, and nobody asked to see its launches."""
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
    """Triton's settings. None where kernels are to be launched its own way: before 3.4 it had no such settings, and
    before 3.3 its kernels took no constants; for AMD's GPUs it compiles for the size of tensors, too.
    """
    if torch.version.hip is not None:
        return None
    try:
        from triton import knobs
    except ImportError:
        return None
    return knobs
