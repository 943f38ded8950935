"""Training steps by torch's own layers, beside ours: how long they take, and what loss they find."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from timeloom.app.train.model import SequenceModel
from timeloom.app.train.share import Share
from timeloom.nn import sequentialize

MOST_SECONDS = 60.0
"""Time that a run spends on torch's steps: none is begun that would go beyond it."""
FIRST_STEPS = 256
"""Of a long batch, torch first runs so many steps, then twice as many, to see how long all would take."""


@dataclass(frozen=True)
class TorchStep:
    """One training step by torch's layers."""

    seconds: float
    loss: float
    threads: int
    """Threads it was allowed."""


Step = Callable[[SequenceModel, torch.optim.Optimizer, Share], Tensor]


class TorchBeside:
    """Repeats steps with torch's layers on copies of the model, at the number of threads that suits torch better."""

    def __init__(self, step: Step, make_optimizer: Callable[[SequenceModel], torch.optim.Optimizer]) -> None:
        self._step, self._make_optimizer = step, make_optimizer
        self._threads: int | None = None
        self.expected: float | None = None
        """Seconds that a step would take, where that is too long to be tried."""

    def __call__(self, model: SequenceModel, share: Share, seed: Callable[[], None], left: float) -> TorchStep | None:
        """One step, or None where it would not end within `left` seconds. The model itself is not touched."""

        def run(part: Share, threads: int) -> TorchStep:
            seed()
            copied = sequentialize(deepcopy(model))
            optimizer = self._make_optimizer(copied)
            with using_threads(threads):
                begin = time.perf_counter()
                loss = self._step(copied, optimizer, part).item()
                synchronize(model.offset.device)
                return TorchStep(time.perf_counter() - begin, loss, threads)

        if self._threads is None:
            self._threads, self.expected = choose(share, lambda part, threads: run(part, threads).seconds)
            if self.expected > left:
                return None
            self.expected = None
        return run(share, self._threads)


def choose(share: Share, seconds_of: Callable[[Share, int], float]) -> tuple[int, float]:
    """The number of threads with which torch is faster, and about how long it takes over the whole batch.

    It is tried on the first steps of the batch. Series of different lengths are packed, which costs torch their length
    squared on a CPU, so how the time grows is measured, too; series of one length cost it their length.
    """
    assert share.batch is not None
    steps, allowed = len(share.batch.inputs), torch.get_num_threads()
    begin = first_steps(share, FIRST_STEPS)
    on_cpu = share.batch.inputs.device.type == "cpu"
    seconds_of(begin, allowed)  # libraries load
    times = {
        count: min(seconds_of(begin, count) for _ in range(2)) for count in ({1, allowed} if on_cpu else {allowed})
    }
    threads = min(times, key=lambda count: times[count])
    if steps <= 2 * FIRST_STEPS:
        return threads, times[threads] * steps / FIRST_STEPS
    longer = min(seconds_of(first_steps(share, 2 * FIRST_STEPS), threads) for _ in range(2))
    packed = share.batch.lengths is not None
    power = min(max(math.log2(longer / times[threads]), 1.0), 2.0) if packed else 1.0
    return threads, float(longer * (steps / (2 * FIRST_STEPS)) ** power)


def first_steps(share: Share, steps: int) -> Share:
    """The beginning of every series of a batch."""
    assert share.batch is not None
    batch = share.batch
    lengths = None if batch.lengths is None else batch.lengths.clamp(max=steps)
    targets = batch.targets[:steps] if batch.targets.dim() > 1 else batch.targets
    return replace(share, batch=replace(batch, inputs=batch.inputs[:steps], lengths=lengths, targets=targets))


@contextmanager
def using_threads(count: int) -> Iterator[None]:
    """Inside, torch uses so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def synchronize(device: torch.device) -> None:
    """Wait for the device, so that a clock sees all of the work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_left(seconds: Sequence[float]) -> float:
    """Seconds left for torch's steps after those that were run."""
    return MOST_SECONDS - sum(seconds)


def chosen_steps(count: int, total: int) -> set[int]:
    """Steps at which to compare: spread over the training, the very first left out, where libraries still load."""
    if total < 2 or count < 1:
        return set()
    return {1 + round(i * (total - 2) / max(count - 1, 1)) for i in range(min(count, total - 1))}
