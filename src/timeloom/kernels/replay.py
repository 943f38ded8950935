"""CUDA graphs of a layer's passes: what a plan launches on a GPU is captured once, and replayed behind eager calls.

A call of a layer is many short launches, each of which takes the host longer than the GPU. From the third call with the
same sizes, plan and weights on, they are one replay: inputs that change from call to call are copied in, results that a
caller keeps are copied out. Parameters are read in place, so an optimizer's updates are seen; parameters that move get
a new recording. Weights that are made for each call, such as masked ones, are copied in like inputs. A recording
belongs to one stream, whose order keeps replays apart, and a lock keeps threads apart.
While a user captures a graph nothing is replayed: that graph takes the launches themselves.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from timeloom.kernels import faults
from timeloom.kernels.recording import CALLS, LOCK, Body, Recording, record, settings
from timeloom.torch_state import streams

CALLS_BEFORE = 2
"""Calls of a kind that are launched directly: plans change in the first calls, and a capture costs several calls."""
MOST_KEYS = 256
"""Largest number of kinds of calls that are counted."""
SHARE_OF_ONE, SHARE_OF_ALL = 64, 16
"""One recording may take at most 1/SHARE_OF_ONE of a GPU's memory, all of them together 1/SHARE_OF_ALL."""


@dataclass(eq=False, slots=True)
class _Seen:
    """A kind of call that has no recording, or cannot have one."""

    calls: int = 0
    used: int = 0
    recordable: bool = True


class Recordings:
    """The recordings of one process, and the counts of calls that have none yet."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Recording | _Seen] = {}
        self._families: dict[Hashable, int] = {}
        """Calls that were launched directly or recorded, by families, those of the last call last."""
        self.lock = LOCK

    def run(
        self,
        key: Hashable,
        given: Sequence[Tensor | None],
        size: int,
        body: Body,
        before: int = CALLS_BEFORE,
        ground: Recording | None = None,
        family: Hashable = None,
    ) -> Sequence[Any]:
        """Return `body(given)`, by a replay once more than `before` calls of this kind have been seen.

        key: everything that the body reads beside `given`, and how it runs. size: approximate bytes of a recording.
        family: kinds of calls that count together, if given.
        """
        device = next(tensor.device for tensor in given if tensor is not None)
        if size > _memory(device) // SHARE_OF_ONE or streams.capturing(device):
            return body(given)
        key = _here(key, device)
        with self.lock:
            known = self._known.setdefault(key, _Seen())
            if isinstance(known, _Seen):
                known.calls, known.used = known.calls + 1, next(CALLS)
                recording, calls = None, known.calls
                if family is not None:
                    calls = self._families[family] = self._families.pop(family, 0) + 1
                if known.recordable and calls > before:
                    recording = _recorded(given, size, body, ground)
                    known.recordable = recording is not None
                if recording is not None:
                    recording.used = known.used
                    known = self._known[key] = recording
                if ground is not None:
                    ground.used = known.used  # recordings that stand on it would be dropped with it
                self._shrink(device)
            if isinstance(known, Recording) and self._known.get(key) is known:
                return known.replay(given)
        return body(given)

    def known(self, key: Hashable, device: torch.device) -> Recording | None:
        """The recording of a kind of call on the current stream, if there is one."""
        known = self._known.get(_here(key, device))
        return known if isinstance(known, Recording) else None

    def _shrink(self, device: torch.device) -> None:
        """Drop the least recently used kinds of calls until their number and memory are within limits."""
        while len(self._families) > MOST_KEYS:
            del self._families[next(iter(self._families))]
        while len(self._known) > MOST_KEYS or self.size > max(self._largest, _memory(device) // SHARE_OF_ALL):
            kinds = self._known if len(self._known) > MOST_KEYS else dict(self._recordings())
            self._drop(min(kinds, key=lambda key: kinds[key].used))

    def _drop(self, key: Hashable) -> None:
        dropped = self._known.pop(key)
        if isinstance(dropped, Recording):
            dropped.drop()
            for above in [other for other, recording in self._recordings() if recording.ground is dropped]:
                self._drop(above)

    def forget(self, owner: object) -> None:
        """Drop the recordings whose keys begin with `owner`."""
        with self.lock:
            for key in [key for key, _ in self._recordings() if _begins_with(key, owner)]:
                if key in self._known:  # it may have been dropped with its ground
                    self._drop(key)

    def discard(self, recording: Recording) -> None:
        """Drop a recording; calls of its kind are counted anew."""
        with self.lock:
            for key in [key for key, known in self._known.items() if known is recording]:
                self._drop(key)

    def lender(self, kept: Sequence[Tensor]) -> Recording | None:
        """The recording of the forward pass that has lent these tensors, if they are still lent."""
        with self.lock:
            return next((recording for _, recording in self._recordings() if recording.has(kept[0])), None)

    def _recordings(self) -> Iterator[tuple[Hashable, Recording]]:
        return ((key, known) for key, known in self._known.items() if isinstance(known, Recording))

    @property
    def size(self) -> int:
        """Approximate bytes of all recordings."""
        return sum(recording.size for _, recording in self._recordings())

    @property
    def _largest(self) -> int:
        return max((recording.size for _, recording in self._recordings()), default=0)

    def __len__(self) -> int:
        """The number of recordings."""
        return sum(1 for _ in self._recordings())

    def clear(self) -> None:
        """Drop all recordings and free their memory."""
        with self.lock:
            dropped = [recording for _, recording in self._recordings()]
            self._known.clear()
            self._families.clear()
            for recording in dropped:
                recording.drop()


RECORDINGS = Recordings()


def _here(key: Hashable, device: torch.device) -> Hashable:
    """The key of a kind of call on the current stream, under torch's current settings."""
    return key, streams.stream_of(device), settings()


def _begins_with(key: Any, owner: object) -> bool:
    """Whether a key made by `_here` begins with `owner`."""
    return isinstance(key[0], tuple) and key[0][0] is owner


def _recorded(
    given: Sequence[Tensor | None], size: int, body: Body, ground: Recording | None = None
) -> Recording | None:
    """A recording, or None for a kind that cannot be captured, whose calls go on being launched directly."""
    try:
        return record(given, size, body, ground)
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError | faults.KernelFault):  # reported by the launches themselves
            faults.tell(f"a CUDA graph of a layer cannot be recorded ({error})", "its calls are launched one by one")
        return None


@cache
def _memory(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).total_memory)
