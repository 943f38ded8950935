"""The dtype to solve in, and the one that torch would return."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor

from timeloom.torch_state.autocast import autocast_on

HALF = (torch.float16, torch.bfloat16)
SOLVED = (torch.float64, torch.float32, *HALF)
"""Dtypes of inputs that timeloom's sweeps accept."""


def solved_in(x: Tensor) -> torch.dtype:
    """The dtype to solve in: half precision is solved in float32 and rounded once."""
    return torch.float32 if x.dtype in HALF else x.dtype


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`tensor.to(dtype)` without the microsecond that it takes torch to do nothing."""
    return tensor if tensor.dtype is dtype else tensor.to(dtype)


def products_in(x: Tensor) -> torch.dtype:
    """The dtype a GPU's kernels multiply in: half precision if x is, or if autocast wants it, as in torch's layers."""
    device = x.device.type
    if x.dtype == torch.float32 and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return x.dtype


def returned_in(
    layer: Any, projected: bool, weight: Tensor, x: Tensor, hidden: tuple[Tensor, ...]
) -> tuple[torch.dtype, ...]:
    """The dtype in which torch's layer would return each part of the state; outputs have that of the first part."""
    if not autocast_on(x.device) or x.dtype == torch.float64:
        return (x.dtype,) * len(hidden)
    device, parts = x.device.type, tuple(part.dtype for part in hidden)
    return _under_autocast(layer, projected, device, torch.get_autocast_dtype(device), weight.dtype, x.dtype, parts)


@cache
def _under_autocast(
    layer: Any, projected: bool, device: str, lower: torch.dtype, weight: torch.dtype, x: torch.dtype,
    parts: tuple[torch.dtype, ...],
) -> tuple[torch.dtype, ...]:  # fmt: skip
    """The dtypes that torch's layer returns under autocast, found by a call: they vary with the layer and library."""
    options = {"proj_size": 1} if projected else {}
    widths = (1, 2) if projected else (2, 2)
    with warnings.catch_warnings(), torch.no_grad(), torch.autocast(device, lower):
        warnings.simplefilter("ignore")
        tiny = layer(2, 2, device="meta", dtype=weight, **options).to_empty(device=device)  # draws no random numbers
        hx = tuple(torch.zeros(1, 1, n, device=device, dtype=part) for n, part in zip(widths, parts, strict=False))
        try:
            _, final = tiny(torch.zeros(1, 1, 2, device=device, dtype=x), hx if len(hx) > 1 else hx[0])
        except RuntimeError:  # a mixture that torch cannot run at all
            return (lower,) * len(parts)
    return tuple(part.dtype for part in final) if isinstance(final, tuple) else (final.dtype,)
