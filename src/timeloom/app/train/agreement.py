"""Answers with timeloom and without: how long both take, and how far apart they are."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from timeloom.app.data import Record
from timeloom.app.machine import NOTICEABLE, LoadMeter, counted, duration
from timeloom.app.train.checkpoint import Checkpoint
from timeloom.app.train.comparison import FIRST_STEPS, MOST_SECONDS, using_threads
from timeloom.app.train.config import ModelConfig
from timeloom.app.train.inference import answer
from timeloom.app.train.model import SequenceModel
from timeloom.app.train.solved import Solved
from timeloom.nn import sequentialize


@dataclass(frozen=True)
class Agreement:
    """Answers of torch's own layers beside those of timeloom's, to the same series."""

    compared: int
    """Series that both answered: the first ones, as many as torch answers in a minute; 0 for none."""
    series: int
    """All there are."""
    expected: float
    """Seconds that torch would take for all."""
    threads: int
    """With which torch is faster."""
    torch_seconds: float | None = None
    timeloom_seconds: float | None = None
    difference: float | None = None
    """Largest difference of an answer, relative to the largest answer."""
    same: float | None = None
    """Share of the classes that agree; 1 for numbers."""
    chunks: int = 1
    """Chunks of time that ran side by side in the last batch with timeloom."""
    others: float | None = None
    """Cores that other programs used meanwhile; None where the system does not tell."""

    def lines(self, model: ModelConfig) -> list[str]:
        """What was compared, in words."""
        theirs, ours = self.torch_seconds, self.timeloom_seconds
        if theirs is None or ours is None:
            much = duration(self.expected)
            return [f"the same without timeloom ({model.beside}) was left out: it would take about {much}"]
        busy = self.others is not None and self.others >= NOTICEABLE
        pace = f"{theirs / ours:.1f}x faster" if theirs >= ours else f"{ours / theirs:.1f}x slower"
        threads = counted(self.threads, "thread")
        ran = "one chunk" if self.chunks == 1 else f"in parallel over {self.chunks:,} chunks"
        return [
            *([f"The first {self.compared} of them both ways:"] if self.compared < self.series else []),
            f"without timeloom ({model.beside}, {threads}) {theirs:.3f} s, with it ({ran}) {ours:.3f} s: {pace}",
            f"answers differ by at most {self.difference:.1e} of the largest; {self.same:.1%} of them agree",
            *([f"other programs used {self.others:.1f} cores: measure again when they have ended"] if busy else []),
        ]


def compare(model: SequenceModel, records: Sequence[Record], checkpoint: Checkpoint, size: int) -> Agreement:
    """Both ways over the same series, as many of the first ones as torch answers in time.

    Torch gets the number of threads with which it is faster on the first steps of the first batch.
    """
    plain = sequentialize(deepcopy(model))

    def seconds(steps: int, threads: int) -> float:
        part = [replace(record, values=record.values[:steps]) for record in records[:size]]
        with using_threads(threads):
            return answer(plain, part, checkpoint, size).seconds

    allowed = torch.get_num_threads()
    seconds(FIRST_STEPS, allowed)  # libraries load
    tried = {1, allowed} if model.offset.device.type == "cpu" else {allowed}
    times = {threads: min(seconds(FIRST_STEPS, threads) for _ in range(2)) for threads in tried}
    threads = min(times, key=lambda count: times[count])
    steps = min(FIRST_STEPS, max(len(record.values) for record in records[:size]))
    costs = [times[threads] * longest / steps for longest in _longest(records, size)]
    told = Agreement(0, len(records), sum(costs), threads)
    fitting = sum(sum(costs[: i + 1]) <= MOST_SECONDS for i in range(len(costs)))
    both = list(records[: fitting * size])
    if not both:
        return told
    answer(model, both[:size], checkpoint, size)  # kernels load
    meter = LoadMeter()
    ours = answer(model, both, checkpoint, size)
    chunks = Solved.of(model, _longest(both, size)[-1]).chunks
    with using_threads(threads):
        theirs = answer(plain, both, checkpoint, size)
    one, other = torch.cat([_rows(v) for v in ours.values]), torch.cat([_rows(v) for v in theirs.values])
    return replace(
        told, compared=len(both), torch_seconds=theirs.seconds, timeloom_seconds=ours.seconds, chunks=chunks,
        difference=((one - other).abs().max() / other.abs().max().clamp_min(1e-30)).item(),
        same=1.0 if model.numeric else (one.argmax(-1) == other.argmax(-1)).double().mean().item(),
        others=meter.read().others,
    )  # fmt: skip


def _longest(records: Sequence[Record], size: int) -> list[int]:
    """Steps of each batch."""
    lengths = [len(record.values) for record in records]
    return [max(lengths[begin : begin + size]) for begin in range(0, len(lengths), size)]


def _rows(values: Tensor) -> Tensor:
    return values.reshape(-1, values.shape[-1])
