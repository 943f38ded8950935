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


def lend(tensor: Tensor) -> Tensor:
    """The same tensor under a name of its own, which nobody but the exchange is to hold."""
    name = tensor.detach()
    _lent[:] = [other for other in _lent if other() is not None] + [ref(name)]
    return name


def settle() -> None:
    """Wait until all that was lent is back."""
    until = time.monotonic() + PATIENCE
    while any(name() is not None for name in _lent) and time.monotonic() < until:
        time.sleep(0.001)


atexit.register(settle)
