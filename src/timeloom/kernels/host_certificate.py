"""The certificate of a replay on its way to the host: it is copied as soon as it is known, and read once it is there.

What a layer launches behind it, sums of gradients, the host does not wait for.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

UNREAD = -1.0
"""What no certificate is."""
LOOKS = 2000
"""At memory that a GPU is about to write to, some 0.2 milliseconds: beyond that, the thread looks now and then."""
NAP, NAPS = 2e-5, 4000
"""Seconds between two later looks, and how many there are of them: what is on the stream behind a certificate is not to
be waited for. Beyond that, the thread waits as torch does."""
MOST_READ = 128
"""Numbers of a certificate that the host reads, at most."""
_present = threading.local()


class Listener:
    """Takes a certificate into memory of the host."""

    def __init__(self, room: Tensor) -> None:
        self._room = room
        self.numbers: Tensor | float | None = None
        """Where the host can read it; None where nothing was told, or more numbers than there is room for."""
        self.heard = self.mended = False
        """Whether a pass has told its certificate; and whether its own launches mend what is not certified."""

    def take(self, certificate: Tensor | float | None, mended: bool = False) -> None:
        """The first one counts."""
        if self.heard:
            return
        self.heard, self.numbers, self.mended = True, certificate, mended
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


def tell(certificate: Tensor | float, mended: bool = False) -> None:
    """A pass knows its certificate, the last of its results; more is launched behind it, and where that mends what is
    not certified, results are exact whatever the certificate is.
    """
    listener: Listener | None = getattr(_present, "listener", None)
    if listener is not None:
        listener.take(certificate, mended)


def is_heard() -> bool:
    """Whether what is told in this thread gets to the host."""
    return getattr(_present, "listener", None) is not None


class Certificate:
    """What replays of one recording write to memory of the host, or what all of them would; nothing where it is not one
    or a few numbers. A replay marks that memory as unread, so that the host can see when it is written.
    """

    def __init__(self, numbers: Tensor | float | None, stream: torch.cuda.Stream) -> None:
        self._always = numbers if isinstance(numbers, float) else None
        self._numbers = read_in_place(numbers) if isinstance(numbers, Tensor) else None
        self._stream = stream
        self.awaited = False
        """Whether nobody has read yet what the last replay is to write."""
        self._marked = False

    @property
    def readable(self) -> bool:
        return self._always is not None or self._numbers is not None

    def expect(self) -> None:
        """A replay is about to begin. One that nobody has read may still write, and over a mark, too."""
        if self._numbers is not None:
            self._marked, self.awaited = not self.awaited, True
            if self._marked:
                self._numbers[:] = [UNREAD] * len(self._numbers)

    def read(self) -> list[float] | None:
        """Wait for the last replay, or for one that came after."""
        if self._numbers is None:
            return None if self._always is None else [self._always]
        if not self._marked or not arrives(self._numbers):
            self._stream.synchronize()
        return list(self._numbers)


def read_in_place(numbers: Tensor) -> ctypes.Array[ctypes.c_float]:
    """A few numbers of the host's where they lie, to be looked at without a call of torch's."""
    assert numbers.dtype == torch.float32
    found = (ctypes.c_float * numbers.numel()).from_address(numbers.data_ptr())
    found.tensor = numbers  # type: ignore[attr-defined]  # whose memory it is
    return found


def arrives(numbers: ctypes.Array[ctypes.c_float]) -> bool:
    """Look whether a GPU has written numbers that were marked as unread, for as long as most passes take."""
    last = len(numbers) - 1
    if any(numbers[last] != UNREAD and UNREAD not in numbers for _ in range(LOOKS)):
        return True
    for _ in range(NAPS):
        time.sleep(NAP)
        if UNREAD not in numbers:
            return True
    return False
