"""Tensor subclasses that stand for other tensors (DTensor, quantised weights, …).

They define their own operations, and have no memory that a kernel could read.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from timeloom.torch_state.transforms import WHERE, transformed

_OF_PLAIN_TENSORS = torch.Tensor.__torch_dispatch__


def wrapped(given: Iterable[object]) -> type | None:
    """The class of the first such tensor among what is given; None where there is none."""
    for one in given:
        if getattr(type(one), "__torch_dispatch__", _OF_PLAIN_TENSORS) is not _OF_PLAIN_TENSORS:
            return type(one)
    return None


def why_step_by_step(*given: object) -> str | None:
    """Why a user's cell can only run step by step on these arguments, on torch's own tape; None if it need not."""
    if transformed():
        return f"no sweeps {WHERE}"
    kind = wrapped(given)
    return None if kind is None else f"no sweeps for a {kind.__name__}"
