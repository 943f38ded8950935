"""A whole layer by the Triton kernels: a few launches each way, one number to read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from timeloom.buffers import empty
from timeloom.cells.base import Cell, sum_outer
from timeloom.kernels.gpu.sweeper import SLOPES, GPUSweeper, has_triton, in_full_precision, largest
from timeloom.kernels.gpu.wide import WideSweeper
from timeloom.kernels.layer import Cutting, Found, Gradients, Layer
from timeloom.kernels.reference import AdjointData
from timeloom.problem import Recurrence, cut_evenly, empty_states

PRODUCTS = (torch.float32, torch.bfloat16, torch.float16)
MOST_RECORDED = 2048
"""Steps of a wide layer, each some launches, that a CUDA graph may hold."""


@dataclass(frozen=True)
class GPULayer(Layer):
    """GRU, LSTM and RNN of any width; x and weights in float32 or half precision, the initial state in float32.

    Keeps the derivatives of every step `(T, B, SLOPES n)`.
    """

    corrects: ClassVar[bool] = True

    @staticmethod
    def supports(x: Tensor, cell: Cell) -> bool:
        return x.device.type == "cuda" and x.dtype in PRODUCTS and x.shape[1] > 0 and has_triton()

    @staticmethod
    def tape_width(kernel: str, n: int) -> int:
        return SLOPES[kernel] * n

    def recordable(self, cutting: Cutting) -> bool:
        return self._kind is GPUSweeper or (cutting.chunk + cutting.warmup) * cutting.sweeps <= MOST_RECORDED

    def sweeper(
        self, problem: Recurrence, keep: bool, tape: list[Tensor] | None = None
    ) -> tuple[GPUSweeper, list[Tensor]]:
        if tape is None:
            tape = [GPUSweeper.room_for_tape(problem)] if keep else []
        return self._kind(problem, *tape), tape

    @property
    def _kind(self) -> type[GPUSweeper]:
        return GPUSweeper if self.n <= largest(self.kernel, self.x.device) else WideSweeper

    def forward(
        self, cutting: Cutting, share_of_box: float, keep: bool, found: Found | None = None
    ) -> tuple[list[Tensor], Tensor | float]:
        (steps, batch, _), sweeps = self.x.shape, cutting.sweeps
        bias, flat = self.bias(), self.x.flatten(0, 1)
        with in_full_precision():
            u = torch.mm(flat, self.w_ih.t()) if bias is None else torch.addmm(bias, flat, self.w_ih.t())
        sweeper, tape = self.sweeper(Recurrence(self.cell, u.view(steps, batch, -1), self.initial), keep)
        states = empty_states(steps, self.initial, self.parts, dtype=u.dtype)
        segments = cut_evenly(steps, batch, cutting.chunk, False)
        links = -(-steps // cutting.chunk)
        if links == 1:
            sweeper.forward(segments, self.initial, states)
            return states + tape, 0.0
        into = states if sweeps == 1 else None
        if cutting.warmup:
            starts, ends, decay = sweeper.forward_entering(segments, cutting.warmup, into, sweeps > 1)
        else:
            starts = self.initial.repeat(links, 1)
            ends, decay = sweeper.forward(segments, starts, into, sweeps > 1)
        for left in reversed(range(sweeps - 1)):
            assert decay is not None
            starts = sweeper.correct(starts, ends, decay, boxed=True)
            ends, decay = sweeper.forward(segments, starts, None if left else states, True)
        if found is not None and u.dtype == self.initial.dtype:  # a solver goes on in the state's precision
            found.starts, found.ends, found.decay, found.u = starts, ends, decay, sweeper.problem.u
        return states + tape, sweeper.certify(starts, ends, share_of_box, decay)

    def backward(
        self, cutting: Cutting, kept: list[Tensor], grads: tuple[Tensor | None, Tensor | None], want_x: bool
    ) -> tuple[Gradients, Tensor | float]:
        (*states, slopes), (incoming, final), sweeps = kept, grads, cutting.sweeps
        cell, (steps, batch) = self.cell, self.x.shape[:2]
        sweeper = self._kind(Recurrence(cell, slopes, self.initial), slopes)  # reads the tape, and no inputs
        final = None if final is None else final.to(self.initial.dtype)
        incoming = None if incoming is None else incoming.contiguous()
        gate_grads = empty(steps, batch, cell.gate_width, like=slopes)
        segments = cut_evenly(steps, batch, cutting.chunk, True)
        links = -(-steps // cutting.chunk)
        error: Tensor | float = 0.0
        reading, writing = AdjointData(states, incoming), AdjointData(states, incoming, gate_grads)
        data = writing if sweeps == 1 or links == 1 else reading
        if links == 1:
            begins, _ = sweeper.adjoint(segments, self.at_ends(final, links), data)
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
            error = sweeper.certify(ends, begins, 0.0, decay, joint=True)
        with in_full_precision():
            b_sum = None if self.b_ih is None else sweeper.bias_grads(gate_grads).to(gate_grads.dtype)
            return self._gradients(states, gate_grads.flatten(0, 1), b_sum, begins[-batch:], want_x), error

    def _gradients(
        self, states: list[Tensor], gate_grads: Tensor, b_sum: Tensor | None, d_initial: Tensor, want_x: bool
    ) -> Gradients:
        """From gate gradients `(N, G)` and their sum `(G,)`."""
        cell, n = self.cell, self.n
        d_u, x, before = cell.input_grads(gate_grads), self.x.flatten(0, 1), states[0][:-1].flatten(0, 1)
        if self.kernel == "gru":
            w_hh = gate_grads.new_empty(self.w_hh.shape)
            sum_outer(gate_grads[:, : 2 * n], before, out=w_hh[: 2 * n])
            sum_outer(gate_grads[:, 3 * n :], before, out=w_hh[2 * n :])
        else:
            w_hh = sum_outer(gate_grads, before)
        d_x = torch.mm(d_u, self.w_ih).view(self.x.shape) if want_x else None
        b_ih = b_hh = None
        if b_sum is not None:
            b_ih = b_sum[: len(self.w_hh)]
            b_hh = torch.cat([b_sum[: 2 * n], b_sum[3 * n :]]) if self.kernel == "gru" else b_ih.clone()
        return d_x, d_initial, sum_outer(d_u, x), w_hh, b_ih, b_hh
