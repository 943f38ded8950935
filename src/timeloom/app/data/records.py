"""What every reader returns: named series with what is known about them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from timeloom.app.errors import InputError

Task = Literal["classification", "regression", "labelling"]
"""A class for a series, a number for a series, or a class for each of its steps."""
Split = Literal["train", "valid", "test"]
Label = str | float | list[str]
"""A class, a number, or the class of each step."""


@dataclass(frozen=True)
class Record:
    """One series."""

    name: str
    values: Tensor
    """(T, D) float32."""
    label: Label | None
    """None where it is not known, as in data to predict."""
    split: Split | None = None
    """Where the data say themselves what it is for."""


@dataclass(frozen=True)
class Table:
    """All series of a source."""

    source: str
    task: Task | None
    """None where no series has a label."""
    records: list[Record]

    def checked(self) -> Table:
        """Itself, if a network can be run on it."""
        if not self.records:
            raise InputError(f"{self.source}: no series found")
        channels = self.records[0].values.shape[1]
        seen: set[str] = set()
        for record in self.records:
            if record.name in seen:
                raise InputError(f"{self.source}: {record.name} is listed twice")
            seen.add(record.name)
            if record.values.shape[1] != channels:
                raise InputError(
                    f"{self.source}: {record.name} has {record.values.shape[1]} channels, {self.records[0].name} has "
                    f"{channels}; all series need the same"
                )
            if not len(record.values):
                raise InputError(f"{self.source}: {record.name} is empty; remove it")
            if not record.values.isfinite().all():
                step, channel = (~record.values.isfinite()).nonzero()[0].tolist()
                raise InputError(
                    f"{self.source}: {record.name} has a missing or infinite value at step {step}, channel {channel}; "
                    f"fill or remove it"
                )
            if isinstance(record.label, float) and not math.isfinite(record.label):
                raise InputError(
                    f"{self.source}: {record.name} has the target {record.label}; give it a number or remove it"
                )
            if isinstance(record.label, list) and len(record.label) != len(record.values):
                raise InputError(
                    f"{self.source}: {record.name} has {len(record.values)} steps and {len(record.label)} labels"
                )
            if isinstance(record.label, list) and "" in record.label:
                raise InputError(
                    f"{self.source}: {record.name} has no label at step {record.label.index('')}; give every step one"
                )
        return self

    @property
    def channels(self) -> int:
        return self.records[0].values.shape[1]


def as_series(values: Tensor, name: str) -> Tensor:
    """`(T,)` or `(T, D)` as `(T, D)` float32."""
    if values.dim() == 1:
        values = values.unsqueeze(1)
    if values.dim() != 2:
        raise InputError(f"{name}: expected an array (steps, channels), got shape {tuple(values.shape)}")
    return values.to(torch.float32)
