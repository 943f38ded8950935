"""The built-in task: has a pointer turned more forwards or more backwards over the whole sequence?

A pointer turns in a plane by a fixed angle a step and may reverse once per segment. Two channels hold its noisy
position, the others noise alone. The label is the direction it turned in most of the time. A single step says nothing
about it, because both directions show the same positions, and a part of the sequence may well point the other way: a
network has to remember from step to step to see a turn, and to gather the turns of all steps to answer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from timeloom.app.data.records import Record, Split, Table

CLASSES = ("backwards", "forwards")
SEGMENT = 64
"""Steps between two chances to reverse."""
MAJORITY = 0.6
"""Share of the segments that turn in the label's direction."""
ANGLE = 1.0
"""Turn of one step, in radians."""
NOISE = 0.3
CHANNELS = 4


@dataclass(frozen=True)
class Turning:
    """Options of the built-in task."""

    length: int = 16384
    """Steps in a sequence."""
    train: int = 128
    """Sequences to train on."""
    valid: int = 32
    """Sequences that choose the best weights."""
    test: int = 64
    """Sequences that measure the result."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.length < SEGMENT:
            raise ValueError(f"length must be at least {SEGMENT}, got {self.length}")
        for name in ("train", "valid", "test"):
            if getattr(self, name) < 2:
                raise ValueError(f"{name} must be at least 2, one of each class, got {getattr(self, name)}")


def turning(options: Turning) -> Table:
    """Draws the sequences; the same ones for the same options."""
    parts: tuple[tuple[Split, int], ...] = (("train", options.train), ("valid", options.valid), ("test", options.test))
    records = []
    for offset, (split, count) in enumerate(parts):
        generator = torch.Generator().manual_seed(3 * options.seed + offset)
        inputs, labels = draw(options.length, count, generator)
        for index in range(count):
            label = CLASSES[int(labels[index])]
            records.append(Record(f"{split} {index}", inputs[:, index].contiguous(), label, split))
    return Table("turning", "classification", records)


def draw(length: int, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Sequences `(T, B, CHANNELS)` and their labels `(B,)`, 1 for forwards; the two labels take turns."""
    segments = math.ceil(length / SEGMENT)
    # At least one segment more than half: a short last segment then cannot turn the label around.
    agreeing = max(round(MAJORITY * segments), segments // 2 + 1)
    labels = torch.arange(count) % 2
    rank = torch.rand(segments, count, generator=generator).argsort(dim=0)
    towards_label = torch.where(rank < agreeing, 1.0, -1.0)
    directions = (towards_label * (2 * labels - 1)).repeat_interleave(SEGMENT, dim=0)[:length]

    start = 2 * math.pi * torch.rand(count, generator=generator)
    phase = start + torch.cumsum(ANGLE * directions, dim=0)
    pointer = torch.stack([phase.cos(), phase.sin()], dim=-1)
    pointer = pointer + NOISE * torch.randn(pointer.shape, generator=generator)
    distraction = torch.randn(length, count, CHANNELS - 2, generator=generator)
    return torch.cat([pointer, distraction], dim=-1), labels
