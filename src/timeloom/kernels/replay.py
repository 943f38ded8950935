"""CUDA graphs of a layer's own: what a plan launches on a GPU is recorded once, and replayed behind eager calls.

A call of a layer is many short launches, each of which costs the host more than the GPU. From the third call with the
same sizes, plan and weights on, they are one replay: what changes from call to call is copied in, what a caller keeps
is copied out. Parameters are read where they lie, so an optimizer's changes are seen; whoever moves them gets a
recording of his own. Weights that are made for each call, as masked ones are, are copied in as inputs are. Recordings
are of one stream, whose order keeps replays apart, and a lock keeps threads apart.
Inside a graph that a user captures nothing is replayed: his graph takes the launches themselves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from timeloom.kernels import faults
from timeloom.kernels.cuda import side_streams
from timeloom.kernels.told import MOST_READ, Certificate, listening
from timeloom.torch_state import streams, tf32

CALLS_BEFORE = 2
"""Calls of a kind that are launched as they are: plans change in the first calls, and recording costs some of them."""
MOST_KEYS = 256
"""Kinds of calls that are counted, at most."""
SHARE_OF_ONE, SHARE_OF_ALL = 64, 16
"""A recording may take so small a part of a GPU's memory, and all of them together so small a one."""

FEW = 8192
"""Numbers that are copied together with others: a launch for many tensors gives each of them few threads."""
_CALLS = count()
"""Numbers the calls that recordings see."""

Body = Callable[[Sequence[Tensor | None]], Sequence[Tensor | float | None]]
"""`body(given)`: results from what changes from call to call."""


@dataclass(eq=False, slots=True)
class _Seen:
    """A kind of call that has no recording, or cannot have one."""

    calls: int = 0
    used: int = 0
    recordable: bool = True


class Places(list[Tensor]):
    """Tensors of a recording, in a list that can be held weakly."""


