"""A whole layer by the Triton kernels: a few launches each way, one number to read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from timeloom.memory import empty
from timeloom.problem import Recurrence, cut_evenly, empty_states
from timeloom.sweep.gpu import LARGEST, GPUSweeper, has_triton
from timeloom.sweep.layer import Layer


@dataclass(frozen=True)
class GPULayer(Layer):
    """GRU and RNN of up to 128 units, LSTM of up to 64, in float32. Keeps the projected inputs."""

    @staticmethod
    def supports(kernel: str, x: Tensor, n: int) -> bool:
        fits = x.device.type == "cuda" and x.dtype == torch.float32 and n <= LARGEST[kernel]
        return fits and x.shape[1] > 0 and has_triton()

    def sweeper(self, problem: Recurrence, keep: bool) -> tuple[GPUSweeper, list[Tensor]]:
        return GPUSweeper(problem), [problem.u]

    def forward(self, chunk: int, warmup: int, share_of_box: float, keep: bool) -> tuple[list[Tensor], Tensor | float]:
        steps, batch, _ = self.x.shape
        bias, flat = self.bias(), self.x.flatten(0, 1)
        u = torch.mm(flat, self.w_ih.t()) if bias is None else torch.addmm(bias, flat, self.w_ih.t())
        sweeper = GPUSweeper(Recurrence(self.cell, u.view(steps, batch, -1), self.initial))
        states = empty_states(steps, self.initial, self.parts)
        segments = cut_evenly(steps, batch, chunk, False)
        jump: Tensor | float = 0.0
        if warmup == 0:
            sweeper.forward(segments, self.initial, states)
        else:
            starts, ends, _ = sweeper.forward_entering(segments, warmup, states, False)
            jump = sweeper.certify(starts, ends, share_of_box)
        return [*states, sweeper.problem.u], jump

    def backward(
        self,
        chunk: int,
        warmup: int,
        kept: list[Tensor],
        incoming: Tensor | None,
        final: Tensor | None,
        want_x: bool,
    ) -> tuple[tuple[Tensor | None, ...], Tensor | float]:
        *states, u = kept
        steps, batch, n = *self.x.shape[:2], self.n
        cell = self.cell
        sweeper = GPUSweeper(Recurrence(cell, u, self.initial))
        final = torch.zeros_like(self.initial) if final is None else final
        incoming = None if incoming is None else incoming.contiguous()
        gate_grads = empty(steps, batch, cell.gate_width, like=self.initial)
        segments = cut_evenly(steps, batch, chunk, True)
        jump: Tensor | float = 0.0
        if warmup == 0:
            begins, _ = sweeper.adjoint(segments, final, states, incoming, gate_grads)
        else:
            ends, begins, _ = sweeper.adjoint_entering(
                segments, warmup, final, states, incoming, gate_grads, None, False
            )
            jump = sweeper.certify(ends, begins, 0.0)
        flat = gate_grads.flatten(0, 1)
        d_u, x = cell.input_grads(flat), self.x.flatten(0, 1)
        w_hh, *b_hn = cell.weight_grads([part[:-1].flatten(0, 1) for part in states], flat)
        d_x = torch.mm(d_u, self.w_ih).view(self.x.shape) if want_x else None
        b_ih = b_hh = None
        if self.b_ih is not None:
            b_ih = b_hh = d_u.sum(0)
            b_hh = torch.cat([b_ih[: 2 * n], *b_hn]) if b_hn else b_ih.clone()
        return (d_x, begins[-batch:], torch.mm(d_u.t(), x), w_hh, b_ih, b_hh), jump
