"""A whole layer by the CUDA kernels: one product for the inputs, one launch per sweep, one number for the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from timeloom.cells.base import Cell
from timeloom.kernels.cuda import dense, products
from timeloom.kernels.cuda.newton import CUDANewton
from timeloom.kernels.cuda.newton import fits as newton_fits
from timeloom.kernels.cuda.programs import text_of
from timeloom.kernels.cuda.sweeper import CUDASweeper, fits, launches_each_step, sequence_mask
from timeloom.kernels.cuda.weight_sums import foresee, input_gates, weight_sums
from timeloom.kernels.host_certificate import tell
from timeloom.kernels.layer import Cutting, Found, Gradients, Layer
from timeloom.kernels.mending import Retry, Unless, mended, unless
from timeloom.kernels.newton import newton_steps
from timeloom.kernels.reference import AdjointData
from timeloom.known import Entry
from timeloom.problem import Recurrence, cut_evenly, empty_states, lay_down_whole
from timeloom.torch_state import tf32

INPUTS = (torch.float32, torch.bfloat16, torch.float16)
MOST_RECORDED = 2048
"""Most steps of a wide layer, several launches each, that a CUDA graph may hold."""


@dataclass(frozen=True)
class CUDALayer(Layer):
    """GRU, LSTM and RNN of any width.

    x and weights are float32 or half precision, the initial state float32. States are saved in the dtype of x, gate
    values `(T, B, SAVED n)` in float32. Masks may stand behind a float32 x (`timeloom.cells.masked`); the mask of h is
    the same at all steps of a sequence.
    """

    corrects: ClassVar[bool] = True
    takes_masks: ClassVar[bool] = True
    takes_resets: ClassVar[bool] = True
    begins_anywhere: ClassVar[bool] = True

    @staticmethod
    def supports(x: Tensor, cell: Cell) -> bool:
        dtypes = INPUTS[:1] if cell.behind else INPUTS
        return x.dtype in dtypes and x.shape[1] > 0 and fits(cell.kernel, cell.parts[0], x.device)

    @staticmethod
    def tape_width(cell: Cell) -> int:
        return text_of(str(cell.kernel), cell.masks).saved * cell.parts[0]

    @staticmethod
    def tape_dtype(x: Tensor) -> torch.dtype:
        return torch.float32

    def recordable(self, cutting: Cutting) -> bool:
        if cutting.newton is not None:
            return True
        steps, batch = self.x.shape[:2]
        steps_launched = (cutting.chunk + cutting.warmup) * cutting.sweeps
        rows = -(-steps // cutting.chunk) * batch
        return steps_launched <= MOST_RECORDED or not launches_each_step(self.kernel, self.n, rows, self.x.device)

    def sweeper(
        self, problem: Recurrence, keep: bool, tape: list[Tensor] | None = None
    ) -> tuple[CUDASweeper, list[Tensor]]:
        if tape is None:
            saved = CUDASweeper.room_for_saved(problem) if keep else None
            tape = [] if saved is None else [saved]
        return CUDASweeper(problem, *tape), tape

    def forward(
        self, cutting: Cutting, share_of_box: float, keep: bool, found: Found | None = None, entry: Entry | None = None
    ) -> tuple[list[Tensor], Tensor | float]:
        if cutting.newton is not None:
            return self._newton(cutting, cutting.newton, share_of_box, keep)
        (steps, batch, _), sweeps = self.x.shape, cutting.sweeps
        u = self._inputs()
        sweeper, tape = self.sweeper(Recurrence(self.cell, u, self.initial, None, self.resets), keep)
        sweeper.of_layer, sweeper.limit = True, cutting.limit
        if keep:
            foresee(self.kernel, self.n, self.w_ih.shape[1], self.x.device)
        states = empty_states(steps, self.initial, self.parts)
        segments = cut_evenly(steps, batch, cutting.chunk, False)
        links = -(-steps // cutting.chunk)
        if links == 1:
            sweeper.forward(segments, self.initial, states)
            return self._kept(states, tape), 0.0
        into = states if sweeps == 1 else None
        if cutting.warmup and entry is None:
            starts, ends, decay = sweeper.forward_entering(segments, cutting.warmup, into, sweeps > 1)
        else:
            starts = self.initial.repeat(links, 1) if entry is None else entry.chunk_starts(sweeper, self.initial)
            ends, decay = sweeper.forward(segments, starts, into, sweeps > 1)
        for left in reversed(range(sweeps - 1)):
            assert decay is not None
            starts = sweeper.correct(starts, ends, decay, boxed=True)
            ends, decay = sweeper.forward(segments, starts, None if left else states, True)
        if found is not None and self.x.dtype == self.initial.dtype:  # else the saved states are rounded
            found.starts, found.ends, found.decay, found.u = starts, ends, decay, u
        error = sweeper.certify(starts, ends, share_of_box, decay)

        def retry_sweep(missed: Unless, warmup: int) -> Tensor:
            entered = sweeper.retry(missed, segments, warmup, starts, states, sweeps > 1)
            return sweeper.certify(starts, entered, share_of_box)

        given, retry = self._unless(error, cutting, len(segments), sweeper.met), Retry.of(retry_sweep, cutting)
        told = mended(error, given, lambda missed: sweeper.mend(missed, states, sweeps > 1), retry)
        return self._kept(states, tape), told

    def _unless(self, error: Tensor | float, cutting: Cutting, rows: int, met: Tensor | None = None) -> Unless | None:
        """The guard for a rerun inside a CUDA graph; None if every step would be a launch, which is too many.

        Calls outside of graphs lay down what the rerun in one chunk reads, so that no replay makes it.
        """
        found = unless(error, cutting.limit, rows, met)
        if found is None:
            lay_down_whole(self.x.shape[0], self.x.shape[1], self.x.device)
        elif launches_each_step(self.kernel, self.n, rows, self.x.device):
            return None
        return found

    @property
    def has_newton(self) -> bool:
        plain = self.x.dtype == torch.float32 and self.resets is None and not self.cell.behind
        return plain and newton_fits(self.cell.kernel, self.cell.size, self.x.device)

    def _newton(self, cutting: Cutting, steps: int, share_of_box: float, keep: bool) -> tuple[list[Tensor], Tensor]:
        problem = Recurrence(self.cell, self._inputs(), self.initial)
        saved = CUDASweeper.room_for_saved(problem) if keep else None
        states, residuals = newton_steps(CUDANewton(problem, share_of_box, saved), steps, self.initial)
        given = self._unless(residuals[-1], cutting, len(self.initial))
        if given is not None:
            tell(residuals, mended=True)
            self.sweeper(problem, keep, [] if saved is None else [saved])[0].mend(given, states)
            residuals = torch.cat([residuals[:-1], given.told.view(1)])
        return states if saved is None else [*states, saved], residuals

    def _scanned(
        self,
        cutting: Cutting,
        sweeps: int,
        kept: list[Tensor],
        grads: tuple[Tensor | None, Tensor | None],
        want_x: bool,
    ) -> tuple[Gradients, Tensor | float]:
        """The backward pass by a scan over the maps of all chunks; sweeps after it correct their rounding errors."""
        sweeper, states, incoming, final, gate_grads = self._backwards(kept, grads, cutting)
        batch, size = self.initial.shape
        kernels = CUDANewton(sweeper.problem, 0.0, sweeper.saved)
        segments = cut_evenly(len(self.x), batch, kernels.chunk, True)
        maps = kernels.compose_adjoint(states, incoming)
        ends = kernels.chain(maps, final)
        for left in reversed(range(sweeps)):
            writing = AdjointData(states, incoming, None if left else gate_grads)
            begins, _ = sweeper.adjoint(segments, ends.view(-1, size), writing)
            if left:
                ends = kernels.correct(maps, ends, begins)
        error = sweeper.certify(ends.view(-1, size), begins, 0.0, fading=True) if kernels.links > 1 else 0.0
        whole, begin = AdjointData(states, incoming, gate_grads), begins[-batch:]
        given = self._unless(error, cutting, len(segments), sweeper.met)
        error = mended(error, given, lambda at: sweeper.mend_adjoint(at, self.at_ends(final, 1), whole, begin))
        return self._gradients(states[0], gate_grads.flatten(0, 1), begins[-batch:], want_x), error

    def _backwards(
        self, kept: list[Tensor], grads: tuple[Tensor | None, Tensor | None], cutting: Cutting
    ) -> tuple[CUDASweeper, list[Tensor], Tensor | None, Tensor | None, Tensor]:
        """What a backward pass reads and writes: a sweeper with the saved gate values, the states, the loss's gradients
        with respect to the outputs and the final state, and a buffer for gate gradients.
        """
        steps, batch = self.x.shape[:2]
        states = [part.float() for part in kept[: len(self.parts)]]
        saved = kept[-1] if len(kept) > len(self.parts) else None
        incoming, final = (None if grad is None else grad.float() for grad in grads)
        inputs = self.x.new_empty(steps, batch, 0)  # not read by sweeps: the gate values are saved
        problem = Recurrence(self.cell, inputs, self.initial, None, self.resets)
        sweeper = CUDASweeper(problem, saved, sequence_mask(self.cell, self.x))
        sweeper.of_layer, sweeper.limit = True, cutting.limit
        return sweeper, states, incoming, final, self.initial.new_empty(steps, batch, self.cell.gate_width)

    def backward(
        self, cutting: Cutting, kept: list[Tensor], grads: tuple[Tensor | None, Tensor | None], want_x: bool
    ) -> tuple[Gradients, Tensor | float]:
        if cutting.newton is not None:
            return self._scanned(cutting, cutting.newton, kept, grads, want_x)
        (steps, batch), sweeps = self.x.shape[:2], cutting.sweeps
        sweeper, states, incoming, final, gate_grads = self._backwards(kept, grads, cutting)
        segments = cut_evenly(steps, batch, cutting.chunk, True)
        links = -(-steps // cutting.chunk)
        error: Tensor | float = 0.0
        taken = None if self.resets is None else self.initial.new_empty(links * batch, self.cell.size)
        reading, writing = AdjointData(states, incoming), AdjointData(states, incoming, gate_grads, taken)
        data = writing if sweeps == 1 or links == 1 else reading
        if links == 1:
            begins, _ = sweeper.adjoint(segments, self.at_ends(final, links), data)
        elif cutting.dense:
            begins, error = dense.solve(sweeper, cutting.chunk, final, reading, writing)
        else:
            if cutting.warmup:
                ends, begins, decay = sweeper.adjoint_entering(segments, cutting.warmup, final, data, sweeps > 1)
            else:
                ends = self.at_ends(final, links)
                begins, decay = sweeper.adjoint(segments, ends, data, sweeps > 1)
            for left in reversed(range(sweeps - 1)):
                assert decay is not None
                ends = sweeper.correct(ends, begins, decay, boxed=False)
                begins, decay = sweeper.adjoint(segments, ends, reading if left else writing, True)
            error = sweeper.certify(ends, begins, 0.0, decay, fading=True)
        into_resets = None if taken is None else taken.view(links, *self.initial.shape).sum(0)
        whole, decays = AdjointData(states, incoming, gate_grads, into_resets), sweeps > 1 and not cutting.dense

        def retry_sweep(missed: Unless, warmup: int) -> Tensor:
            sweeper.retry_adjoint(missed, segments, warmup, ends, final, writing, begins, decays)
            if taken is not None and into_resets is not None:
                torch.sum(taken.view(links, *self.initial.shape), 0, out=into_resets)
            return sweeper.certify(ends, begins, 0.0, fading=True)

        given, retry = self._unless(error, cutting, len(segments), sweeper.met), Retry.of(retry_sweep, cutting)
        begin = begins[-batch:]

        def mend(missed: Unless) -> None:
            sweeper.mend_adjoint(missed, self.at_ends(final, 1), whole, begin, decays)

        error = mended(error, given, mend, retry)
        d_initial = begin if into_resets is None else begin + into_resets
        return self._gradients(states[0], gate_grads.flatten(0, 1), d_initial, want_x), error

    def _inputs(self) -> Tensor:
        """Projected inputs `(T, B, G n)` in float32, whatever the precision of x, with masks behind them."""
        (steps, batch, _), flat, bias = self.x.shape, self._unmasked(), self.bias()
        if flat.dtype != torch.float32:
            flat = flat.float()
        rows = gates = None
        if self.cell.behind:
            rows = flat.new_empty(len(flat), len(self.w_ih) + self.cell.behind)
            gates, masks = rows.split([len(self.w_ih), self.cell.behind], 1)
            masks.copy_(self.x.flatten(0, 1)[:, -self.cell.behind :])
        with tf32.products(False):
            w_ih = self.w_ih.float().t()
            u = products.multiply(flat, w_ih, None if bias is None else bias.float(), out=gates)
        return (u if rows is None else rows).view(steps, batch, -1)

    def _unmasked(self) -> Tensor:
        """x `(T · B, D)` without the masks behind it."""
        return self.x.flatten(0, 1)[:, : self.w_ih.shape[1]]

    def _kept(self, states: list[Tensor], tape: list[Tensor]) -> list[Tensor]:
        return [part.to(self.x.dtype) for part in states] + tape

    def _gradients(self, h: Tensor, gate_grads: Tensor, d_initial: Tensor, want_x: bool) -> Gradients:
        """All gradients, each in its tensor's dtype, from states of h `(T + 1, B, n)` and gate gradients `(N, G)`."""
        x, before, mask = self._unmasked().float(), h[:-1], sequence_mask(self.cell, self.x)
        if self.resets is not None:
            before = torch.where(self.resets.unsqueeze(-1), self.initial[:, : self.n], before)
        before = (before if mask is None else before * mask).flatten(0, 1)
        with tf32.products(False):
            sums = weight_sums(self.kernel, gate_grads, x, before, self.b_ih is not None)
            d_u = input_gates(self.kernel, gate_grads)
            d_x = self._x_gradient(products.multiply(d_u, self.w_ih.float())) if want_x else None
        return d_x, d_initial, *(None if one is None else one.to(self.w_ih.dtype) for one in sums)

    def _x_gradient(self, d_x: Tensor) -> Tensor:
        """The gradient of x `(T, B, ·)` in its dtype, from that without masks `(T · B, D)`; it is zero for masks."""
        if self.cell.behind:
            d_x = pad(d_x, (0, self.cell.behind))
        return d_x.view(self.x.shape).to(self.x.dtype)
