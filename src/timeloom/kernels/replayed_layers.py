"""Passes of a layer's kernels by CUDA graph replays: the keys of their recordings, and the inputs these read."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from timeloom.kernels.layer import Cutting, Gradients, Layer
from timeloom.kernels.recording import Recording
from timeloom.kernels.replay import CALLS_BEFORE, RECORDINGS
from timeloom.known import Entry


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
        family = _family(layer) if cutting.sweeps > 1 else None
        *kept, certificate = RECORDINGS.run(key, given, _size(layer), body, family=family)
    return kept, certificate  # type: ignore[return-value]


def recorded_forward(layer: Layer, cutting: Cutting, share_of_box: float, keep: bool) -> Recording | None:
    """The recording that `forward` replays, if there is one."""
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
    before = CALLS_BEFORE + 2 if ground is None else 0  # a forward pass that lends its results comes soon, if any
    *found, certificate = RECORDINGS.run(key, given, _size(layer), body, before, ground)
    return tuple(found), certificate


def recorded_backward(
    layer: Layer, cutting: Cutting, grads: tuple[Tensor | None, Tensor | None], want_x: bool, ground: Recording
) -> Recording | None:
    """The recording that `backward` replays on results lent by the forward pass `ground`, if there is one."""
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


def _key(layer: Layer, cutting: Cutting) -> Hashable:
    """Kind, sizes and plan, and the addresses of the weights that a recording reads in place."""
    plan = _plan(cutting), None if cutting.retry is None else _plan(cutting.retry)
    return *_family(layer), plan


def _family(layer: Layer) -> tuple[Hashable, ...]:
    """The same without the plan: to launch several sweeps takes as long as to record them, so another plan is recorded
    at once.
    """
    x, fresh, weights = layer.x, layer.fresh, (layer.w_ih, layer.w_hh, layer.b_ih, layer.b_hh)
    read = (weight for weight in weights if not any(weight is one for one in fresh.values()))
    places = *fresh, *(None if weight is None else (weight.data_ptr(), weight.stride()) for weight in read)
    sizes = x.shape, x.dtype, layer.w_ih.dtype, layer.w_hh.shape, layer.initial.dtype, layer.kernel, layer.cell.masks
    return type(layer), x.device, sizes, places


def _plan(cutting: Cutting) -> Hashable:
    return cutting.chunk, cutting.warmup, cutting.sweeps, cutting.dense, cutting.newton, cutting.limit


def _size(layer: Layer) -> int:
    """Approximate bytes of a pass: inputs, projected inputs, states and the tape; backward, the gradients of them all.

    Gate gradients are as wide as the tape.
    """
    steps, batch, width = layer.x.shape
    cell = layer.cell
    return 4 * steps * batch * (2 * width + cell.gate_width + cell.size + layer.tape_width(cell))
