"""A recurrence to solve: cell, inputs, initial state, lengths and resets; and time cut into chunks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from timeloom.cells.base import Cell


@dataclass(frozen=True)
class Recurrence:
    """`s[t+1] = f(s[t], u[t])` for t = 0 … T−1, from `initial`.

    `u` is `(T, B, K)`, `initial` is `(B, S)`. `lengths` `(B,)` ends each sequence early (steps past it are not solved);
    `resets` `(T, B)` puts the state back to `initial` before the marked steps.
    """

    cell: Cell
    u: Tensor
    initial: Tensor
    lengths: Tensor | None = None
    resets: Tensor | None = None

    @property
    def steps(self) -> int:
        return self.u.shape[0]

    @property
    def batch(self) -> int:
        return self.u.shape[1]

    def ends(self) -> Tensor:
        """Length of each sequence, `(B,)` on the CPU."""
        if self.lengths is None:
            return torch.full((self.batch,), self.steps, dtype=torch.int64)
        return self.lengths.to(device="cpu", dtype=torch.int64)

    def inside(self) -> Tensor:
        """Which steps lie inside their sequence, `(T, B)`."""
        return (torch.arange(self.steps)[:, None] < self.ends()).to(self.u.device)


@dataclass(frozen=True)
class Segments:
    """Stretches of time to run side by side: row i is `begin[i] ≤ t < end[i]` of sequence `sequence[i]`. CPU, int64."""

    sequence: Tensor
    begin: Tensor
    end: Tensor

    def __len__(self) -> int:
        return self.sequence.numel()

    def __getitem__(self, rows: Tensor) -> Segments:
        return Segments(self.sequence[rows], self.begin[rows], self.end[rows])

    @property
    def longest(self) -> int:
        return int((self.end - self.begin).max()) if len(self) else 0

    def first(self, steps: int) -> Segments:
        """Only the first `steps` of every stretch."""
        return Segments(self.sequence, self.begin, torch.minimum(self.end, self.begin + steps))

    def last(self, steps: int) -> Segments:
        """Only the last `steps` of every stretch."""
        return Segments(self.sequence, torch.maximum(self.begin, self.end - steps), self.end)


def cut(problem: Recurrence, chunk: int) -> Segments:
    """Time in chunks of `chunk` steps, the last one ragged: C·B rows, chunk by chunk, sequences side by side.

    A chunk past the end of its sequence is an empty stretch.
    """
    if problem.lengths is None:
        return _cut_evenly(problem.steps, problem.batch, chunk)
    return _cut(problem.steps, problem.ends(), chunk)


@lru_cache(maxsize=64)
def _cut_evenly(steps: int, batch: int, chunk: int) -> Segments:
    """Chunks of sequences of one length; training asks for the same ones on every step."""
    with torch.inference_mode(False):  # what is kept must serve calls in any mode
        return _cut(steps, torch.full((batch,), steps, dtype=torch.int64), chunk)


def _cut(steps: int, lengths: Tensor, chunk: int) -> Segments:
    starts = torch.arange(0, steps, chunk, dtype=torch.int64)
    begin = torch.minimum(starts[:, None], lengths[None, :])
    end = torch.minimum(starts[:, None] + chunk, lengths[None, :])
    sequence = torch.arange(len(lengths), dtype=torch.int64).expand(len(starts), -1)
    return Segments(sequence.reshape(-1), begin.reshape(-1), end.reshape(-1))
