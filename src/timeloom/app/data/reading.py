"""How files are to be read: which columns, what to do with missing values, which column holds the time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from timeloom.app.errors import InputError

Fill = Literal["none", "forward", "linear", "mean", "zero"]


@dataclass(frozen=True)
class Reading:
    """What the user says of the files."""

    columns: tuple[str, ...] = ()
    """Names of the columns to take, in this order; none for all."""
    time: str = ""
    """Name of a column of times, which becomes the seconds since the step before."""
    fill: Fill = "none"
    """What takes the place of a missing value."""

    @classmethod
    def of(cls, columns: str, time: str, fill: Fill) -> Reading:
        """From the words of the command line."""
        names = tuple(name.strip() for name in columns.split(",") if name.strip())
        if len(set(names)) < len(names):
            raise InputError(f"--columns {columns}: a column is named twice")
        return cls(names, time.strip(), fill)

    def takes(self, name: str) -> bool:
        """Whether a column is wanted as a channel."""
        return name == self.time or not self.columns or name in self.columns


EVERYTHING = Reading()


def filled(values: Tensor, how: Fill, name: str) -> Tensor:
    """`(T, D)` with every NaN replaced, each channel of a series by itself; infinite values stay, to be refused."""
    missing = values.isnan()
    if how == "none" or not bool(missing.any()):
        return values
    if how == "zero":
        return values.masked_fill(missing, 0.0)
    empty = missing.all(dim=0)
    if bool(empty.any()):
        raise InputError(
            f"{name}: column {int(empty.nonzero()[0]) + 1} has no value at all, so --fill {how} has nothing to go by; "
            f"use --fill zero, or leave it out with --columns"
        )
    if how == "mean":
        return torch.where(missing, values.nanmean(dim=0), values)
    steps = torch.arange(len(values)).unsqueeze(1)
    before = torch.where(missing, -1, steps).cummax(dim=0).values
    after = torch.where(missing, len(values), steps).flip(0).cummin(dim=0).values.flip(0)
    first = torch.where(before < 0, after, before)  # before the first value, the first value
    if how == "forward":
        return values.gather(0, first)
    last = torch.where(after == len(values), before, after)
    share = (steps - first) / (last - first).clamp_min(1)
    start, end = values.gather(0, first), values.gather(0, last)
    return torch.where(missing, start + share * (end - start), values)
