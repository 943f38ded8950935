"""A recording: the CUDA graph of one pass, where it reads what changes from call to call, and where its results lie.

What changes is copied in, what a caller keeps is copied out, or lent until the next replay. Parameters are read where
they lie. A recording is of one stream, whose order keeps its replays apart; `kernels.replay` says which there are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from timeloom.kernels.cuda import driver, side_streams
from timeloom.kernels.host_certificate import MOST_READ, Certificate, listening
from timeloom.torch_state import streams, tf32

FEW = 8192
"""Numbers that are copied together with others: a launch for many tensors gives each of them few threads."""
CALLS = count()
"""Numbers the calls that recordings see."""
LOCK = threading.RLock()
"""Keeps the replays of threads apart."""

Body = Callable[[Sequence[Tensor | None]], Sequence[Tensor | float | None]]
"""`body(given)`: results from what changes from call to call."""


class Places(list[Tensor]):
    """Tensors of a recording, in a list that can be held weakly."""


class Recording:
    """A graph, the places that it reads what is given from, None where that is None, and those of its results.

    Results are copied out, or lent: whoever holds a lent tensor when the next replay comes finds it copied then. One of
    a backward pass may stand on the `ground` of a forward pass's: it reads what that has, where it lies.

    numbers: the certificate, the last result, where the host can read it; None of one that is not one or a few numbers.
    mended: whether its own launches mend what is not certified, so that nobody must wait for the certificate.
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
        mended: bool = False,
    ) -> None:
        self.given, self.results, self.size, self.ground, self.mended = given, results, size, ground, mended
        self.unread: Callable[[], object] | None = None
        """What takes in the certificate of the last replay, where nobody has waited for it."""
        self._stream, self._settings = stream, settings()
        self._certificate = Certificate(numbers, stream)
        self.at_zero = False
        """Whether the second thing given, an initial state, is zero where it lies."""
        self.used = 0
        """When it was last replayed: a number of `CALLS`."""
        self.device = next(place.device for place in given if place is not None)
        self._graph: torch.cuda.CUDAGraph | None = graph
        self._executable = driver.executable(graph)
        self._held: list[ReferenceType[Places]] = []
        self._lent: list[ReferenceType[Tensor]] = []

    @property
    def inputs(self) -> list[Tensor | None]:
        """Where a pass reads x and the initial state: they are given first."""
        return self.given[:2]

    @property
    def incoming(self) -> list[Tensor]:
        """Where a backward pass reads the gradients by outputs and final state, those that there are: behind them."""
        return [place for place in self.given[2:4] if place is not None]

    @property
    def fresh(self) -> list[Tensor | None]:
        """Where a forward pass reads weights that are made for every call: behind x, initial and known states."""
        return self.given[3:]

    @property
    def here(self) -> bool:
        """Whether it may be replayed now: it was not dropped to make room, and stream and settings are its own."""
        return streams.may_replay(self.device) and self.is_of(*surroundings(self.device))

    def is_of(self, stream: int, set_as: tuple[bool, bool]) -> bool:
        """Whether it was not dropped, and these are its surroundings."""
        return self._graph is not None and stream == self._stream.cuda_stream and set_as == self._settings

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
        with LOCK:
            self.catch_up()
            if self._graph is None:
                return None
            if self._lent:
                self.take_back()
            self.used = turn = next(CALLS)  # before the launch: what is then read is of this replay or a later one
            if len(given) > 1 and given[1] is None:
                if not self.at_zero:
                    places[1].zero_()
                    self.at_zero = True
                places, given = [places[0], *places[2:]], [given[0], *given[2:]]
            else:
                self.at_zero = False
            copy(places, given)
            self._certificate.expect()
            if self._executable is None:
                self._graph.replay()
            else:
                driver.launch(self._executable, self._stream.cuda_stream)
            found = [torch.empty_like(result) for result in wanted]
            copy(found, wanted)
            for result in self.results[:lent]:
                assert isinstance(result, Tensor)
                alias = result.data
                self._lent.append(ref(alias))
                found.append(alias)
        return found, turn

    def catch_up(self) -> None:
        """Have the certificate of the last replay taken in, where nobody has waited for it."""
        if self.unread is None:
            return
        with LOCK:
            if self.unread is not None:
                self.unread()  # whoever interrupts it finds it still to be done
                self.unread = None

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
        self.catch_up()
        for held in self._held:
            places = held()
            if places is not None:
                places.clear()
        self.given, self.results, self._lent, self._graph = [], [], [], None


def copy(places: Sequence[Tensor], given: Sequence[Any]) -> None:
    """Copy tensors to their places: small ones together, others by a launch each, which then fills the GPU."""
    if len(places) == 1:
        places[0].copy_(given[0])
        return
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


def settings() -> tuple[bool, bool]:
    """What kernels are chosen by beside sizes: whether results must be the same every time, and how products round."""
    return torch._C._get_deterministic_algorithms(), tf32.cudnn_rounds()


def surroundings(device: torch.device) -> tuple[int, tuple[bool, bool]]:
    """The current stream, and how torch is set."""
    return streams.stream_of(device), settings()


def record(given: Sequence[Tensor | None], size: int, body: Body, ground: Recording | None) -> Recording:
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
    return Recording(graph, places, results, size, stream, listener.numbers, ground, listener.mended)


def places_for(given: Sequence[Tensor | None], ground: Recording | None) -> list[Tensor | None]:
    """Where a recording is to read what is given: of a backward pass on the ground of a forward pass, x, the initial
    state, what was kept and fresh weights lie there; the gradients between them do not.
    """
    places: list[Any] = [None] * len(given)
    if ground is not None:
        kept = len(given) - 4 - len(ground.fresh)
        places = [*ground.inputs, None, None, *ground.results[:kept], *ground.fresh]
    return [
        torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) if place is None and tensor is not None
        else place for place, tensor in zip(places, given, strict=True)
    ]  # fmt: skip
