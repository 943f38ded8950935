"""The certificate of a CUDA graph replay on its way to the host: copied once it is known, read once it has arrived.

The host does not wait for what a layer launches behind it, such as sums of gradients.
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
"""A value that no certificate has: it marks memory that a replay has yet to write."""
LOOKS = 2000
"""Polls in a busy loop of memory that a GPU is about to write, some 0.2 milliseconds; after them the thread naps."""
NAP, NAPS = 2e-5, 4000
"""Seconds between later polls, and their number: the thread should not wait for what the stream holds behind the
certificate. After them, it synchronizes with the stream."""
MOST_READ = 128
"""Largest certificate, in numbers, that the host reads."""
_present = threading.local()


class Listener:
    """Copies a pass's certificate to host memory."""

    def __init__(self, room: Tensor) -> None:
        self._room = room
        self.numbers: Tensor | float | None = None
        """The certificate where the host can read it; None if none was reported, or more numbers than fit in `room`."""
        self.heard = self.mended = False
        """Whether a pass has reported its certificate; and whether its own launches redo what is not certified."""

    def take(self, certificate: Tensor | float | None, mended: bool = False) -> None:
        """Take a certificate; only the first one counts."""
        if self.heard:
            return
        self.heard, self.numbers, self.mended = True, certificate, mended
        if isinstance(certificate, Tensor):
            place = self._room[: certificate.numel()]
            fits = len(place) == certificate.numel()
            self.numbers = place.copy_(certificate.view(-1), non_blocking=True) if fits else None


@contextmanager
def listening(room: Tensor) -> Iterator[Listener]:
    """Context in which certificates that this thread reports by `tell` are copied to `room`, pinned host memory."""
    listener = _present.listener = Listener(room)
    try:
        yield listener
    finally:
        _present.listener = None


def tell(certificate: Tensor | float, mended: bool = False) -> None:
    """Report a pass's certificate, the last of its results, before its remaining launches.

    mended: whether these redo what is not certified, so that results are exact whatever the certificate is.
    """
    listener: Listener | None = getattr(_present, "listener", None)
    if listener is not None:
        listener.take(certificate, mended)


def is_heard() -> bool:
    """Whether certificates reported by this thread reach the host."""
    return getattr(_present, "listener", None) is not None


class Certificate:
    """The certificate of a recording: host memory that its replays write, or a constant, the same for all of them.

    Unreadable if it is more than a few numbers. The memory is marked as unread before a replay, so that the host sees
    when it has been written.
    """

    def __init__(self, numbers: Tensor | float | None, stream: torch.cuda.Stream) -> None:
        self._always = numbers if isinstance(numbers, float) else None
        self._numbers = read_in_place(numbers) if isinstance(numbers, Tensor) else None
        self._stream = stream
        self.awaited = False
        """Whether the last replay's certificate has yet to be read."""
        self._marked = False

    @property
    def readable(self) -> bool:
        return self._always is not None or self._numbers is not None

    def expect(self) -> None:
        """Prepare for a replay; memory is marked only if the last replay was read, else that may still write to it."""
        if self._numbers is not None:
            self._marked, self.awaited = not self.awaited, True
            if self._marked:
                self._numbers[:] = [UNREAD] * len(self._numbers)

    def read(self) -> list[float] | None:
        """Wait for the last replay, or a later one, and return its certificate."""
        if self._numbers is None:
            return None if self._always is None else [self._always]
        if not self._marked or not arrives(self._numbers):
            self._stream.synchronize()
        return list(self._numbers)


def read_in_place(numbers: Tensor) -> ctypes.Array[ctypes.c_float]:
    """A view of a few numbers in host memory that can be polled without calling torch."""
    assert numbers.dtype == torch.float32
    found = (ctypes.c_float * numbers.numel()).from_address(numbers.data_ptr())
    found.tensor = numbers  # type: ignore[attr-defined]  # keeps the memory alive
    return found


def arrives(numbers: ctypes.Array[ctypes.c_float]) -> bool:
    """Poll until a GPU has written all numbers marked as unread; False if that takes longer than most passes do."""
    last = len(numbers) - 1
    if any(numbers[last] != UNREAD and UNREAD not in numbers for _ in range(LOOKS)):
        return True
    for _ in range(NAPS):
        time.sleep(NAP)
        if UNREAD not in numbers:
            return True
    return False