class Recording:
    """A graph, the places that it reads what is given from, None where that is None, and those of its results.

    Results are copied out, or lent: whoever holds a lent tensor when the next replay comes finds it copied then. One of
    a backward pass may stand on the `ground` of a forward pass's: it reads what that has, where it lies.

    numbers: the certificate, the last result, where the host can read it; None of one that is not one or a few numbers.
    """

    def __init__(
        self,
        graph: torch.cuda.CUDAGraph,
        given: list[Tensor | None],
        results: list[Tensor | float | None],
        size: int,
        stream: torch.cuda.Stream,
        numbers: Tensor | float | None,
        ground: Recording | None = None,
    ) -> None:
        self.given, self.results, self.size, self.ground = given, results, size, ground
        self._stream, self._settings = stream, _settings()
        self._certificate = Certificate(numbers, stream)
        self.at_zero = False
        """Whether the second thing given, an initial state, is zero where it lies."""
        self.used = 0
        """When it was last replayed: a number of `_CALLS`."""
        self.device = next(place.device for place in given if place is not None)
        self._graph: torch.cuda.CUDAGraph | None = graph
        self._held: list[ReferenceType[Places]] = []
        self._lent: list[ReferenceType[Tensor]] = []

    @property
    def fresh(self) -> list[Tensor | None]:
        """Where a forward pass reads weights that are made for every call: behind x, initial and known states."""
        return self.given[3:]

    @property
    def here(self) -> bool:
        """Whether it may be replayed now: it was not dropped to make room, and stream and settings are its own."""
        device = self.device
        return (
            self._graph is not None
            and streams.may_replay(device)
            and streams.stream_of(device) == self._stream.cuda_stream
            and _settings() == self._settings
        )

    def replay(self, given: Sequence[Tensor | None]) -> list[Any]:
        """Results in memory of their own."""
        places = [place for place in self.given if place is not None]
        wanted = [result for result in self.results if isinstance(result, Tensor)]
        copied = [tensor for tensor in given if tensor is not None]
        found = iter((self.replay_some(places, copied, wanted) or ((), 0))[0])
        return [next(found) if isinstance(result, Tensor) else result for result in self.results]

    def replay_some(
        self, places: list[Tensor], given: Sequence[Tensor | None], wanted: list[Tensor], lent: int = 0
    ) -> tuple[list[Tensor], int] | None:
        """The same of a call that knows what changed since the last one, which results it wants, and behind them how
        many of the first results it wants to be lent; also which replay it was, for `read`. An initial state, the
        second thing given, may be None for zero. The answer is None where the recording has been dropped.
        """
        with RECORDINGS.lock:
            if self._graph is None:
                return None
            if self._lent:
                self.take_back()
            self.used = turn = next(_CALLS)  # before the launch: what is then read is of this replay or a later one
            if len(given) > 1 and given[1] is None:
                if not self.at_zero:
                    places[1].zero_()
                    self.at_zero = True
                places, given = [places[0], *places[2:]], [given[0], *given[2:]]
            else:
                self.at_zero = False
            copy(places, given)
            self._certificate.expect()
            self._graph.replay()
            found = [torch.empty_like(result) for result in wanted]
            copy(found, wanted)
            for result in self.results[:lent]:
                assert isinstance(result, Tensor)
                alias = result.data
                self._lent.append(ref(alias))
                found.append(alias)
        return found, turn

    @property
    def readable(self) -> bool:
        """Whether `read` can tell its certificate."""
        return self._certificate.readable

    def read(self, turn: int) -> float | None:
        """Wait for the GPU, and tell the certificate of a replay, of several numbers the last; None where another
        thread's has come between.
        """
        numbers = self.read_all(turn)
        return None if numbers is None else numbers[-1]

    def read_all(self, turn: int) -> list[float] | None:
        """The same of all its numbers."""
        numbers = self._certificate.read()
        if self.used != turn:
            return None
        self._certificate.awaited = False
        return numbers

    def has(self, lent: Tensor) -> bool:
        """Whether this is its first result, still lent: all that it was given and found is still there."""
        first = self.results[0] if self.results else None
        return isinstance(first, Tensor) and first.data_ptr() == lent.data_ptr()

    def take_back(self) -> None:
        """Have those that hold lent tensors hold copies."""
        for lent in self._lent:
            tensor = lent()
            if tensor is not None:
                tensor.data = tensor.clone()  # the same tensor for autograd, which does not take it for a change
        self._lent = []

    def hold(self, places: list[Tensor]) -> list[Tensor]:
        """Places for a caller to hold: the list is empty once the recording is dropped, so that its memory is free."""
        held = Places(places)
        self._held = [*(one for one in self._held if one() is not None), ref(held)]
        return held

    def drop(self) -> None:
        """Give its memory back; what is lent stays with those that hold it."""
        for held in self._held:
            places = held()
            if places is not None:
                places.clear()
        self.given, self.results, self._lent, self._graph = [], [], [], None


def copy(places: Sequence[Tensor], given: Sequence[Any]) -> None:
    """Copy tensors to their places: small ones together, others by a launch each, which then fills the GPU."""
    small: list[Tensor] = []
    few: list[Tensor] = []
    for place, tensor in zip(places, given, strict=True):
        if place.numel() > FEW:
            place.copy_(tensor)
        else:
            small.append(place)
            few.append(tensor)
    if len(few) == 1:
        small[0].copy_(few[0])
    elif few:
        torch._foreach_copy_(small, few)


