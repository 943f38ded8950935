"""A module's call on samples that may be known from before (`timeloom.WarmStarts`): at which states it begins."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from timeloom.auto.beginnings import COST, COST_ON_GPU, ON_GPU, Beginning, savable
from timeloom.distributed.context import time_group
from timeloom.nn import torch_layer
from timeloom.solve.recurrence import BEGUN
from timeloom.solve.warm_starts import BATCH, WarmBatch, check_batch, no_batch
from timeloom.torch_state.transforms import transformed

if TYPE_CHECKING:
    from timeloom.nn.base import Recurrent

Call = Callable[[Any], tuple[Any, ...]]
"""The module's call with a guess; None for a usual call."""


def call_with(module: Recurrent, call: Call, guess: Any, input: Any, marked: bool) -> tuple[Any, ...]:
    """Make the call with the user's guess, or for the samples of the current batch.

    marked: whether there are lengths or resets.
    """
    samples = _samples(module, guess, input)
    with no_batch():  # nested calls see no samples
        if samples is None or samples.store.always:
            return call(guess if samples is None else samples)
        return _tried(module, samples, call, input, marked)


def _samples(module: Recurrent, guess: Any, input: Any) -> WarmBatch | None:
    """The samples whose states are known or to be kept; None if the call has none."""
    given = BATCH.get() if guess is None else guess
    if not isinstance(given, WarmBatch) or not isinstance(input, Tensor | PackedSequence):
        return None
    if transformed() or time_group(module) is not None:
        return None
    _, batch = torch_layer.size(module, input)
    if guess is not None:
        check_batch(guess, batch)
        return given
    return given.for_call_of(module) if len(given) == batch else None


def _tried(
    module: Recurrent, samples: WarmBatch, call: Call, input: Tensor | PackedSequence, marked: bool
) -> tuple[Any, ...]:
    """Make the call at known states or as usual, and note its time to learn which is faster."""
    data = input.data if isinstance(input, PackedSequence) else input
    kind = torch.is_grad_enabled(), marked or data is not input, data.dtype, data.device.type
    beginning = beginning_of(module, kind, data.device.type)
    store, was = samples.store, beginning.keeps
    turn = beginning.turn(store.repeats, store.full)
    began = time.perf_counter()
    result = call(None if turn == "as usual" else samples)
    seconds, (steps, _) = time.perf_counter() - began, torch_layer.size(module, input)
    if samples.refused:
        beginning.bar()
    reports = module.reports
    resting = [experience.forward.resting for _, experience in sorted(module._experiences.items())]
    resting += [False] * (len(reports) - len(resting))
    side_by_side = torch.get_num_threads() if data.device.type == "cpu" else ON_GPU
    saves = sum(savable(report, steps, rests, side_by_side) for report, rests in zip(reports, resting, strict=False))
    begun = any(BEGUN in report.reason for report in reports)
    beginning.note(turn, begun, seconds, max(steps, 1), min(saves, seconds))
    if was and not any(other.keeps for other in module._beginnings.values()):
        store.forget(module)
        for experience in module._experiences.values():
            experience.forget_known_states()
    why = beginning.why if turn == "as usual" else ""
    for report in reports if why else ():
        if report.solver != "sequential":  # sequential reports may be reused for calls without samples
            object.__setattr__(report, "reason", f"{report.reason}; {why}")  # in place: the backward report is added
    return result


def beginning_of(module: Recurrent, kind: Hashable, device: str) -> Beginning:
    """The trial of known states for calls of one kind: with or without gradients, ragged or not, dtype and device."""
    held = module._beginnings
    if kind not in held:
        cost = COST if device == "cpu" else COST_ON_GPU
        held[kind] = Beginning(cost, "waiting" if module._solver.adapts else "begun")
    return held[kind]
