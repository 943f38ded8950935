"""Batches of series of any length, in an order that a seed and an epoch fix."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from timeloom.app.data.splits import PADDING, Examples

ALL = slice(None)
"""All steps."""


@dataclass(frozen=True)
class Batch:
    """Series side by side."""

    inputs: Tensor
    """(T, B, D); zero where a series has ended."""
    lengths: Tensor | None
    """(B,) where they differ; None where all have T steps."""
    targets: Tensor
    """(B,), or (T, B) for every step: PADDING or NaN where a step does not count or the series has ended."""

    def to(self, device: torch.device, dtype: torch.dtype) -> Batch:
        """On a device, inputs and numeric targets in a dtype; lengths stay where the solver reads them."""
        targets = self.targets.to(device)
        return Batch(
            self.inputs.to(device, dtype), self.lengths, targets.to(dtype) if targets.is_floating_point() else targets
        )


def order(count: int, seed: int, epoch: int) -> list[int]:
    """The order of an epoch: that of no other, and the same when it is asked for again."""
    found: list[int] = torch.randperm(count, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch)).tolist()
    return found


def collate(data: Examples, indices: list[int], steps: slice = ALL) -> Batch:
    """The series at these indices as one batch; of inputs and labels of steps no more than `steps`."""
    lengths = torch.tensor([len(data.series[i]) for i in indices])
    series = [data.series[i][steps] for i in indices]
    targets = [data.targets[i] for i in indices]
    whole = targets[0].dim() == 0
    padding = float("nan") if targets[0].is_floating_point() else PADDING
    stacked = torch.stack(targets) if whole else pad_sequence([t[steps] for t in targets], padding_value=padding)
    same = bool((lengths == lengths[0]).all())
    return Batch(pad_sequence(series), None if same else lengths, stacked)


def batches(count: int, size: int) -> Iterator[list[int]]:
    """The indices of all series in their own order, a batch at a time, for measuring."""
    for begin in range(0, count, size):
        yield list(range(begin, min(begin + size, count)))
