"""A recurrence to solve: cell, inputs, initial state, lengths and resets; and time cut into chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from timeloom.buffers import empty
from timeloom.cells.base import Cell
from timeloom.torch_state.streams import capturing

if TYPE_CHECKING:
    from timeloom.known import KnownStates


@dataclass(frozen=True)
class Recurrence:
    """`s[t+1] = f(s[t], u[t])` for t = 0 … T−1, from `initial`.

    `u` is `(T, B, K)`, `initial` is `(B, S)`. `lengths` `(B,)` ends each sequence early (steps past it are not solved);
    `resets` `(T, B)` sets the state back to `initial` before the marked steps. Iterations begin at `guess`, the states
    known from an earlier solve. `tape` `(T, B, ·)` holds what forward sweeps keep for the adjoint sweeps, where their
    kernels do so; both directions are then solved with the same problem. `wants_u`: whether adjoint sweeps
    are asked for the gradients of `u`.
    """

    cell: Cell
    u: Tensor
    initial: Tensor
    lengths: Tensor | None = None
    resets: Tensor | None = None
    guess: KnownStates | None = None
    tape: Tensor | None = None
    wants_u: bool = True

    @property
    def steps(self) -> int:
        return self.u.shape[0]

    @property
    def batch(self) -> int:
        return self.u.shape[1]

    @property
    def rounded(self) -> Tensor:
        """The tensor whose dtype limits the precision of a solution: the inputs if narrower, else the state."""
        return self.u if self.u.element_size() < self.initial.element_size() else self.initial

    def detach(self) -> Recurrence:
        """The same problem with all tensors detached."""
        cell = self.cell.with_weights(tuple(weight.detach() for weight in self.cell.weights))
        return replace(self, cell=cell, u=self.u.detach(), initial=self.initial.detach())

    def ends(self) -> Tensor:
        """Length of each sequence, `(B,)` on the CPU."""
        if self.lengths is None:
            return torch.full((self.batch,), self.steps, dtype=torch.int64, device="cpu")
        return self.lengths.to(device="cpu", dtype=torch.int64)

    def ends_on_device(self) -> Tensor:
        """Length of each sequence, `(B,)` on the device of the inputs."""
        if self.lengths is not None:
            return self.ends().to(self.u.device)
        full = _full if _keeps(self.u.device) else _full.__wrapped__
        return full(self.batch, self.steps, self.u.device)


@dataclass(frozen=True)
class Segments:
    """Stretches of time to run side by side: row i is `begin[i] ≤ t < end[i]` of sequence `sequence[i]`.

    The columns are contiguous int64 tensors on the CPU, which kernels read in place.
    """

    sequence: Tensor
    begin: Tensor
    end: Tensor
    evenly: tuple[int, int, int, bool, int] | None = None
    """The arguments of `cut_evenly`, if it made these stretches."""

    def __len__(self) -> int:
        return self.sequence.numel()

    def __getitem__(self, rows: Tensor) -> Segments:
        return Segments(self.sequence[rows], self.begin[rows], self.end[rows])

    @cached_property
    def longest(self) -> int:
        return int((self.end - self.begin).max()) if len(self) else 0

    @property
    def columns(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.sequence, self.begin, self.end

    def on(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """The columns on a device; copies are cached, since stretches of the same sizes are used again and again."""
        if device in self._copies:
            if capturing(device):
                _captured[id(self)] = self
            return self._copies[device]
        if not _keeps(device) and self.evenly is not None:
            return _cut_evenly(*self.evenly, device).columns  # made on the device: a graph cannot hold a copy
        columns = (self.sequence.to(device), self.begin.to(device), self.end.to(device))
        if _keeps(device):
            self._copies[device] = columns
        return columns

    @cached_property
    def _copies(self) -> dict[torch.device, tuple[Tensor, Tensor, Tensor]]:
        return {}


def cut(problem: Recurrence, chunk: int, backwards: bool = False) -> Segments:
    """Cut time into chunks of `chunk` steps, the last of which may be shorter: C·B rows, by chunk, then by sequence.

    A chunk past the end of its sequence is an empty stretch. With `backwards` the last chunk comes first.
    """
    if problem.lengths is None:
        return cut_evenly(problem.steps, problem.batch, chunk, backwards)
    return _cut(problem.steps, problem.ends(), chunk, backwards)


@lru_cache(maxsize=128)
def cut_evenly(steps: int, batch: int, chunk: int, backwards: bool, copies: int = 1) -> Segments:
    """`cut` for sequences of equal length, each row `copies` times; cached, since training steps repeat the sizes."""
    with torch.inference_mode(False):  # the cached tensors must serve calls outside inference mode, too
        even = _cut_evenly(steps, batch, chunk, backwards, copies, torch.device("cpu"))
        return replace(even, evenly=(steps, batch, chunk, backwards, copies))


def lay_down_whole(steps: int, batch: int, device: torch.device) -> None:
    """Keep on a device what runs in one chunk read, in both directions, for CUDA graphs to find."""
    if _keeps(device):
        for backwards in (False, True):
            cut_evenly(steps, batch, steps, backwards).on(device)


def _cut_evenly(steps: int, batch: int, chunk: int, backwards: bool, copies: int, device: torch.device) -> Segments:
    once = _cut(steps, torch.full((batch,), steps, dtype=torch.int64, device=device), chunk, backwards)
    if copies == 1:
        return once
    sequence, begin, end = (column.repeat_interleave(copies) for column in once.columns)
    return Segments(sequence, begin, end)


def _cut(steps: int, lengths: Tensor, chunk: int, backwards: bool) -> Segments:
    device = lengths.device
    starts = torch.arange(0, steps, chunk, dtype=torch.int64, device=device)
    starts = (starts.flip(0) if backwards else starts)[:, None]
    begin, end = torch.minimum(starts, lengths), torch.minimum(starts + chunk, lengths)
    sequence = torch.arange(len(lengths), dtype=torch.int64, device=device).repeat(len(starts))
    return Segments(sequence, begin.reshape(-1), end.reshape(-1))


def empty_states(steps: int, initial: Tensor, parts: tuple[int, ...], zeroed: bool = False) -> list[Tensor]:
    """Buffers `(T + 1, B, part)` for all states, one for each part; the first row holds `initial` `(B, S)`."""
    states = [empty(steps + 1, initial.shape[0], width, like=initial) for width in parts]
    for state, first in zip(states, parts_of(initial, parts), strict=True):
        if zeroed:
            state.zero_()
        state[0] = first
    return states


def parts_of(state: Tensor, parts: tuple[int, ...]) -> tuple[Tensor, ...]:
    """The parts of states `(..., S)`, as views: h, or h and c."""
    return state.split(parts, -1) if len(parts) > 1 else (state,)


def joined(parts: Sequence[Tensor]) -> Tensor:
    """States `(..., S)` from their parts: a concatenated copy, or the only part itself."""
    return torch.cat(tuple(parts), -1) if len(parts) > 1 else parts[0]


@lru_cache(maxsize=64)
def _full(batch: int, steps: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.full((batch,), steps, dtype=torch.int64, device=device)


_captured: dict[int, Segments] = {}
"""Stretches that captured CUDA graphs read: their device copies must stay alive when `cut_evenly` drops them."""


def _keeps(device: torch.device) -> bool:
    """Whether tensors made on this device now may be cached for later calls.

    Not on a side stream: there they may lie in the memory of a CUDA graph, which only its replays fill and which is
    freed with the graph.
    """
    return device.type != "cuda" or torch.cuda.current_stream(device) == torch.cuda.default_stream(device)
