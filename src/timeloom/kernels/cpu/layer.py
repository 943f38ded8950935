"""A whole layer by the C kernels, from x and torch's parameters to states and back to the gradients of both.

One call does all of a pass: it projects the inputs on the way, enters every chunk early, and on the way back sums the
gradients of weights and biases, so that neither projected inputs nor gate gradients ever reach memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from timeloom.buffers import empty
from timeloom.cells.base import Cell
from timeloom.kernels.cpu import build
from timeloom.kernels.cpu.sweeper import CPUSweeper, call, largest_jump, origin, pack, pack_transposed, through_h
from timeloom.kernels.layer import Cutting, Found, Gradients, Layer
from timeloom.kernels.reference import floor_of, units_of
from timeloom.problem import Recurrence, cut_evenly, empty_states

MOST_UNITS = 128
"""Hidden units up to which a step's products are better done here than by one large product over all of time."""
MOST_INPUTS = 256
"""The same for the width of x."""

Tensors = dict[str, Tensor | None]
MANY_THREADS = 4
"""Threads for each sequence from which on a long warm-up may pay."""


@dataclass(frozen=True)
class CPULayer(Layer):
    """GRU, LSTM and RNN in float32, with masks behind x too (`timeloom.cells.masked`). Keeps the gates' values
    `(T, B, 4n)`; of an Elman network whose units keep themselves, what they would be otherwise `(T, B, n)`.
    """

    takes_masks = True

    @staticmethod
    def supports(x: Tensor, cell: Cell) -> bool:
        inputs = x.shape[-1] - cell.behind
        fits = cell.parts[0] <= MOST_UNITS and 0 < inputs <= MOST_INPUTS and x.shape[1] > 0
        return fits and x.device.type == "cpu" and x.dtype == torch.float32 and build.unavailable() is None

    @property
    def replans(self) -> bool:
        return torch.get_num_threads() >= MANY_THREADS * self.x.shape[1]

    @staticmethod
    def tape_width(cell: Cell) -> int:
        n = cell.parts[0]
        return 4 * n if cell.kernel in ("gru", "lstm") else n * cell.masks.zoned

    def sweeper(
        self, problem: Recurrence, keep: bool, tape: list[Tensor] | None = None
    ) -> tuple[CPUSweeper, list[Tensor]]:
        tape = self._empty_tape(keep) if tape is None else tape
        return CPUSweeper(problem, *tape), tape

    def _empty_tape(self, keep: bool) -> list[Tensor]:
        """Room for the gates' values, where they are to be kept and there are gates."""
        steps, batch = self.x.shape[:2]
        width = self.tape_width(self.cell)
        return [empty(steps, batch, width, like=self.initial)] if keep and width else []

    def forward(
        self, cutting: Cutting, share_of_box: float, keep: bool, found: Found | None = None
    ) -> tuple[list[Tensor], float]:
        states, tape, n = empty_states(len(self.x), self.initial, self.parts), self._empty_tape(keep), self.n
        bias = self.bias()
        tensors: Tensors = {"x": self.x.contiguous(), "units": units_of(self.cell)}
        tensors["bias"] = self.w_ih.new_zeros(len(self.w_ih)) if bias is None else bias
        tensors |= {"weights": pack(self.w_hh, n), "x_weights": pack(self.w_ih, n)}
        floor = floor_of(self.cell, share_of_box)
        starts, ends, jump = self._run("forward", cutting, self.initial, states + tape, floor, tensors)
        if found is not None:
            found.starts, found.ends = starts, ends
        return states + tape, jump

    def backward(
        self, cutting: Cutting, kept: list[Tensor], grads: tuple[Tensor | None, Tensor | None], want_x: bool
    ) -> tuple[Gradients, float]:
        (steps, batch, _), (incoming, final) = self.x.shape, grads
        final = torch.zeros_like(self.initial) if final is None else final.contiguous()
        x_grads = empty(*self.x.shape, like=self.x) if want_x else None
        if x_grads is not None and self.cell.behind:
            x_grads[..., -self.cell.behind :] = 0
        sums = self.x.new_zeros(torch.get_num_threads(), sum(self._sums()))
        tensors: Tensors = {
            "x": self.x.contiguous(),
            "units": units_of(self.cell),
            "x_grads": x_grads,
            "sums": sums,
        }
        tensors |= {"lengths": torch.full((batch,), steps, dtype=torch.int64), "final": final}
        tensors |= {"incoming": None if incoming is None else incoming.contiguous()}
        tensors |= {"transposed": pack_transposed(through_h(self.w_hh, self.kernel), self.n)}
        tensors |= {"x_transposed": pack_transposed(self.w_ih, self.n) if want_x else None}
        _, begins, jump = self._run("adjoint", cutting, final, kept, 0.0, tensors)
        return (x_grads, begins[-batch:], *self._weight_grads(sums.sum(0))), jump

    def _run(
        self, direction: str, cutting: Cutting, first: Tensor, kept: list[Tensor], floor: float, tensors: Tensors
    ) -> tuple[Tensor, Tensor, float]:
        """Sweep all chunks; returns what they start from and end with, and the largest jump."""
        assert cutting.sweeps == 1, "corrections are the general solver's"
        (steps, batch, width), warmup = self.x.shape, cutting.warmup
        segments = cut_evenly(steps, batch, cutting.chunk, direction == "adjoint")
        ends = first.clone() if warmup == 0 else first.new_empty(len(segments), first.shape[1])
        starts = torch.empty_like(ends)
        names = ("h", "c", "tape") if len(self.parts) == 2 else ("h", "tape")
        held = tensors | dict(zip(names, kept, strict=False)) | {"starts": starts, "ends": ends}
        held["origin"] = origin(self.initial, self.parts)
        sizes = {"batch": batch, "n": self.n, "depth": width - self.cell.behind, "lead": warmup}
        sizes |= self.cell.masks._asdict()
        call(f"{self.kernel}_{direction}", segments, sizes, held)
        if warmup == 0:
            return starts, ends, 0.0
        return starts, ends, largest_jump(starts, ends, batch, len(self.parts), floor, fading=direction == "adjoint")

    @property
    def _padded(self) -> int:
        lanes: int = build.library().timeloom_lanes()
        return -(-self.n // lanes) * lanes

    def _sums(self) -> tuple[int, int, int]:
        """Sizes of the kernel's sums: of W_hh and W_ih transposed, of the biases."""
        gates = len(self.w_hh) // self.n
        blocks = 4 if self.kernel == "gru" else gates
        columns = gates * self._padded
        return self.n * columns, self.w_ih.shape[1] * columns, blocks * self._padded

    def _weight_grads(self, sums: Tensor) -> tuple[Tensor | None, ...]:
        """Of w_ih, w_hh, b_ih and b_hh. The GRU's gradients through h stand in the order candidate, r, z; its biases'
        in the order candidate through h, r, z, candidate.
        """
        n, gates = self.n, len(self.w_hh) // self.n
        by_h, by_x, by_bias = sums.split(self._sums())
        by_h, by_x = (by.view(-1, gates, self._padded)[..., :n].permute(1, 2, 0) for by in (by_h, by_x))
        by_bias = by_bias.view(-1, self._padded)[:, :n]
        b_ih = b_hh = by_bias.reshape(-1)
        if self.kernel == "gru":
            by_h = by_h.roll(-1, 0)
            b_ih, b_hh = by_bias[1:].reshape(-1), by_bias[:3].roll(-1, 0).reshape(-1)
        weights = by_x.reshape(gates * n, -1).contiguous(), by_h.reshape(gates * n, n).contiguous()
        return (*weights, None, None) if self.b_ih is None else (*weights, b_ih, b_hh.clone())
