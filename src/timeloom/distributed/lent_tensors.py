"""What torch's own threads hold for an exchange: a process does not end before it has it back.

gloo's threads let go of a collective's tensors after those who wait for it have gone on. Letting go of a tensor that
Python knows takes Python's lock, and a thread that asks for the lock of an ending interpreter aborts the process: a run
that has done all its work would fail in its last moment. The same goes for the context that torch gives a backward
pass, which the exchanges begun in it hold: ours, and those of DistributedDataParallel.
"""

from __future__ import annotations

import atexit
import time
from typing import Any
from weakref import ref

import torch
from torch import Tensor

PATIENCE = 5.0
"""Seconds that an ending process waits, at most: an exchange that failed may never give its tensors back."""
_KEY = "context"
"""Torch's name for the context of a backward pass, which it keeps with the thread."""

_lent: list[ref[Any]] = []


def lend(tensor: Tensor) -> Tensor:
    """The same tensor under a name of its own, which nobody but the exchange is to hold."""
    name, context = tensor.detach(), _context()
    known = context is None or any(other() is context for other in _lent)
    _lent[:] = [other for other in _lent if other() is not None] + [ref(name)] + ([] if known else [ref(context)])
    return name


def settle() -> None:
    """Wait until all that was lent is back."""
    until = time.monotonic() + PATIENCE
    here = _context()  # older torch leaves the last one with the thread: then nobody waits for the lock
    while any(lent() is not None and lent() is not here for lent in _lent) and time.monotonic() < until:
        time.sleep(0.001)


def _context() -> Any:
    """The context of the backward pass that runs in this thread, if one does."""
    return torch._C._get_obj_in_tls(_KEY) if torch._C._is_key_in_tls(_KEY) else None


atexit.register(settle)
