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
from dataclasses import dataclass, replace
from functools import cache
from itertools import count
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from timeloom.kernels import faults
from timeloom.kernels.cuda import side_streams
from timeloom.kernels.layer import Cutting, Gradients, Layer
from timeloom.known import Entry
from timeloom.torch_state import streams, tf32

CALLS_BEFORE = 2
"""Calls of a kind that are launched as they are: plans change in the first calls, and recording costs some of them."""
MOST_KEYS = 256
"""Kinds of calls that are counted, at most."""
SHARE_OF_ONE, SHARE_OF_ALL = 64, 16
"""A recording may take so small a part of a GPU's memory, and all of them together so small a one."""

MOST_READ = 128
"""Numbers of a certificate that the host reads, at most."""
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
        self._stream, self._numbers, self._settings = stream, numbers, _settings()
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
        return self._numbers is not None

    def read(self, turn: int) -> float | None:
        """Wait for the GPU, and tell the certificate of a replay, of several numbers the last; None where another
        thread's has come between.
        """
        numbers = self.read_all(turn)
        return None if numbers is None else numbers[-1]

    def read_all(self, turn: int) -> list[float] | None:
        """The same of all its numbers."""
        if not isinstance(self._numbers, Tensor):
            return None if self._numbers is None else [self._numbers]
        self._stream.synchronize()
        certificate: list[float] = self._numbers.view(-1).tolist()
        return certificate if self.used == turn else None

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
    few = [index for index, tensor in enumerate(given) if tensor.numel() <= FEW]
    if len(few) < len(given):
        for place, tensor in zip(places, given, strict=True):
            if tensor.numel() > FEW:
                place.copy_(tensor)
        places, given = [places[index] for index in few], [given[index] for index in few]
    if few:
        torch._foreach_copy_(places, given)  # type: ignore[arg-type]


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


def forward(
    layer: Layer, cutting: Cutting, share_of_box: float, keep: bool, entry: Entry | None = None
) -> tuple[list[Tensor], Tensor | float]:
    """`layer.forward`, replayed where that is possible."""

    def body(given: Sequence[Tensor | None]) -> Sequence[Tensor | float | None]:
        x, initial, starts, *fresh = given
        more: dict[str, Any] = {} if entry is None else {"entry": replace(entry, starts=starts)}  # type: ignore[arg-type]
        kept, certificate = layer.over(x, initial, fresh).forward(cutting, share_of_box, keep, **more)  # type: ignore[arg-type]
        return *kept, certificate

    given = layer.x, layer.initial, None if entry is None else entry.starts, *layer.fresh.values()
    if not layer.recordable(cutting):
        *kept, certificate = body(given)
    else:
        key = _forward_key(layer, cutting, share_of_box, keep, None if entry is None else entry.every)
        *kept, certificate = RECORDINGS.run(key, given, _size(layer), body)
    return kept, certificate  # type: ignore[return-value]


def recorded_forward(layer: Layer, cutting: Cutting, share_of_box: float, keep: bool) -> Recording | None:
    """What `forward` replays, where it does."""
    return RECORDINGS.known(_forward_key(layer, cutting, share_of_box, keep, None), layer.x.device)


def backward(
    layer: Layer, cutting: Cutting, kept: list[Tensor], grads: tuple[Tensor | None, Tensor | None], want_x: bool
) -> tuple[Gradients, Tensor | float]:
    """`layer.backward`, replayed where that is possible."""
    if not layer.recordable(cutting):
        return layer.backward(cutting, kept, grads, want_x)

    fresh = tuple(layer.fresh.values())

    def body(given: Sequence[Tensor | None]) -> Sequence[Tensor | float | None]:
        x, initial, incoming, final, *others = given
        tensors: list[Any] = others
        at = layer.over(x, initial, tensors[len(kept) :])  # type: ignore[arg-type]
        found, certificate = at.backward(cutting, tensors[: len(kept)], (incoming, final), want_x)
        return *found, certificate

    given, ground = (layer.x, layer.initial, *grads, *kept, *fresh), RECORDINGS.lender(kept)
    if ground is not None and len(ground.fresh) != len(fresh):
        ground = None
    key = _backward_key(layer, cutting, grads, want_x, ground)
    before = CALLS_BEFORE + 2 if ground is None else 0  # a pass that lends comes soon, if any
    *found, certificate = RECORDINGS.run(key, given, _size(layer), body, before, ground)
    return tuple(found), certificate


def recorded_backward(
    layer: Layer, cutting: Cutting, grads: tuple[Tensor | None, Tensor | None], want_x: bool, ground: Recording
) -> Recording | None:
    """What `backward` replays of what this forward pass has lent, where it does."""
    return RECORDINGS.known(_backward_key(layer, cutting, grads, want_x, ground), layer.x.device)


def _forward_key(layer: Layer, cutting: Cutting, share_of_box: float, keep: bool, every: int | None) -> Hashable:
    return _key(layer, cutting), share_of_box, keep, every


def _backward_key(
    layer: Layer,
    cutting: Cutting,
    grads: tuple[Tensor | None, Tensor | None],
    want_x: bool,
    ground: Recording | None,
) -> Hashable:
    return _key(layer, cutting), tuple(None if grad is None else grad.dtype for grad in grads), want_x, ground


def _here(key: Hashable, device: torch.device) -> Hashable:
    """A kind of call on the current stream, as torch is set."""
    return key, streams.stream_of(device), _settings()


def _begins_with(key: Any, owner: object) -> bool:
    """Of a key as `_here` has made it."""
    return isinstance(key[0], tuple) and key[0][0] is owner


def _settings() -> tuple[bool, bool]:
    """What kernels are chosen by beside sizes: whether results must be the same every time, and how products round."""
    return torch.are_deterministic_algorithms_enabled(), tf32.cudnn_rounds()


def _key(layer: Layer, cutting: Cutting) -> Hashable:
    """Kind, sizes and plan, and where the weights lie that a recording reads."""
    x, fresh, weights = layer.x, layer.fresh, (layer.w_ih, layer.w_hh, layer.b_ih, layer.b_hh)
    read = (weight for weight in weights if not any(weight is one for one in fresh.values()))
    places = *fresh, *(None if weight is None else (weight.data_ptr(), weight.stride()) for weight in read)
    sizes = x.shape, x.dtype, layer.w_ih.dtype, layer.w_hh.shape, layer.initial.dtype, layer.kernel, layer.cell.masks
    plan = cutting.chunk, cutting.warmup, cutting.sweeps, cutting.dense, cutting.newton
    return type(layer), x.device, sizes, plan, places


def _size(layer: Layer) -> int:
    """Bytes of a pass, about: inputs, projected inputs, states and what is kept; of a backward pass gradients of them
    all, of which gates' are as wide as what is kept.
    """
    steps, batch, width = layer.x.shape
    cell = layer.cell
    return 4 * steps * batch * (2 * width + cell.gate_width + cell.size + layer.tape_width(cell))


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
                results = list(body(places))
                numbers = results[-1]
                if isinstance(numbers, Tensor):
                    read = room[: numbers.numel()]
                    few = len(read) == numbers.numel()
                    numbers = read.copy_(numbers.view(-1), non_blocking=True) if few else None
            finally:
                graph.capture_end()
        size = max(size, torch.cuda.memory_reserved() - before)
    return Recording(graph, places, results, size, stream, numbers, ground)


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
