"""Tensors that torch's threads hold for an exchange: a process must not end before they are released.

gloo's threads release a collective's tensors only after the waiting threads have continued. Releasing a tensor that has
a Python object takes the GIL, and a thread that takes the GIL of an interpreter in shutdown aborts the process: a run
that has done all its work would fail at its very end. The same holds for torch's context of a backward pass, which is
held by all exchanges that were started in it: ours, and those of DistributedDataParallel.
"""

from __future__ import annotations

import atexit
import time
from typing import Any
from weakref import ref

import torch
from torch import Tensor

PATIENCE = 5.0
"""Longest time in seconds that an ending process waits: a failed exchange may never release its tensors."""
_KEY = "context"
"""Torch's key for the context of a backward pass in thread-local storage."""

_lent: list[ref[Any]] = []


def lend(tensor: Tensor) -> Tensor:
    """An alias of the tensor, which only the exchange may hold."""
    name, context = tensor.detach(), _context()
    known = context is None or any(other() is context for other in _lent)
    _lent[:] = [other for other in _lent if other() is not None] + [ref(name)] + ([] if known else [ref(context)])
    return name


def settle() -> None:
    """Wait until everything lent is released."""
    until = time.monotonic() + PATIENCE
    here = _context()  # older torch keeps the last one in this thread: no other thread will release it
    while any(lent() is not None and lent() is not here for lent in _lent) and time.monotonic() < until:
        time.sleep(0.001)


def _context() -> Any:
    """The context of the backward pass that runs in this thread, or None."""
    return torch._C._get_obj_in_tls(_KEY) if torch._C._is_key_in_tls(_KEY) else None


atexit.register(settle)
