"""Tensors that torch's own threads hold for an exchange: a process does not end before it has them back.

gloo's threads let go of a collective's tensors after those who wait for it have gone on. Letting go of a tensor that
Python knows takes Python's lock, and a thread that asks for the lock of an ending interpreter aborts the process: a run
that has done all its work would fail in its last moment.
"""

from __future__ import annotations

import atexit
import time
from weakref import ref

from torch import Tensor

PATIENCE = 5.0
"""Seconds that an ending process waits, at most: an exchange that failed may never give its tensors back."""

_lent: list[ref[Tensor]] = []


def lend(*tensors: Tensor) -> list[Tensor]:
    """The same tensors under names of their own, which nobody but the exchange is to hold."""
    names = [tensor.detach() for tensor in tensors]
    _lent[:] = [name for name in _lent if name() is not None] + [ref(name) for name in names]
    return names


def settle() -> None:
    """Wait until all that was lent is back."""
    until = time.monotonic() + PATIENCE
    while any(name() is not None for name in _lent) and time.monotonic() < until:
        time.sleep(0.001)


atexit.register(settle)
