"""States known from an earlier solve, and how chunks are entered from there: some steps early, or at their starts."""

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
    """Where all chunks but the first are entered, of sequences of one length.

    starts: `((C − 1)·B, S)`. early: the stretches from there to the chunks; None where these are their very starts.
    """

    starts: Tensor
    early: Segments | None
    every: int

    def chunk_starts(self, sweeper: ReferenceSweeper, initial: Tensor) -> Tensor:
        """Of all chunks `(C·B, S)`, after the steps before them are run."""
        found = self.starts if self.early is None else sweeper.forward(self.early, self.starts)[0]
        return torch.cat([initial, found])


@dataclass(frozen=True)
class KnownStates:
    """The states of B sequences as an earlier solve found them.

    states: `(N, K, S)`; `[rows[b], k]` is that of sequence b after (k + 1) · every steps. rows: `(B,)`.
    initial: `(B, S)`, the state before the first step.
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
        """`sweeper.forward_entering` from the known states `lead` steps or a few more before each stretch."""
        empty = segments.end <= segments.begin
        begin = torch.where(empty, segments.begin, _known_before(segments.begin - lead, self.every))
        device = self.rows.device
        sequence, at = segments.sequence.to(device), (begin // self.every - 1).to(device)
        entry = self._gathered(at.clamp(min=0), self.rows[sequence])
        entry = torch.where((at < 0).unsqueeze(-1), self.initial[sequence], entry)
        starts, _ = sweeper.forward(Segments(segments.sequence, begin, segments.begin), entry)
        return starts, *sweeper.forward(segments, starts, states, want_decay)

    def entry(self, steps: int, chunk: int, lead: int) -> Entry:
        """Where the chunks of sequences of one length are entered by a warm-up of `lead` steps or a few more."""
        batch = len(self.rows)
        early, at = _even_entry(steps, batch, chunk, lead, self.every)
        from_initial, at = int((at < 0).sum()), at[at >= 0]
        found = self._gathered(at.to(self.rows.device).unsqueeze(1), self.rows).flatten(0, 1)
        return Entry(torch.cat([self.initial.repeat(from_initial, 1), found]), early, self.every)

    def _gathered(self, at: Tensor, rows: Tensor) -> Tensor:
        """States in the dtype and on the device of the initial one."""
        found = self.states[rows.to(self.states.device), at.to(self.states.device)]
        return found.to(self.initial)


def _known_before(times: Tensor, every: int) -> Tensor:
    """The last times at which states are known; 0 is always one."""
    return times.clamp(min=0) // every * every


@lru_cache(maxsize=64)
def _even_entry(steps: int, batch: int, chunk: int, lead: int, every: int) -> tuple[Segments | None, Tensor]:
    """The stretches before all chunks but the first, and which known states they begin at: −1 for the initial one."""
    with torch.inference_mode(False):
        chunks = cut_evenly(steps, batch, chunk, False)
        begins = torch.arange(chunk, steps, chunk)
        if lead == 0 and chunk % every == 0:
            return None, begins // every - 1
        early = _known_before(begins - max(lead, 1), every)  # a step at least: no stretch is empty
        sequence, end = chunks.sequence[batch:], begins.repeat_interleave(batch)
        return Segments(sequence, early.repeat_interleave(batch), end), early // every - 1
