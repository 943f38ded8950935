"""The states that warm starts keep for one recurrence: a row for each sample, all in one tensor."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor
from torch.nn import functional as F

from timeloom.known import KnownStates
from timeloom.problem import Recurrence


class KeptStates:
    """States `(N, K, S)` after every `every` steps, one row for each sample.

    Samples get rows in the order in which they come; if there are no more rows, their number is doubled.
    """

    def __init__(self, like: Tensor, every: int) -> None:
        self.every = every
        self.states = like.new_empty(0, *like.shape[1:])
        self.samples: dict[Hashable, tuple[int, int]] = {}
        """The row of each sample, and the number of steps that the sample had."""

    @property
    def nbytes(self) -> int:
        return self.states.numel() * self.states.element_size()

    def fits(self, found: Tensor, every: int) -> bool:
        """Whether states `(B, K, S)` can be kept in the same tensor as the present ones."""
        held = self.states
        same = (found.dtype, found.device, found.shape[2]) == (held.dtype, held.device, held.shape[2])
        return same and every == self.every

    def load(self, keys: list[Hashable], problem: Recurrence) -> KnownStates | None:
        """The states of a batch of samples; None unless all of them are known to their ends."""
        found = [self.samples.get(key, (0, 0)) for key in keys]
        ends = problem.ends().tolist()
        known = all(steps >= end for (_, steps), end in zip(found, ends, strict=True))
        if not known or self.states.shape[2] != problem.initial.shape[1] or min(ends) < self.every:
            return None
        rows = torch.tensor([row for row, _ in found]).to(self.states.device, non_blocking=True)
        return KnownStates(self.states, rows, self.every, problem.initial)

    def of(self, key: Hashable) -> Tensor:
        """The states of one sample, `(K, S)`."""
        row, steps = self.samples[key]
        return self.states[row, : steps // self.every]

    def save(self, keys: list[Hashable], found: Tensor, lengths: list[int], room: int) -> bool:
        """Keep states `(B, K, S)` of sequences of these lengths in at most `room` bytes; returns whether all fitted."""
        finite = found.isfinite().all(2)
        ends = [length // self.every for length in lengths]
        whole: list[bool] = (
            finite.all(1).tolist()
            if min(ends) == found.shape[1]
            else [bool(row[:end].all()) for row, end in zip(finite, ends, strict=True)]
        )
        self._make_room([key for key, good in zip(keys, whole, strict=True) if good], found.shape[1], room)
        kept = [(place, self.samples[key][0]) for place, (key, good) in enumerate(zip(keys, whole, strict=True))
                if good and key in self.samples]  # fmt: skip
        fitted = len(kept) == sum(whole)
        if not kept:
            return fitted
        for place, row in kept:
            self.samples[keys[place]] = row, lengths[place]
        rows = torch.tensor([row for _, row in kept], device=self.states.device)
        chosen = found if len(kept) == len(keys) else found[[place for place, _ in kept]]
        self.states[rows, : found.shape[1]] = chosen
        return fitted

    def _make_room(self, keys: list[Hashable], steps: int, room: int) -> None:
        """Make rows for new samples, as many as fit into `room` bytes, each of at least `steps` states."""
        count, longest, width = self.states.shape
        size = max(longest, steps) * width * self.states.element_size()
        most = max(room // max(size, 1), 0)
        if longest < steps and count > most:  # start anew with longer, but fewer rows
            self.samples, self.states = {}, self.states[:0]
            count = 0
        new = [key for key in keys if key not in self.samples][: max(most - len(self.samples), 0)]
        needed = len(self.samples) + len(new)
        rows = count if needed <= count else min(max(needed, 2 * count), most)
        if rows > count or longest < steps:
            more = max(steps - longest, 0)
            self.states = F.pad(self.states, (0, 0, 0, more, 0, rows - count))
        self.samples |= {key: (len(self.samples) + place, 0) for place, key in enumerate(new)}
