"""CUDA graphs of a layer's own: what a plan launches on a GPU is recorded once, and replayed behind eager calls.

A call of a layer is many short launches, each of which costs the host more than the GPU. From the third call with the
same sizes, plan and weights on, they are one replay: what changes from call to call is copied in, what a caller keeps
is copied out. Weights are read where they lie, so an optimizer's changes are seen; whoever moves them gets a
recording of his own. Recordings are of one stream, whose order keeps replays apart, and a lock keeps threads apart.
Inside a graph that a user captures nothing is replayed: his graph takes the launches themselves.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from timeloom.kernels import faults
from timeloom.kernels.layer import Cutting, Gradients, Layer
from timeloom.known import Entry
from timeloom.torch_state import tf32

CALLS_BEFORE = 2
"""Calls of a kind that are launched as they are: plans change in the first calls, and recording costs some of them."""
MOST_KEYS = 256
"""Kinds of calls that are counted, at most."""
SHARE_OF_ONE, SHARE_OF_ALL = 128, 32
"""A recording may take so small a part of a GPU's memory, and all of them together so small a one."""

_NEVER = -(10**9)
"""The count of a kind that cannot be recorded."""

Body = Callable[[Sequence[Tensor | None]], Sequence[Tensor | float | None]]
"""`body(given)`: results from what changes from call to call."""


@dataclass
class _Recording:
    graph: torch.cuda.CUDAGraph
    given: list[Tensor]
    results: list[Tensor | float | None]
    size: int

    def replay(self, given: Sequence[Tensor | None]) -> list[Any]:
        torch._foreach_copy_(self.given, [tensor for tensor in given if tensor is not None])
        self.graph.replay()
        found = [torch.empty_like(result) if isinstance(result, Tensor) else result for result in self.results]
        torch._foreach_copy_(
            [tensor for tensor in found if isinstance(tensor, Tensor)],
            [tensor for tensor in self.results if isinstance(tensor, Tensor)],
        )
        return found


