"""Whole training runs, first update to the last, torch and timeloom from the same seeds: loss over wall-clock.

Both sides see the same batches in the same order, begin with the same weights and make the same updates, by Adam with a
learning rate that falls to zero along half a cosine, so that the last update is the end of a training; times include
compiling and everything that is learned in the first calls. Between updates the host does not wait for losses, as
training loops do not. A side that runs out of time stops early; both are compared over the updates that both made.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from typing import Any

import torch
from torch import Tensor, nn

import timeloom as tl
from benchmarks.gpu.compare import Row
from benchmarks.zoo.layers import own_layer, torch_layer
from benchmarks.zoo.networks import Model, Network
from benchmarks.zoo.tasks import TASKS, Batch

CUDNN_LIMIT = 65535
"""Most steps of a call that cuDNN accepts: longer sequences run in blocks, with the state carried and gradients cut."""
MOST_WARM = 6.0
"""Seconds that the side with warm starts may take."""
EARLY = 20
"""Updates over which the losses of both sides are compared: later, rounding alone makes two runs differ."""
POINTS = 150
"""Most points of a curve that are kept."""
APART = 8
"""Updates between two checks of the clock, at which the host waits for the GPU."""
LAST = 0.2
"""Share of a run, at its end, for which the fall of the loss is reported."""
SEED = 0


@dataclass(frozen=True)
class Run:
    """A network and its training."""

    network: Network
    pool: int = 4
    """Batches that are drawn once and trained on in turns."""
    seconds: float = 80.0
    """Seconds that a side may take."""
    note: str = ""

    @property
    def name(self) -> str:
        network = self.network
        return f"{network.name}, T={network.steps:,}, B={network.batch}"


RUNS = (
    Run(Network("amplifier", "LSTM", 32, 240, 2**18, 1), 2, note="torch in blocks of 65,535 steps"),
    Run(Network("text", "GRU", 128, 1200, 16384, 4), 8),
    Run(Network("policy", "GRU", 64, 600, 16384, 8), 4, note="torch with packed episodes"),
    Run(Network("amplifier", "LSTM", 32, 300, CUDNN_LIMIT, 1)),
    Run(Network("amplifier", "GRU", 32, 200, CUDNN_LIMIT, 1)),
    Run(Network("text", "GRU", 256, 60, 16384, 1), 8),
)
"""One of each kind first, as there may be no time for all."""


class Stopwatch:
    """The end of every update, in seconds since the beginning: on a GPU by events, without waiting for them."""

    def __init__(self, device: str) -> None:
        self._events: list[torch.cuda.Event] | None = None if device == "cpu" else []
        self._times: list[float] = []
        if self._events is not None:
            torch.cuda.synchronize()
        self.note()

    def note(self) -> None:
        if self._events is None:
            self._times.append(time.perf_counter())
        else:
            self._events.append(torch.cuda.Event(enable_timing=True))
            self._events[-1].record()

    def wait(self) -> float:
        """Wait for the last update that was noted; returns the seconds until its end."""
        if self._events is None:
            return self._times[-1] - self._times[0]
        self._events[-1].synchronize()
        return float(self._events[0].elapsed_time(self._events[-1])) / 1e3

    def seconds(self) -> list[float]:
        self.wait()
        if self._events is None:
            return [at - self._times[0] for at in self._times[1:]]
        return [self._events[0].elapsed_time(event) / 1e3 for event in self._events[1:]]


@dataclass
class Curve:
    """What one side did, update by update."""

    seconds: list[float] = field(default_factory=list)
    """Seconds since the beginning, at the end of each update."""
    losses: list[float] = field(default_factory=list)
    told: list[int] = field(default_factory=list)
    """The updates after which reports were read, from 1; their contents follow."""
    sweeps: list[tuple[int, int]] = field(default_factory=list)
    """Forward and backward."""
    cuts: list[tuple[int, int]] = field(default_factory=list)
    """Chunk and warm-up of the forward pass."""
    decisions: dict[int, str] = field(default_factory=dict)
    """The reasons in reports, by the update at which each was new, from 0."""

    def look(self, update: int, layer: Any) -> None:
        """Read the reports of this update, counted from 0, which waits for the GPU."""
        reports = getattr(layer, "reports", None)
        if reports:
            report = reports[0]
            back = report.backward.iterations if report.backward is not None else 0
            self.told.append(update + 1)
            self.sweeps.append((report.iterations, back))
            self.cuts.append((report.chunk, report.warmup))
            if report.reason != next(reversed(self.decisions.values()), None):
                self.decisions[update] = report.reason

    def first(self, updates: int) -> Curve:
        """The same up to this update."""
        return replace(self, seconds=self.seconds[:updates], losses=self.losses[:updates])

    def late(self) -> float:
        """Median seconds of an update in the second half."""
        half = len(self.seconds) // 2
        return statistics.median(b - a for a, b in pairwise([0.0, *self.seconds][half:]))

    def smooth(self, window: int) -> list[float]:
        """Running means over `window` losses: one of each batch of the pool."""
        return [statistics.fmean(self.losses[max(0, i + 1 - window) : i + 1]) for i in range(len(self.losses))]

    def content(self) -> dict[str, Any]:
        """The curve for the file, thinned to at most POINTS updates."""
        stride = -(-len(self.losses) // POINTS)
        kept = range(0, len(self.losses), stride)
        return {
            "updates": [i + 1 for i in kept],
            "seconds": [round(self.seconds[i], 4) for i in kept],
            "losses": [float(f"{self.losses[i]:.5g}") for i in kept],
            "told": self.told,
            "sweeps": [list(each) for each in self.sweeps],
            "cuts": [list(each) for each in self.cuts],
            "decisions": {str(at): reason for at, reason in islice(self.decisions.items(), 12)},
        }


def measure(run: Run, device: str, left: float) -> Row:
    """Both sides of one run, in one process, one after the other."""
    network, seconds = run.network, min(run.seconds, max(left, 2.0) / 2)
    task, generator = TASKS[network.task], torch.Generator().manual_seed(SEED)
    pool = [task.draw(network.steps, network.batch, generator).to(torch.device(device)) for _ in range(run.pool)]
    torch.manual_seed(SEED)
    sizes = network.layer, task.inputs, network.units
    theirs = Model(network, torch_layer(*sizes)).to(device)
    ours = Model(network, own_layer(*sizes)).to(device)
    again = Model(network, own_layer(*sizes)).to(device)
    for model in (ours, again):
        model.load_state_dict(theirs.state_dict())
    row: Row = {"name": run.name, "case": run.name, "note": run.note}
    torchs = train(theirs, run, pool, seconds, CUDNN_LIMIT if device == "cuda" else None)
    own = train(ours, run, pool, seconds)
    warm = train(again, run, pool, min(seconds, MOST_WARM), store=tl.WarmStarts())
    sides = {"torch": torchs.content(), "timeloom": own.content(), "warm": warm.content()}
    return row | compared(torchs, own, run.pool) | with_warm_starts(own, warm) | sides


def train(
    model: Model,
    run: Run,
    pool: list[Batch],
    seconds: float,
    longest: int | None = None,
    store: tl.WarmStarts | None = None,
) -> Curve:
    """Train by Adam on the pool's batches in turns, until all updates are made or the time is over.

    longest: most steps of a call; store: that of warm starts, if any.
    """
    updates, curve, losses = run.network.updates, Curve(), list[Tensor]()
    optimizer = torch.optim.Adam(model.parameters(), run.network.rate, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, updates)
    stride, watch = -(-updates // POINTS), Stopwatch(pool[0].x.device.type)
    for update in range(updates):
        optimizer.zero_grad()
        place = update % len(pool)
        samples = [(place, sequence) for sequence in range(run.network.batch)]
        with nullcontext() if store is None else store.batch(samples):
            losses.append(backward(model, pool[place], longest))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        watch.note()
        if update < EARLY or update % stride == 0:
            curve.look(update, model.layer)
        if update % APART == 0 and watch.wait() > seconds:
            break
    curve.seconds, curve.losses = watch.seconds(), torch.stack(losses).tolist()
    return curve


def backward(model: Model, batch: Batch, longest: int | None) -> Tensor:
    """Compute the loss and its gradients in the model, in blocks if a layer accepts no more than `longest` steps."""
    steps = len(batch.x)
    if longest is None or steps <= longest or batch.resets is not None:
        loss = model.loss(batch)
        loss.backward()
        return loss.detach()
    total, state = torch.zeros((), device=batch.x.device), None
    for x, answers in blocks(batch, longest):
        y, state = model.layer(model.features(x), state)
        state = tuple(part.detach() for part in state) if isinstance(state, tuple) else state.detach()
        loss = model.loss_of(y, answers) * (len(x) / steps)
        loss.backward()
        total += loss.detach()
    return total


def blocks(batch: Batch, longest: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The fewest blocks of at most `longest` steps, of equal lengths."""
    count = -(-len(batch.x) // longest)
    return zip(batch.x.chunk(count), batch.answers.chunk(count), strict=True)


def with_warm_starts(without: Curve, warm: Curve) -> Row:
    """Times of both over the updates that both made, and of an update of each at the end, without compilation."""
    updates = min(len(without.losses), len(warm.losses))
    without, warm = without.first(updates), warm.first(updates)
    return {
        "warm_updates": updates,
        "warm_seconds": warm.seconds[-1],
        "unwarmed_seconds": without.seconds[-1],
        "warm_late": 1e3 * warm.late(),
        "unwarmed_late": 1e3 * without.late(),
    }


def compared(theirs: Curve, ours: Curve, pool: int) -> Row:
    """Wall-clock over the updates that both made, wall-clock to the same loss, and how far the losses differ."""
    updates = min(len(theirs.losses), len(ours.losses))
    theirs, ours = theirs.first(updates), ours.first(updates)
    smooth = [side.smooth(pool) for side in (theirs, ours)]
    target = max(losses[-1] for losses in smooth)
    reached = [
        side.seconds[next(i for i, loss in enumerate(losses) if loss <= target)]
        for side, losses in zip((theirs, ours), smooth, strict=True)
    ]
    apart = [abs(a - b) / abs(a) for a, b in zip(theirs.losses[:EARLY], ours.losses[:EARLY], strict=True)]
    late = [side.late() for side in (theirs, ours)]
    return {
        "updates": updates,
        "torch_seconds": theirs.seconds[-1],
        "timeloom_seconds": ours.seconds[-1],
        "ratio": theirs.seconds[-1] / ours.seconds[-1],
        "torch_first": theirs.seconds[0],
        "timeloom_first": ours.seconds[0],
        "late_ratio": late[0] / late[1],
        "target": target,
        "same_loss_ratio": reached[0] / reached[1],
        "early_difference": max(apart),
        "torch_loss": smooth[0][-1],
        "timeloom_loss": smooth[1][-1],
        "torch_late_gain": late_gain(smooth[0]),
        "timeloom_late_gain": late_gain(smooth[1]),
        "decision": list(ours.decisions.values())[-1] if ours.decisions else "",
    }


def late_gain(losses: list[float]) -> float:
    """The share of the loss that the end of a run took away."""
    return 1 - losses[-1] / losses[int((1 - LAST) * (len(losses) - 1))]
