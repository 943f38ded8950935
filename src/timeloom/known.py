"""States known from an earlier solve, as entry points of chunks: at the chunk starts, or some steps before them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from timeloom.problem import Segments, cut_evenly

if TYPE_CHECKING:
    from timeloom.kernels.reference import ReferenceSweeper


@dataclass(frozen=True)
class Entry:
    """Where all chunks but the first are entered, for sequences of equal length.

    starts: the states at the entry points, `((C − 1)·B, S)`.
    early: the stretches from the entry points to the chunk starts; None if the two coincide.
    """

    starts: Tensor
    early: Segments | None
    every: int

    def chunk_starts(self, sweeper: ReferenceSweeper, initial: Tensor) -> Tensor:
        """The starts of all chunks, `(C·B, S)`: runs the stretches before them, if there are any."""
        found = self.starts if self.early is None else sweeper.forward(self.early, self.starts)[0]
        return torch.cat([initial, found])


@dataclass(frozen=True)
class KnownStates:
    """The states of B sequences from an earlier solve, kept every `every` steps.

    states: `(N, K, S)`; `states[rows[b], k]` is the state of sequence b after (k + 1) · every steps.
    rows: `(B,)`.
    initial: the state before the first step, `(B, S)`.
    """

    states: Tensor
    rows: Tensor
    every: int
    initial: Tensor

    def starts(self, chunk: int, links: int) -> Tensor:
        """Chunk starts `(C, B, S)`: the last known state at or before each."""
        at = (torch.arange(links, device=self.rows.device) * chunk // self.every - 1).clamp(min=0)
        found = self._gathered(at.unsqueeze(1), self.rows)
        unknown = int(min(links, -(-self.every // chunk)))  # chunks that begin before any state is known
        found[:unknown] = self.initial
        return found

    def enter(
        self, sweeper: ReferenceSweeper, segments: Segments, lead: int, states: list[Tensor] | None, want_decay: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """`sweeper.forward_entering` from the last known state that is at least `lead` steps before each stretch."""
        empty = segments.end <= segments.begin
        begin = torch.where(empty, segments.begin, _known_before(segments.begin - lead, self.every))
        device = self.rows.device
        sequence, at = segments.sequence.to(device), (begin // self.every - 1).to(device)
        entry = self._gathered(at.clamp(min=0), self.rows[sequence])
        entry = torch.where((at < 0).unsqueeze(-1), self.initial[sequence], entry)
        starts, _ = sweeper.forward(Segments(segments.sequence, begin, segments.begin), entry)
        return starts, *sweeper.forward(segments, starts, states, want_decay)

    def entry(self, steps: int, chunk: int, lead: int) -> Entry:
        """The entry points for a warm-up of at least `lead` steps, for sequences of equal length."""
        batch = len(self.rows)
        early, at = _even_entry(steps, batch, chunk, lead, self.every)
        from_initial, at = int((at < 0).sum()), at[at >= 0]
        found = self._gathered(at.to(self.rows.device).unsqueeze(1), self.rows).flatten(0, 1)
        return Entry(torch.cat([self.initial.repeat(from_initial, 1), found]), early, self.every)

    def _gathered(self, at: Tensor, rows: Tensor) -> Tensor:
        """`states[rows, at]` in the dtype and on the device of the initial state."""
        found = self.states[rows.to(self.states.device), at.to(self.states.device)]
        return found.to(self.initial)


def _known_before(times: Tensor, every: int) -> Tensor:
    """The last time at or before each of `times` at which the state is known: 0 or a multiple of `every`."""
    return times.clamp(min=0) // every * every


@lru_cache(maxsize=64)
def _even_entry(steps: int, batch: int, chunk: int, lead: int, every: int) -> tuple[Segments | None, Tensor]:
    """The stretches before all chunks but the first, and the index of the known state that each begins from.

    The index −1 stands for the initial state. No stretches (None) if all those chunks start at known states.
    """
    with torch.inference_mode(False):
        chunks = cut_evenly(steps, batch, chunk, False)
        begins = torch.arange(chunk, steps, chunk)
        if lead == 0 and chunk % every == 0:
            return None, begins // every - 1
        early = _known_before(begins - max(lead, 1), every)  # at least one step: no stretch is empty
        sequence, end = chunks.sequence[batch:], begins.repeat_interleave(batch)
        return Segments(sequence, early.repeat_interleave(batch), end), early // every - 1
