"""Exchanges between ranks of one machine through shared memory, in a few microseconds, instead of sockets.

Every rank has two slots, and a count of the exchanges for which it has written. Exchange k uses slot k mod 2. A rank
reaches exchange k + 2 after all others have written for k + 1, and thus have read its data for k: two slots suffice.
"""

from __future__ import annotations

import mmap
import os
import platform
import secrets
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from weakref import finalize

import torch
from torch import Tensor

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

FOLDER = Path("/dev/shm")
SLOT = 1 << 17
"""Bytes of a slot; larger tensors are sent in pieces."""
LINE = 8
"""8-byte words in a cache line: each rank's count and sizes have a line to themselves."""
SPIN = timedelta(milliseconds=2)
"""How long a waiting rank polls without sleeping."""
NAP = 5e-5
"""Seconds of sleep between later polls."""
SMALL = 4096
"""Bytes up to which every rank sums up everything; of larger tensors, each rank sums up a share."""

Look = Callable[[], None]
"""Called repeatedly while waiting: raises if a rank has failed or the wait takes too long."""


class SharedMemory:
    """The shared memory of a group, as one rank maps it. All ranks call the same methods in the same order.

    Only x86 makes ordinary stores visible in order, so `create` makes no such memory elsewhere.
    """

    def __init__(self, path: str, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._file = os.open(path, os.O_RDWR)  # the lock below is held as long as this is open
        finalize(self, os.close, self._file)
        self._memory = mmap.mmap(self._file, length_for(size))
        self._lines = memoryview(self._memory).cast("Q")
        self._slots = torch.frombuffer(self._memory, dtype=torch.uint8, offset=8 * LINE * size).view(size, 2, SLOT)
        self._done = 0
        self._spin = SPIN.total_seconds() if len(os.sched_getaffinity(0)) >= size else 0.0
        fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)

    @staticmethod
    def create(size: int) -> str:
        """The path of new memory for `size` ranks; empty if it cannot be created."""
        if not possible():
            return ""
        path = FOLDER / f"timeloom-{secrets.token_hex(8)}"
        try:
            file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
            try:
                os.posix_fallocate(file, 0, length_for(size))  # fail here, not by a signal at the first use
            except OSError:
                path.unlink()
                raise
            finally:
                os.close(file)
        except OSError:
            return ""
        return str(path)

    def gone(self) -> list[int]:
        """Ranks whose process has ended, and with it its lock."""
        return [rank for rank in range(self.size) if rank != self.rank and self._unlocked(rank)]

    def _unlocked(self, rank: int) -> bool:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        except OSError:
            return False
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, rank)
        return True

    def gather(self, tensor: Tensor, look: Look) -> Tensor:
        """Every rank's tensor, `(R, ...)`; all must have the same shape."""
        gathered = tensor.new_empty(self.size, tensor.numel())
        own, heard = tensor.reshape(-1).view(torch.uint8), gathered.view(torch.uint8)
        for begin in range(0, len(own), SLOT):
            self._exchange(own[begin : begin + SLOT], heard[:, begin : begin + SLOT], look)
        return gathered.view(self.size, *tensor.shape)

    def sum(self, tensor: Tensor, look: Look) -> Tensor:
        """The sum over ranks: each rank sums up its share of the elements and gathers the others' sums."""
        if tensor.numel() * tensor.element_size() <= SMALL:
            return self.gather(tensor, look).sum(0, dtype=tensor.dtype)
        own, total = tensor.reshape(-1), torch.empty_like(tensor, memory_format=torch.contiguous_format)
        flat, most = total.view(-1), SLOT // tensor.element_size()
        for begin in range(0, len(own), most):
            piece = own[begin : begin + most]
            self._tell(piece.view(torch.uint8))
            share = -(-len(piece) // self.size)
            mine = slice(self.rank * share, min((self.rank + 1) * share, len(piece)))
            heard = self._hear(look)[:, : piece.nbytes].view(tensor.dtype)
            sums = own.new_zeros(share)
            sums[: max(mine.stop - mine.start, 0)] = heard[:, mine].sum(0)
            flat[begin : begin + most] = self.gather(sums, look).view(-1)[: len(piece)]
        return total

    def _exchange(self, own: Tensor, gathered: Tensor, look: Look) -> None:
        self._tell(own)
        gathered.copy_(self._hear(look)[:, : len(own)])

    def _tell(self, own: Tensor) -> None:
        slot, line = self._done % 2, LINE * self.rank
        self._slots[self.rank, slot, : len(own)] = own
        self._lines[line + 1 + slot] = len(own)
        self._lines[line] = self._done + 1

    def _hear(self, look: Look) -> Tensor:
        """The slots of all ranks, `(R, SLOT)`, once all have written."""
        lines, slot, wanted = self._lines, self._done % 2, self._done + 1
        self._done = wanted
        for rank in range(self.size):
            if lines[LINE * rank] < wanted:
                self._await(LINE * rank, wanted, look)
        bytes_told = [lines[LINE * rank + 1 + slot] for rank in range(self.size)]
        if len(set(bytes_told)) > 1:
            raise RuntimeError(f"the ranks gave tensors of different sizes in one exchange: {bytes_told} bytes")
        return self._slots[:, slot]

    def _await(self, at: int, wanted: int, look: Look) -> None:
        lines, until = self._lines, time.perf_counter() + self._spin
        while lines[at] < wanted and time.perf_counter() < until:
            os.sched_yield()
        while lines[at] < wanted:
            look()
            time.sleep(NAP)


def possible() -> bool:
    """Whether this machine supports such memory."""
    return fcntl is not None and platform.machine() in ("x86_64", "AMD64") and FOLDER.is_dir()


def length_for(size: int) -> int:
    """Bytes of the memory for `size` ranks."""
    return size * (8 * LINE + 2 * SLOT)
