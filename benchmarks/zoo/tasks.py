"""Tasks that need memory, drawn from seeds, on which networks are trained before they are measured."""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.zoo import recordings

Answers = Literal["numbers", "classes", "bytes"]
"""Targets at every step: numbers, a class, or, for inputs that are bytes, the next byte."""
WINDOW = 200
"""Steps over which marked numbers are added up."""
SYMBOLS, SHOWN, DELAY = 8, 8, 60
"""Copy task: kinds of symbols, how many are shown, and the steps before they are asked for."""
EPISODE = 100
"""Average steps of a corridor."""
ACTIVITIES = 5
"""Kinds of movement in the stand-in for a sensor's recordings."""
LONGEST_ECHO = 8192
"""Steps after which the amplifier's filter has decayed below float64's precision."""


class Batch(NamedTuple):
    """Inputs, targets, and where episodes begin."""

    x: Tensor
    """`(T, B, D)`; of text, bytes `(T, B)`."""
    answers: Tensor
    """Numbers `(T, B, K)`, or classes or bytes `(T, B)`."""
    resets: Tensor | None = None
    """bool `(T, B)`"""

    def to(self, device: torch.device) -> Batch:
        return Batch(*(None if tensor is None else tensor.to(device) for tensor in self))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Task:
    """How to draw a batch, and the widths of inputs and answers."""

    draw: Callable[[int, int, torch.Generator], Batch]
    inputs: int
    outputs: int
    answers: Answers = "numbers"
    needs: Callable[[], str] = str
    """What is missing to draw it here; empty if nothing is."""


def flip_flop(steps: int, batch: int, generator: torch.Generator) -> Batch:
    """Three bits: the target of each is the sign of its last pulse, and pulses are rare."""
    pulses = torch.rand(steps, batch, 3, generator=generator) < 0.01
    signs = torch.where(torch.rand(steps, batch, 3, generator=generator) < 0.5, -1.0, 1.0)
    x = torch.where(pulses, signs, 0.0)
    last = torch.where(pulses, torch.arange(steps)[:, None, None], 0).cummax(0).values
    return Batch(x, x.gather(0, last))


def adding(steps: int, batch: int, generator: torch.Generator) -> Batch:
    """The sum of the marked numbers among the last WINDOW ones."""
    numbers = torch.rand(steps, batch, generator=generator)
    marks = (torch.rand(steps, batch, generator=generator) < 0.02).float()
    sums = (numbers * marks).cumsum(0)
    before = torch.cat([torch.zeros(min(WINDOW, steps), batch), sums[:-WINDOW]])
    return Batch(torch.stack([numbers, marks], -1), ((sums - before) / 4).unsqueeze(-1))


