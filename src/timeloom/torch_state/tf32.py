"""Float32 matrix products in tf32: whether torch allows a GPU to round so, by either of its two settings.

Torch has an older setting (`allow_tf32`) and a newer one (`fp32_precision`); once the newer one has been used, reading
the older one may raise an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

RECURRENT: Any = getattr(torch.backends.cudnn, "rnn", None)
"""The object with the newer setting for cuDNN's recurrent layers, if torch has it."""


def cudnn_rounds() -> bool:
    """Whether torch allows cuDNN's recurrent layers to round to tf32, as it does by default."""
    precision = getattr(RECURRENT, "fp32_precision", None)
    return torch.backends.cudnn.allow_tf32 if precision is None else precision == "tf32"


@contextmanager
def exact_cudnn() -> Iterator[None]:
    """Context in which cuDNN's recurrent layers do not round to tf32, whatever the user allows."""
    exact: str | bool
    owner, name, exact = RECURRENT, "fp32_precision", "ieee"
    if getattr(owner, name, None) is None:
        owner, name, exact = torch.backends.cudnn, "allow_tf32", False
    before = getattr(owner, name)
    setattr(owner, name, exact)
    try:
        yield
    finally:
        setattr(owner, name, before)


def matmul_rounds() -> bool:
    """Whether torch's own matrix products round to tf32, as they do not by default."""
    matmul: Any = torch.backends.cuda.matmul
    try:
        return bool(matmul.allow_tf32)
    except RuntimeError:  # the newer one was used
        return bool(matmul.fp32_precision == "tf32")


@contextmanager
def products(rounded: bool) -> Iterator[None]:
    """Context in which torch's own matrix products round to tf32, or do not."""
    if matmul_rounds() == rounded:
        yield
        return
    matmul: Any = torch.backends.cuda.matmul
    before: dict[str, Any] = {}
    wanted: tuple[str, Any]
    try:
        before["allow_tf32"] = matmul.allow_tf32
        wanted = "allow_tf32", rounded
    except RuntimeError:  # the newer one was used
        wanted = "fp32_precision", "tf32" if rounded else "ieee"
    precision = getattr(matmul, "fp32_precision", None)
    if precision is not None:
        before["fp32_precision"] = precision  # last: the older one sets it, too
    setattr(matmul, *wanted)
    try:
        yield
    finally:
        for setting, value in before.items():
            setattr(matmul, setting, value)
