"""A whole layer by the C kernels, from x and torch's parameters to states, and back to gradients.

A pass is one call: it projects the inputs step by step, runs the warm-up of every chunk, and backward sums the
gradients of weights and biases, so that neither projected inputs nor gate gradients ever reach memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from timeloom.buffers import empty
from timeloom.cells.base import Cell
from timeloom.compile.builtin import Builtin, builtin
from timeloom.compile.emit_cpu import aligned
from timeloom.compile.graph import Matrix
from timeloom.kernels.cpu import build
from timeloom.kernels.cpu.launch import Given, addresses, addresses_along
from timeloom.kernels.cpu.pack import unpack
from timeloom.kernels.cpu.sweeper import (
    CPUSweeper,
    call,
    given_masks,
    kept_by,
    kernel_of,
    largest_jump,
    masks_of,
    packed,
)
from timeloom.kernels.cpu.texts import Kernel, source
from timeloom.kernels.layer import Cutting, Found, Gradients, Layer
from timeloom.kernels.reference import floor_of, units_of
from timeloom.problem import Recurrence, cut_evenly, empty_states

MOST_UNITS = 128
"""Hidden units up to which products with x step by step, here, are faster than one large product over all steps:
measured by `python -m benchmarks.calibrate`."""
MOST_INPUTS = 256
"""The same for the width of x."""
MANY_THREADS = 3
"""Threads from which their sums are added up first."""


@dataclass(frozen=True)
class CPULayer(Layer):
    """GRU, LSTM and RNN in float32, with or without masks behind x (`timeloom.cells.masked`).

    `timeloom.compile.builtin` defines what each step saves.
    """

    takes_masks = True
    takes_resets = True

    @staticmethod
    def supports(x: Tensor, cell: Cell) -> bool:
        fits = CPULayer.fits(cell.parts[0], x.shape[-1] - cell.behind) and x.shape[1] > 0
        return fits and x.device.type == "cpu" and x.dtype == torch.float32 and build.unavailable() is None

    @staticmethod
    def fits(units: int, inputs: int) -> bool:
        """Whether a layer of these sizes is faster by one call than by sweeps over projected inputs."""
        return units <= MOST_UNITS and 0 < inputs <= MOST_INPUTS

    @staticmethod
    def tape_width(cell: Cell) -> int:
        return aligned(kept_by(cell, over_x=True))

    def sweeper(
        self, problem: Recurrence, keep: bool, tape: list[Tensor] | None = None
    ) -> tuple[CPUSweeper, list[Tensor]]:
        tape = self._empty_tape(keep) if tape is None else tape
        return CPUSweeper(problem, *tape), tape

    def _empty_tape(self, keep: bool) -> list[Tensor]:
        """A new tape, if anything is to be saved; the padding of its rows is zero."""
        kept = kept_by(self.cell, over_x=True) if keep else 0
        if not kept:
            return []
        (steps, batch, _), width = self.x.shape, aligned(kept)
        tape = empty(steps, batch, width, like=self.initial)
        if kept < width:
            tape[..., kept:] = 0
        return [tape]

    def forward(
        self, cutting: Cutting, share_of_box: float, keep: bool, found: Found | None = None
    ) -> tuple[list[Tensor], float]:
        states, tape = empty_states(self.x.shape[0], self.initial, self.parts), self._empty_tape(keep)
        floor = floor_of(self.cell, share_of_box)
        starts, ends, jump = self._run("forward", cutting, self.initial, states + tape, floor, {})
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
        chunks = -(-steps // cutting.chunk)
        sums = self.x.new_zeros(min(torch.get_num_threads(), chunks * batch), self._made.sums.size)
        taken = None if self.resets is None else self.initial.new_zeros(chunks * batch, self.cell.size)
        given: Given = {"input_grads": x_grads, "sums": sums, "final": final, "reset_grads": taken}
        given |= {"lengths": torch.full((batch,), steps, dtype=torch.int64)}
        given |= {"incoming": None if incoming is None else incoming.contiguous()}
        _, begins, jump = self._run("adjoint", cutting, final, kept, 0.0, given)
        d_initial = begins[-batch:] if taken is None else begins[-batch:] + taken.view(chunks, batch, -1).sum(0)
        return (x_grads, d_initial, *self._by_weights(_added_up(sums))), jump

    @cached_property
    def _kernel(self) -> Kernel:
        return kernel_of(self.cell, over_x=True)

    @cached_property
    def _made(self) -> Builtin:
        return builtin(self._kernel.kind, self.n, self.w_ih.shape[1], self._kernel.masked)

    def _run(
        self, direction: str, cutting: Cutting, first: Tensor, kept: list[Tensor], floor: float,
        given: Given,
    ) -> tuple[Tensor, Tensor, float]:  # fmt: skip
        """Sweep all chunks; returns their starts and ends, and the largest jump."""
        assert cutting.sweeps == 1, "corrections are the general solver's"
        (steps, batch, width), warmup, parts = self.x.shape, cutting.warmup, len(self.parts)
        segments = cut_evenly(steps, batch, cutting.chunk, direction == "adjoint")
        ends = first.clone() if warmup == 0 else first.new_empty(len(segments), first.shape[1])
        starts, x = torch.empty_like(ends), self.x.contiguous()
        kernel, made = self._kernel, self._made
        weights, masks = packed(kernel, direction, made, [self.w_hh, self.w_ih]), masks_of(self.cell, x)
        units = self._units() if getattr(source(kernel), direction).units else []
        given |= {"weights": addresses(weights), "units": addresses_along(units, self.n), **given_masks(masks)}
        given |= {"inputs": x, "origin": self.initial.contiguous(), "starts": starts, "ends": ends}
        given |= {"states": addresses(kept[:parts]), "tape": kept[parts] if len(kept) > parts else None}
        if self.resets is not None:
            given["resets"] = self.resets.contiguous().view(torch.uint8)
        sizes = {"batch": batch, "n": self.n, "depth": self.w_ih.shape[1], "input_stride": width, "lead": warmup}
        sizes["incoming_width"] = self.n
        call(kernel, made, direction, segments, sizes, given)
        if warmup == 0:
            return starts, ends, 0.0
        return starts, ends, largest_jump(starts, ends, batch, parts, floor, fading=direction == "adjoint")

    def _units(self) -> list[Tensor]:
        """Per-unit vectors of the normal form: the bias of every gate, and the cell's own vector (`units_of`)."""
        bias = self.bias()
        return [self.w_ih.new_zeros(len(self.w_ih)) if bias is None else bias, units_of(self.cell)]

    def _by_weights(self, sums: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of w_ih, w_hh, b_ih and b_hh from sums `(threads, ·)` for the normal form's weights."""
        made, gates = self._made, len(self.w_hh) // self.n
        through_h, through_x = made.fused.matrices
        ((*_, by_h),), ((*_, by_x),) = made.sums.of_stacks
        weights = unpack(sums, by_x.at, through_x), unpack(sums, by_h.at, through_h, made.turned)
        if self.b_ih is None:
            return *weights, None, None
        (by_units,) = made.sums.of_units
        bias = Matrix(gates, 1, self.n, 1)
        first = by_units.at - by_units.column  # a GRU's d_M comes before the gradients d_r, d_z, d_n of x's gates
        b_ih = unpack(sums, first + (made.fused.unit_at[0] or 0), bias)
        b_hh = unpack(sums, by_units.at, bias, made.turned)
        return *weights, b_ih.view(-1), b_hh.view(-1)


def _added_up(sums: Tensor) -> Tensor:
    """The sums `(threads, ·)` of many threads as those of one: to look at all of them weight by weight takes longer."""
    return sums if len(sums) < MANY_THREADS else sums.sum(0, keepdim=True)