class Recordings:
    """The recordings of one process, least recently used first, and the counts of calls that have none yet."""

    def __init__(self) -> None:
        self._known: OrderedDict[Hashable, _Recording | int] = OrderedDict()
        self._lock = threading.RLock()

    def run(self, key: Hashable, given: Sequence[Tensor | None], size: int, body: Body) -> Sequence[Any]:
        """What `body(given)` returns, by a replay where calls of this kind have been seen. `size`: bytes that it takes,
        about. `key` must hold all that the body reads beside what is given, and how.
        """
        device = next(tensor.device for tensor in given if tensor is not None)
        if size > _memory(device) // SHARE_OF_ONE or torch.cuda.is_current_stream_capturing():
            return body(given)
        key = key, torch._C._cuda_getCurrentRawStream(device.index), torch.are_deterministic_algorithms_enabled()
        with self._lock:
            known = self._known.pop(key, 0)
            if isinstance(known, int) and known >= CALLS_BEFORE:
                known = _recorded(given, size, body)
            self._known[key] = known + 1 if isinstance(known, int) else known
            self._shrink(device)
            if isinstance(known, _Recording):
                return known.replay(given)
        return body(given)

    def _shrink(self, device: torch.device) -> None:
        while len(self._known) > MOST_KEYS or self.size > max(self._largest, _memory(device) // SHARE_OF_ALL):
            self._known.popitem(last=False)

    @property
    def size(self) -> int:
        """Bytes that all recordings take, about."""
        return sum(known.size for known in self._known.values() if isinstance(known, _Recording))

    @property
    def _largest(self) -> int:
        return max((known.size for known in self._known.values() if isinstance(known, _Recording)), default=0)

    def clear(self) -> None:
        """Forget all recordings; their memory is free again."""
        with self._lock:
            self._known.clear()


RECORDINGS = Recordings()


def forward(
    layer: Layer, cutting: Cutting, share_of_box: float, keep: bool, entry: Entry | None = None
) -> tuple[list[Tensor], Tensor | float]:
    """`layer.forward`, replayed where that is possible."""

    def body(given: Sequence[Tensor | None]) -> Sequence[Tensor | float | None]:
        x, initial, *starts = given
        more: dict[str, Any] = {} if entry is None else {"entry": replace(entry, starts=starts[0])}  # type: ignore[arg-type]
        kept, certificate = _with(layer, x, initial).forward(cutting, share_of_box, keep, **more)
        return *kept, certificate

    given = layer.x, layer.initial, None if entry is None else entry.starts
    key = _key(layer, cutting), share_of_box, keep, None if entry is None else entry.every
    recordable = layer.recordable(cutting)
    results: Sequence[Any] = RECORDINGS.run(key, given, _size(layer), body) if recordable else body(given)
    *kept, certificate = results
    return kept, certificate


def backward(
    layer: Layer, cutting: Cutting, kept: list[Tensor], grads: tuple[Tensor | None, Tensor | None], want_x: bool
) -> tuple[Gradients, Tensor | float]:
    """`layer.backward`, replayed where that is possible."""
    if not layer.recordable(cutting):
        return layer.backward(cutting, kept, grads, want_x)

    def body(given: Sequence[Tensor | None]) -> Sequence[Tensor | float | None]:
        x, initial, incoming, final, *others = given
        tensors: list[Any] = others
        found, certificate = _with(layer, x, initial).backward(cutting, tensors, (incoming, final), want_x)
        return *found, certificate

    given = layer.x, layer.initial, *grads, *kept
    there = tuple(None if grad is None else grad.dtype for grad in grads)
    *found, certificate = RECORDINGS.run((_key(layer, cutting), there, want_x), given, _size(layer), body)
    return tuple(found), certificate


def _with(layer: Layer, x: Tensor | None, initial: Tensor | None) -> Layer:
    assert x is not None
    assert initial is not None
    return replace(layer, x=x, initial=initial)


def _key(layer: Layer, cutting: Cutting) -> Hashable:
    """Kind, sizes, precision and plan, and where the weights lie that a recording reads."""
    weights = layer.w_ih, layer.w_hh, layer.b_ih, layer.b_hh, *layer.cell.weights
    places = tuple(None if weight is None else (weight.data_ptr(), weight.stride()) for weight in weights)
    x = layer.x
    sizes = x.shape, x.dtype, layer.w_ih.dtype, layer.w_hh.shape, layer.initial.dtype, layer.kernel
    plan = cutting.chunk, cutting.warmup, cutting.sweeps, cutting.dense, cutting.newton
    return type(layer), x.device, sizes, tf32.cudnn_rounds(), plan, places


def _size(layer: Layer) -> int:
    """Bytes of a pass: inputs, projected inputs, states, what is kept, gate gradients; about, and twice."""
    steps, batch, width = layer.x.shape
    return 8 * steps * batch * (2 * width + 8 * layer.n * len(layer.parts))


def _recorded(given: Sequence[Tensor | None], size: int, body: Body) -> _Recording | int:
    """A recording, or the count of a kind that cannot be recorded: its calls go on being launched as they are."""
    try:
        return _record(given, size, body)
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError | faults.KernelFault):  # the launches themselves tell of these
            faults.tell(f"a CUDA graph of a layer cannot be recorded ({error})", "its calls are launched one by one")
        return _NEVER


def _record(given: Sequence[Tensor | None], size: int, body: Body) -> _Recording:
    """Record a body on a stream of its own, so that nothing else gets into the graph."""
    device = next(tensor.device for tensor in given if tensor is not None)
    graph, stream = torch.cuda.CUDAGraph(), _side_stream(device)
    with torch.inference_mode(False), torch.no_grad(), torch.cuda.device(device):
        places = [None if tensor is None else torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
                  for tensor in given]  # fmt: skip
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                results = list(body(places))
            finally:
                graph.capture_end()
    return _Recording(graph, [place for place in places if place is not None], results, size)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@cache
def _memory(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).total_memory)