def copy(steps: int, batch: int, generator: torch.Generator) -> Batch:
    """Symbols are shown, then nothing for a while; after a signal they must be repeated in order, and so on."""
    period = 2 * SHOWN + DELAY
    rounds = -(-steps // period)
    symbols = torch.randint(0, SYMBOLS, (rounds, SHOWN, batch), generator=generator)
    x = torch.zeros(rounds, period, batch, SYMBOLS + 1)
    x[:, :SHOWN, :, :SYMBOLS] = F.one_hot(symbols, SYMBOLS).float()
    x[:, SHOWN + DELAY, :, SYMBOLS] = 1.0
    answers = torch.full((rounds, period, batch), SYMBOLS)
    answers[:, SHOWN + DELAY :] = symbols
    return Batch(x.flatten(0, 1)[:steps], answers.flatten(0, 1)[:steps])


def amplifier(steps: int, batch: int, generator: torch.Generator) -> Batch:
    """A guitar amplifier: a filter with a long memory, followed by a clipper."""
    x = torch.randn(steps, batch, 1, generator=generator)
    x = 2 * F.avg_pool1d(x.permute(1, 2, 0), 9, 1, 4).permute(2, 0, 1)
    level = 0.05 * _faded(x.double(), 0.995)
    return Batch(x, torch.tanh(3 * (x + 0.5 * level.float())))


def _faded(x: Tensor, rate: float) -> Tensor:
    """`y[t] = rate · y[t−1] + x[t]` over the first dimension, by a product of spectra."""
    echo = rate ** torch.arange(min(len(x), LONGEST_ECHO), dtype=x.dtype)
    size = len(x) + len(echo)
    spectrum = torch.fft.rfft(x, size, 0) * torch.fft.rfft(echo, size)[:, None, None]
    faded: Tensor = torch.fft.irfft(spectrum, size, 0)[: len(x)]
    return faded


def corridors(steps: int, batch: int, generator: torch.Generator) -> Batch:
    """A policy's memory: a sign at the entrance of a corridor tells where to turn at its end.

    Every corridor is an episode. Inputs: the sign, whether the end is reached, noise. Actions: on, left, right.
    """
    ends = torch.rand(steps, batch, generator=generator) < 1 / EPISODE
    resets = torch.cat([torch.ones(1, batch, dtype=torch.bool), ends[:-1]])
    signs = torch.where(torch.rand(steps, batch, generator=generator) < 0.5, -1.0, 1.0)
    begin = torch.where(resets, torch.arange(steps)[:, None], 0).cummax(0).values
    noise = 0.1 * torch.randn(steps, batch, generator=generator)
    x = torch.stack([torch.where(resets, signs, 0.0), ends.float(), noise], -1)
    turn = torch.where(signs.gather(0, begin) < 0, 1, 2)
    return Batch(x, torch.where(ends, turn, 0), resets)


def sensor(steps: int, batch: int, generator: torch.Generator) -> Batch:
    """A simulated wearable sensor: a person moves in one of ACTIVITIES ways, for several hundred steps each.

    Three channels swing with the gait and drift; the target at every step is the way of moving.
    """
    changes = torch.rand(steps, batch, generator=generator) < 1 / 400
    drawn = torch.randint(0, ACTIVITIES, (steps, batch), generator=generator)
    begin = torch.where(changes, torch.arange(steps)[:, None], 0).cummax(0).values
    kind = drawn.gather(0, begin)
    pace = 0.05 + 0.03 * kind + 0.004 * torch.randn(batch, generator=generator)
    phase = 2 * math.pi * pace.cumsum(0)
    sways = torch.stack([torch.sin(phase), torch.sin(2 * phase + 1), torch.cos(phase) * (kind % 2)], -1)
    drift = torch.randn(steps, batch, 3, generator=generator).cumsum(0) / 40
    return Batch(sways + drift - drift.mean(0) + 0.5 * torch.randn(steps, batch, 3, generator=generator), kind)


def text(steps: int, batch: int, generator: torch.Generator) -> Batch:
    """Bytes of the standard library's sources; the targets are the next bytes."""
    at = torch.randint(0, len(_library()) - steps - 1, (batch,), generator=generator)
    pieces = torch.stack([_library()[i : i + steps + 1] for i in at.tolist()], 1).long()
    return Batch(pieces[:-1], pieces[1:])


@cache
def _library() -> Tensor:
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def motions(steps: int, batch: int, generator: torch.Generator) -> Batch:
    """Consecutive recordings of a watch's accelerometer and gyroscope; the target at every step: one of four sports."""
    return Batch(*recordings.in_a_row(steps, batch, generator))


TASKS = {
    "flip-flop": Task(flip_flop, 3, 3),
    "adding": Task(adding, 2, 1),
    "copy": Task(copy, SYMBOLS + 1, SYMBOLS + 1, "classes"),
    "amplifier": Task(amplifier, 1, 1),
    "policy": Task(corridors, 3, 3, "classes"),
    "sensor": Task(sensor, 3, ACTIVITIES, "classes"),
    "motions": Task(motions, recordings.CHANNELS, recordings.CLASSES, "classes", recordings.missing),
    "text": Task(text, 32, 256, "bytes"),
}