class Recordings:
    """The recordings of one process, and the counts of calls that have none yet."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Recording | _Seen] = {}
        self.lock = threading.RLock()
        """Keeps the replays of threads apart."""

    def run(
        self,
        key: Hashable,
        given: Sequence[Tensor | None],
        size: int,
        body: Body,
        before: int = CALLS_BEFORE,
        ground: Recording | None = None,
    ) -> Sequence[Any]:
        """What `body(given)` returns, by a replay where more calls of this kind than `before` have been seen. `size`:
        bytes that it takes, about. `key` must hold all that the body reads beside what is given, and how.
        """
        device = next(tensor.device for tensor in given if tensor is not None)
        if size > _memory(device) // SHARE_OF_ONE or streams.capturing(device):
            return body(given)
        key = _here(key, device)
        with self.lock:
            known = self._known.setdefault(key, _Seen())
            if isinstance(known, _Seen):
                known.calls, known.used = known.calls + 1, next(_CALLS)
                recording = None
                if known.recordable and known.calls > before:
                    recording = _recorded(given, size, body, ground)
                    known.recordable = recording is not None
                if recording is not None:
                    recording.used = known.used
                    known = self._known[key] = recording
                if ground is not None:
                    ground.used = known.used  # what stands on it would go with it
                self._shrink(device)
            if isinstance(known, Recording) and self._known.get(key) is known:
                return known.replay(given)
        return body(given)

    def known(self, key: Hashable, device: torch.device) -> Recording | None:
        """The recording of a kind of call on the current stream, where there is one."""
        known = self._known.get(_here(key, device))
        return known if isinstance(known, Recording) else None

    def _shrink(self, device: torch.device) -> None:
        """Drop what was not used for longest."""
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
        """Drop the recordings whose keys begin with this."""
        with self.lock:
            for key in [key for key, _ in self._recordings() if _begins_with(key, owner)]:
                if key in self._known:  # it may have gone with another
                    self._drop(key)

    def lender(self, kept: Sequence[Tensor]) -> Recording | None:
        """The recording of a forward pass that has lent what it kept, where this is still lent."""
        with self.lock:
            return next((recording for _, recording in self._recordings() if recording.has(kept[0])), None)

    def _recordings(self) -> Iterator[tuple[Hashable, Recording]]:
        return ((key, known) for key, known in self._known.items() if isinstance(known, Recording))

    @property
    def size(self) -> int:
        """Bytes that all recordings take, about."""
        return sum(recording.size for _, recording in self._recordings())

    @property
    def _largest(self) -> int:
        return max((recording.size for _, recording in self._recordings()), default=0)

    def __len__(self) -> int:
        """Recordings."""
        return sum(1 for _ in self._recordings())

    def clear(self) -> None:
        """Forget all recordings; their memory is free again."""
        with self.lock:
            for _, recording in self._recordings():
                recording.drop()
            self._known.clear()


RECORDINGS = Recordings()


def _here(key: Hashable, device: torch.device) -> Hashable:
    """A kind of call on the current stream, as torch is set."""
    return key, streams.stream_of(device), _settings()


def _begins_with(key: Any, owner: object) -> bool:
    """Of a key as `_here` has made it."""
    return isinstance(key[0], tuple) and key[0][0] is owner


def _settings() -> tuple[bool, bool]:
    """What kernels are chosen by beside sizes: whether results must be the same every time, and how products round."""
    return torch.are_deterministic_algorithms_enabled(), tf32.cudnn_rounds()


def _recorded(
    given: Sequence[Tensor | None], size: int, body: Body, ground: Recording | None = None
) -> Recording | None:
    """A recording, or None of a kind that cannot be recorded: its calls go on being launched as they are."""
    try:
        return _record(given, size, body, ground)
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError | faults.KernelFault):  # the launches themselves tell of these
            faults.tell(f"a CUDA graph of a layer cannot be recorded ({error})", "its calls are launched one by one")
        return None


def _record(given: Sequence[Tensor | None], size: int, body: Body, ground: Recording | None) -> Recording:
    """Record a body on a stream of its own, so that nothing else gets into the graph."""
    device = next(tensor.device for tensor in given if tensor is not None)
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(False), torch.no_grad(), torch.cuda.device(device):
        places = places_for(given, ground)
        room = torch.empty(MOST_READ, pin_memory=True, device="cpu", dtype=torch.float32)
        stream = torch.cuda.current_stream()
        side, before = side_streams.beside(stream), torch.cuda.memory_reserved()
        side.wait_stream(stream)
        with torch.cuda.stream(side):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                with listening(room) as listener:
                    results = list(body(places))
                listener.take(results[-1])
            finally:
                graph.capture_end()
        size = max(size, torch.cuda.memory_reserved() - before)
    return Recording(graph, places, results, size, stream, listener.numbers, ground)


def places_for(given: Sequence[Tensor | None], ground: Recording | None) -> list[Tensor | None]:
    """Where a recording is to read what is given: of a backward pass on the ground of a forward pass, x, the initial
    state, what was kept and fresh weights lie there; the gradients between them do not.
    """
    places: list[Any] = [None] * len(given)
    if ground is not None:
        kept = len(given) - 4 - len(ground.fresh)
        places = [*ground.given[:2], None, None, *ground.results[:kept], *ground.fresh]
    return [
        torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) if place is None and tensor is not None
        else place for place, tensor in zip(places, given, strict=True)
    ]  # fmt: skip


@cache
def _memory(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).total_memory)
