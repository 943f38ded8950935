"""Adjoint sweeps over the chunks of a recurrence, and the gradients that they collect on the way."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from timeloom.buffers import empty
from timeloom.kernels import AdjointData
from timeloom.kernels import sweeper as choose_sweeper
from timeloom.problem import Recurrence, Segments, cut
from timeloom.solve.chain import Entered


class Summed(NamedTuple):
    """Gradients of a cell's inputs `(T, B, K)` and weights, summed up during the sweeps."""

    inputs: Tensor | None
    """None where they were not asked for."""
    weights: tuple[Tensor, ...]


class Sweeps:
    """Adjoint sweeps over the chunks, last chunk first, and what they collect besides the gradients at chunk begins.

    gate_grads: `(T, B, G)`; without any steps if the sweeper sums them up instead.
    initial_grad: gradient of the state before the first step, `(B, S)`.
    """

    def __init__(
        self,
        problem: Recurrence,
        states: list[Tensor],
        chunk: int,
        incoming: Tensor | None,
        final_grad: Tensor,
        summing: bool = False,
    ) -> None:
        self.problem, self.sweeper = problem, choose_sweeper(problem)
        self.segments = cut(problem, chunk, backwards=True)
        self.links, self._final_grad = -(-problem.steps // chunk), final_grad
        self._sums = self.sweeper.new_sums() if summing else None
        steps = 0 if self._sums is not None else problem.steps
        self.gate_grads = empty(steps, problem.batch, problem.cell.gate_width, like=problem.initial)
        if problem.lengths is not None:
            self.gate_grads.zero_()
        written = self.gate_grads if self._sums is None else None
        self.data = AdjointData(states, None if incoming is None else incoming.contiguous(), written)
        self._ends = torch.empty_like(final_grad).repeat(self.links, 1) if self._sums is not None else final_grad
        """`(C·B, S)`: the gradients at the chunk ends from which each chunk was last swept."""
        self._finished: list[tuple[Tensor, Tensor, Segments, Tensor]] = []
        """Sequential finishes: first links, their sequences, the rows that join all later links, the gradients at the
        ends of these rows."""
        self._swept_all = self._stale = False
        """Whether `_ends` is known for all chunks, and whether some rows were swept after the sums were made."""
        self.initial_grad = final_grad.clone()  # remains for sequences without steps
        self._reset_grads: Tensor | None = None
        """`(C·B, S)`: the gradients that flow into the resets of each row."""
        if problem.resets is not None:
            self._reset_grads = problem.initial.new_zeros(len(self.segments), problem.cell.size)

    def sweep(self, rows: Segments, ends: Tensor, where: Tensor, want_decay: bool) -> tuple[Tensor, Tensor | None]:
        if self._is_worth_all(rows):  # one summing sweep over all rows, not one over most and one for the sums
            all_ends = self._ends.index_copy(0, where, ends)
            begins, decay = self.sweep(self.segments, all_ends, torch.arange(len(all_ends), device="cpu"), want_decay)
            return begins[where], None if decay is None else decay[where]
        data = self._data_for(rows)
        begins, decay = self.sweeper.adjoint(rows, ends, data, want_decay)
        self._keep(rows, where, begins, data.reset_grads)
        self._note_ends(where, ends, data)
        return begins, decay

    def through(self, rows: Segments, ends: Tensor) -> Tensor:
        """The gradients at the begins of rows, from those at their ends alone: the loss adds none in between."""
        return self.sweeper.adjoint(rows, ends, AdjointData(self.data.states, None))[0]

    def enter(self, rows: Segments, lead: int, where: Tensor, want_decay: bool) -> Entered:
        data = self._data_for(rows)
        ends, begins, decay = self.sweeper.adjoint_entering(rows, lead, self._final_grad, data, want_decay)
        self._keep(rows, where, begins, data.reset_grads)
        self._note_ends(where, ends, data)
        return ends, begins, decay

    def finish(self, bad_links: Tensor, sequences: Tensor, ends: Tensor) -> Tensor:
        batch = self.problem.batch
        chain_rows = (bad_links * batch + sequences).cpu()
        if self._reset_grads is not None:
            later = torch.arange(self.links, device=bad_links.device)[:, None] >= bad_links
            kept = self._reset_grads.view(self.links, batch, -1)
            kept[:, sequences] = torch.where(later.unsqueeze(-1), 0, kept[:, sequences])  # also where values overflowed
        rows = self.segments[chain_rows]
        rows = Segments(rows.sequence, torch.zeros_like(rows.begin), rows.end)
        data = replace(self._data_for(rows), sums=None)
        begins, _ = self.sweeper.adjoint(rows, ends, data)
        self._keep(rows, chain_rows, begins, data.reset_grads)
        self._finished.append((bad_links, sequences, rows, ends))
        self._stale = True
        return begins

    def summed(self) -> Summed | None:
        """The sums over all chunks as they were last swept; None if the sweeper makes no sums."""
        if self._sums is None:
            return None
        if self._stale:
            rows, ends = self._rows_that_hold()
            self._sums.clear()
            self.sweeper.adjoint(rows, ends, replace(self.data, sums=self._sums))
        return Summed(self._sums.inputs, self._sums.weights())

    def _rows_that_hold(self) -> tuple[Segments, Tensor]:
        """Rows that cover all chunks, joined ones of sequential finishes included, and the gradients at their ends."""
        apart = torch.ones(self.links, self.problem.batch, dtype=torch.bool, device="cpu")
        for links, sequences, *_ in self._finished:
            for link, sequence in zip(links.tolist(), sequences.tolist(), strict=True):
                apart[link:, sequence] = False
        alone = apart.flatten().nonzero().squeeze(-1)
        pieces = [(self.segments[alone], self._ends[alone]), *[(rows, ends) for *_, rows, ends in self._finished]]
        sequence, begin, end = (torch.cat(column) for column in zip(*[rows.columns for rows, _ in pieces], strict=True))
        return Segments(sequence, begin, end), torch.cat([ends for _, ends in pieces])

    def _note_ends(self, where: Tensor, ends: Tensor, data: AdjointData) -> None:
        if self._sums is not None:
            self._ends[where] = ends
            self._stale = data.sums is None
            self._swept_all |= len(where) == len(self.segments)

    def into_resets(self) -> Tensor | None:
        """The gradient of the state that resets restore, `(B, S)`; None without resets."""
        kept = self._reset_grads
        return None if kept is None else kept.view(self.links, self.problem.batch, -1).sum(0)

    def _data_for(self, rows: Segments) -> AdjointData:
        data = self.data
        if self._sums is not None and self._are_all(rows):
            self._sums.clear()
            data = replace(data, sums=self._sums)
        if self._reset_grads is None:
            return data
        return replace(data, reset_grads=self._final_grad.new_empty(len(rows), self._final_grad.shape[1]))

    def _is_worth_all(self, rows: Segments) -> bool:
        """Whether these are at least half of the chunks, and the end gradients of all others are known."""
        return (
            self._swept_all
            and not self._finished
            and len(rows) < len(self.segments) <= 2 * len(rows)
            and not self._are_all(rows)
        )

    def _are_all(self, rows: Segments) -> bool:
        """Whether these rows are all the chunks that have steps."""
        if len(rows) == len(self.segments) or self.problem.lengths is None:
            return len(rows) == len(self.segments)
        return int((rows.end - rows.begin).sum()) == int(self.problem.ends().sum())

    def _keep(self, rows: Segments, where: Tensor, begins: Tensor, into_resets: Tensor | None) -> None:
        problem, device = self.problem, begins.device
        if self._reset_grads is not None and into_resets is not None:
            self._reset_grads[where.to(device)] = into_resets
        if len(rows) == len(self.segments) and problem.lengths is None:
            self.initial_grad.copy_(begins[-problem.batch :])
            return
        at_start = (rows.begin == 0).nonzero().squeeze(-1)
        self.initial_grad[rows.sequence[at_start].to(device)] = begins[at_start.to(device)]
