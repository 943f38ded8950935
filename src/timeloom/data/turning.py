"""The built-in task: has a pointer turned more forwards or more backwards over the whole sequence?"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from timeloom.data.records import Record, Split, Table
from timeloom.demo_task import SEGMENT, draw_turning

CLASSES = ("backwards", "forwards")


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
        drawn = draw_turning(options.length, count, torch.Generator().manual_seed(3 * options.seed + offset))
        for index in range(count):
            label = CLASSES[int(drawn.labels[index])]
            records.append(Record(f"{split} {index}", drawn.inputs[:, index].contiguous(), label, split))
    return Table("turning", "classification", records)
