"""The demo's task: has a pointer turned more forwards or more backwards over the whole sequence?

A pointer turns in a plane by a fixed angle a step and may reverse once per segment. Two channels hold its
noisy position, the others noise alone. The label is the direction it turned in most of the time. A single
step says nothing about it, because both directions show the same positions, and a part of the sequence may
well point the other way: a network has to remember from step to step to see a turn, and to gather the turns
of all steps to answer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

SEGMENT = 64
"""Steps between two chances to reverse."""
MAJORITY = 0.6
"""Share of the segments that turn in the label's direction."""
ANGLE = 1.0
"""Turn of one step, in radians."""
NOISE = 0.3
TORCH_SECONDS = 100.0
"""torch trains no longer than this, so that the demo stays short on a slow or busy machine."""
CHANNELS = 4


@dataclass(frozen=True)
class Turning:
    """A batch of sequences of length T."""

    inputs: Tensor
    """(T, B, CHANNELS)."""
    labels: Tensor
    """(B,): 1 where the pointer turned forwards in most steps, else 0."""
    directions: Tensor
    """(T, B): +1 or -1, the turn of each step. The network never sees it."""

    def agreement_of_tail(self, steps: int) -> float:
        """Share of the sequences whose last `steps` turns point to the label; a tie counts half."""
        forwards = self.directions[-steps:].sum(dim=0).sign()
        return ((1 + forwards * (2 * self.labels - 1)) / 2).mean().item()


def draw_turning(length: int, batch: int, generator: torch.Generator) -> Turning:
    """Draws `batch` sequences; the two labels take turns, so an even batch holds as many of each."""
    segments = math.ceil(length / SEGMENT)
    # At least one segment more than half: a short last segment then cannot turn the label around.
    agreeing = max(round(MAJORITY * segments), segments // 2 + 1)
    labels = torch.arange(batch) % 2
    rank = torch.rand(segments, batch, generator=generator).argsort(dim=0)
    towards_label = torch.where(rank < agreeing, 1.0, -1.0)
    directions = (towards_label * (2 * labels - 1)).repeat_interleave(SEGMENT, dim=0)[:length]

    start = 2 * math.pi * torch.rand(batch, generator=generator)
    phase = start + torch.cumsum(ANGLE * directions, dim=0)
    pointer = torch.stack([phase.cos(), phase.sin()], dim=-1)
    pointer = pointer + NOISE * torch.randn(pointer.shape, generator=generator)
    distraction = torch.randn(length, batch, CHANNELS - 2, generator=generator)
    return Turning(torch.cat([pointer, distraction], dim=-1), labels, directions)
