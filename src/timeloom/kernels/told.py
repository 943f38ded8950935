"""A certificate on its way to the host while a CUDA graph is recorded: it is copied as soon as it is known.

What a layer launches behind it, sums of gradients, the host does not wait for.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

_present = threading.local()


class Listener:
    """Takes a certificate into memory of the host."""

    def __init__(self, room: Tensor) -> None:
        self._room = room
        self.numbers: Tensor | float | None = None
        """Where the host can read it; None where nothing was told, or more numbers than there is room for."""
        self.heard = False

    def take(self, certificate: Tensor | float | None) -> None:
        """The first one counts."""
        if self.heard:
            return
        self.heard, self.numbers = True, certificate
        if isinstance(certificate, Tensor):
            place = self._room[: certificate.numel()]
            fits = len(place) == certificate.numel()
            self.numbers = place.copy_(certificate.view(-1), non_blocking=True) if fits else None


@contextmanager
def listening(room: Tensor) -> Iterator[Listener]:
    """Inside, what is told in this thread is copied to `room`, of the host's pinned memory."""
    listener = _present.listener = Listener(room)
    try:
        yield listener
    finally:
        _present.listener = None


def tell(certificate: Tensor | float) -> None:
    """A pass knows its certificate, the last of its results; more is launched behind it."""
    listener: Listener | None = getattr(_present, "listener", None)
    if listener is not None:
        listener.take(certificate)
