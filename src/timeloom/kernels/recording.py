"""A recording: the CUDA graph of one pass, and the buffers of its inputs and results.

Inputs that change from call to call are copied in; results that a caller keeps are copied out, or lent until the next
replay. Parameters are read in place. A recording belongs to one stream, whose order keeps its replays apart;
`kernels.replay` manages all recordings.
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
"""Elements up to which a tensor is copied together with others: one launch for many gives each of them few threads."""
CALLS = count()
"""Counts the calls that recordings see, as a clock."""
LOCK = threading.RLock()
"""Keeps the replays of threads apart."""

Body = Callable[[Sequence[Tensor | None]], Sequence[Tensor | float | None]]
"""`body(given)` computes the results of a pass from the inputs that change from call to call."""


class Places(list[Tensor]):
    """Buffers of a recording, in a list that can be weakly referenced."""


class Recording:
    """A graph, the buffers it reads its inputs from (None for inputs that are None), and those of its results.

    Results are copied out, or lent: a lent tensor that is still held at the next replay is turned into a copy then. The
    recording of a backward pass may stand on the `ground` of a forward pass's, and read its buffers in place.

    numbers: the certificate, the last result, where the host can read it; None if it is more than a few numbers.
    mended: whether the graph itself redoes what is not certified, so that nobody must wait for the certificate.
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
        """Processes the certificate of the last replay, if nobody has waited for it."""
        self._stream, self._settings = stream, settings()
        self._certificate = Certificate(numbers, stream)
        self.at_zero = False
        """Whether the buffer of the second input, an initial state, is zero."""
        self.used = 0
        """When it was last replayed, by the clock `CALLS`."""
        self.device = next(place.device for place in given if place is not None)
        self._graph: torch.cuda.CUDAGraph | None = graph
        self._executable = driver.executable(graph)
        self._held: list[ReferenceType[Places]] = []
        self._lent: list[ReferenceType[Tensor]] = []

    @property
    def inputs(self) -> list[Tensor | None]:
        """The buffers of x and the initial state, the first two inputs."""
        return self.given[:2]

    @property
    def incoming(self) -> list[Tensor]:
        """The buffers of a backward pass's gradients of outputs and final state: the next two inputs, where given."""
        return [place for place in self.given[2:4] if place is not None]

    @property
    def fresh(self) -> list[Tensor | None]:
        """The buffers of a forward pass's weights that are made for every call, behind x, initial and known states."""
        return self.given[3:]

    @property
    def here(self) -> bool:
        """Whether it may be replayed now: it was not dropped, and stream and settings are those of its capture."""
        return streams.may_replay(self.device) and self.is_of(*surroundings(self.device))

    def is_of(self, stream: int, set_as: tuple[bool, bool]) -> bool:
        """Whether it was captured on this stream with these settings, and not dropped since."""
        return self._graph is not None and stream == self._stream.cuda_stream and set_as == self._settings

    def replay(self, given: Sequence[Tensor | None]) -> list[Any]:
        """Replay with new inputs, and return the results in memory of their own."""
        places = [place for place in self.given if place is not None]
        wanted = [result for result in self.results if isinstance(result, Tensor)]
        copied = [tensor for tensor in given if tensor is not None]
        found = iter((self.replay_some(places, copied, wanted) or ((), 0))[0])
        return [next(found) if isinstance(result, Tensor) else result for result in self.results]

    def replay_some(
        self, places: list[Tensor], given: Sequence[Tensor | None], wanted: list[Tensor], lent: int = 0
    ) -> tuple[list[Tensor], int] | None:
        """Replay with only the changed inputs, `given` for the buffers `places`, and return only the wanted results.

        Copies of `wanted` are followed by the first `lent` results themselves, lent. Also returns the number of this
        replay, for `read`. Returns None if the recording has been dropped. An initial state, the second input, may be
        None for zero.
        """
        with LOCK:
            self.catch_up()
            if self._graph is None:
                return None
            if self._lent:
                self.take_back()
            self.used = turn = next(CALLS)  # before the launch: what is read then is this replay's or a later one's
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
        """Process the certificate of the last replay, if nobody has waited for it."""
        if self.unread is None:
            return
        with LOCK:
            if self.unread is not None:
                self.unread()  # if it is interrupted, it remains to be done
                self.unread = None

    @property
    def readable(self) -> bool:
        """Whether `read` can return its certificate."""
        return self._certificate.readable

    def read(self, turn: int) -> float | None:
        """Wait for a replay and return its certificate, the last of several numbers; None if another thread's replay
        has come between.
        """
        numbers = self.read_all(turn)
        return None if numbers is None else numbers[-1]

    def read_all(self, turn: int) -> list[float] | None:
        """All numbers of the certificate, as `read` returns the last."""
        numbers = self._certificate.read()
        if self.used != turn:
            return None
        self._certificate.awaited = False
        return numbers

    def has(self, lent: Tensor) -> bool:
        """Whether this is its first result, still lent, so that all its inputs and results are still in place."""
        first = self.results[0] if self.results else None
        return isinstance(first, Tensor) and first.data_ptr() == lent.data_ptr()

    def take_back(self) -> None:
        """Turn lent tensors that are still held into copies."""
        for lent in self._lent:
            tensor = lent()
            if tensor is not None:
                tensor.data = tensor.clone()  # the same tensor to autograd, which sees no in-place change
        self._lent = []

    def hold(self, places: list[Tensor]) -> list[Tensor]:
        """Buffers for a caller to hold, in a list that is emptied when the recording is dropped, to free its memory."""
        held = Places(places)
        self._held = [*(one for one in self._held if one() is not None), ref(held)]
        return held

    def drop(self) -> None:
        """Free its memory; lent tensors stay valid."""
        self.catch_up()
        for held in self._held:
            places = held()
            if places is not None:
                places.clear()
        self.given, self.results, self._lent, self._graph = [], [], [], None


def copy(places: Sequence[Tensor], given: Sequence[Any]) -> None:
    """Copy tensors to their buffers: small ones by one launch, others by a launch each, which then fills the GPU."""
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
    """Settings that the choice of kernels depends on: deterministic algorithms, and whether products round to tf32."""
    return torch._C._get_deterministic_algorithms(), tf32.cudnn_rounds()


def surroundings(device: torch.device) -> tuple[int, tuple[bool, bool]]:
    """The current stream, and torch's `settings`."""
    return streams.stream_of(device), settings()


def record(given: Sequence[Tensor | None], size: int, body: Body, ground: Recording | None) -> Recording:
    """Capture a body on a stream of its own, so that nothing else gets into the graph."""
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
    """The input buffers of a recording.

    A backward pass on the ground of a forward pass shares its buffers of x, the initial state, saved results and fresh
    weights; the incoming gradients between them get new ones.
    """
    places: list[Any] = [None] * len(given)
    if ground is not None:
        kept = len(given) - 4 - len(ground.fresh)
        places = [*ground.inputs, None, None, *ground.results[:kept], *ground.fresh]
    return [
        torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) if place is None and tensor is not None
        else place for place, tensor in zip(places, given, strict=True)
    ]  # fmt: skip
