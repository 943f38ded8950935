"""Sweeps by compiled code on a CPU: the base of all such sweepers, and that of GRU, LSTM and RNN in float32.

Interface and readable twin: the reference.
"""

from __future__ import annotations

import ctypes
from abc import abstractmethod
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from timeloom.cells.base import Cell
from timeloom.compile.builtin import Builtin, builtin
from timeloom.compile.emit_cpu import aligned
from timeloom.kernels import faults
from timeloom.kernels.cpu import build
from timeloom.kernels.cpu.launch import Given, addresses, launch, numbers
from timeloom.kernels.cpu.pack import pack
from timeloom.kernels.cpu.texts import Kernel, source
from timeloom.kernels.reference import AdjointData, ReferenceSweeper, floor_of, units_of
from timeloom.problem import Recurrence, Segments


class CompiledSweeper(ReferenceSweeper):
    """Runs stretches of a recurrence in compiled code; dense transfers are left to the reference."""

    _sizes: dict[str, int]
    _fixed: Given
    """Arguments that are the same in all calls."""

    @abstractmethod
    def _launch(self, direction: str, segments: Segments, sizes: dict[str, int], given: Given) -> None:
        """Run the kernel of a direction, `forward` or `adjoint`."""

    @faults.or_reference
    def forward(
        self, segments: Segments, starts: Tensor, states: list[Tensor] | None = None, want_decay: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        ends = starts.clone(memory_format=torch.contiguous_format)
        decay = torch.empty_like(ends) if want_decay else None
        self._run("forward", segments, states, 0, ends=ends, decay=decay)
        return ends, decay

    @faults.or_reference
    def forward_entering(
        self, segments: Segments, lead: int, states: list[Tensor], want_decay: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        if lead == 0:
            starts = self.problem.initial[segments.sequence]
            return starts, *self.forward(segments, starts, states, want_decay)
        starts, ends, decay = self._boundaries(segments, want_decay)
        self._run("forward", segments, states, lead, starts=starts, ends=ends, decay=decay)
        return starts, ends, decay

    @faults.or_reference
    def adjoint(
        self, segments: Segments, ends: Tensor, data: AdjointData, want_decay: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        begins = ends.clone(memory_format=torch.contiguous_format)
        decay = torch.empty_like(begins) if want_decay else None
        self._run_adjoint(segments, data, 0, ends=begins, decay=decay)
        return begins, decay

    @faults.or_reference
    def adjoint_entering(
        self, segments: Segments, lead: int, final: Tensor, data: AdjointData, want_decay: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        if lead == 0:
            return super().adjoint_entering(segments, lead, final, data, want_decay)
        ends, begins, decay = self._boundaries(segments, want_decay)
        found = {"starts": ends, "ends": begins, "decay": decay, "final": final.contiguous()}
        self._run_adjoint(segments, data, lead, **found, lengths=self.problem.ends())
        return ends, begins, decay

    def _boundaries(self, segments: Segments, want_decay: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        starts = self.problem.initial.new_empty(len(segments), self.cell.size)
        return starts, torch.empty_like(starts), torch.empty_like(starts) if want_decay else None

    def _run_adjoint(self, segments: Segments, data: AdjointData, lead: int, **tensors: Tensor | None) -> None:
        if data.reset_grads is not None:
            data.reset_grads.zero_()
        incoming = None if data.incoming is None else data.incoming.contiguous()
        tensors |= {"incoming": incoming, "written": data.gate_grads, "reset_grads": data.reset_grads}
        self._run("adjoint", segments, data.states, lead, **tensors)

    def _run(
        self, direction: str, segments: Segments, states: list[Tensor] | None, lead: int, **tensors: Tensor | None
    ) -> None:
        if len(segments) == 0:
            return
        given: Given = {**self._fixed, **tensors}
        if states is not None:
            given["states"] = addresses(states)
        incoming = tensors.get("incoming")
        sizes = {"incoming_width": 0 if incoming is None else incoming.shape[-1], "lead": lead}
        self._launch(direction, segments, self._sizes | sizes, given)


class CPUSweeper(CompiledSweeper):
    """GRU, LSTM and RNN over projected inputs, with or without masks behind them."""

    @staticmethod
    def supports(problem: Recurrence) -> bool:
        u = problem.u
        return (
            problem.cell.kernel is not None
            and u.device.type == "cpu"
            and u.dtype == torch.float32
            and usable(problem.cell.kernel)
        )

    @staticmethod
    def tape_width(problem: Recurrence) -> int:
        return aligned(kept_by(problem.cell, over_x=False))

    @staticmethod
    def work(problem: Recurrence) -> int:
        return problem.cell.weights[0].numel()

    def __init__(self, problem: Recurrence, tape: Tensor | None = None) -> None:
        """`tape` `(T, B, ·)`: the tape of a whole layer, in place of the problem's own, that forward sweeps write
        wherever they write states.
        """
        super().__init__(problem)
        cell, u = problem.cell, problem.u.contiguous()
        self._kernel = kernel_of(cell, over_x=False)
        self._made = made = builtin(self._kernel.kind, cell.parts[0], None, self._kernel.masked)
        self._sizes = {"batch": problem.batch, "n": cell.parts[0], "input_stride": u.shape[-1]}
        self._pack = partial(packed, self._kernel, made=made, stacks=[cell.weights[0]])
        self._packed: dict[str, list[Tensor | None]] = {}
        self._units, self._masks = units_of(cell), masks_of(cell, u)
        self._fixed = {"inputs": u, "origin": problem.initial.contiguous(), **given_masks(self._masks)}
        self._tapes = {"forward": problem.tape if tape is None else tape, "adjoint": problem.tape}
        if problem.resets is not None:
            self._fixed["resets"] = problem.resets.contiguous().view(torch.uint8)

    def _launch(self, direction: str, segments: Segments, sizes: dict[str, int], given: Given) -> None:
        if direction not in self._packed:
            self._packed[direction] = self._pack(direction)
        weights: Given = {"weights": addresses(self._packed[direction]), "units": addresses([self._units])}
        call(self._kernel, self._made, direction, segments, sizes, given | weights | {"tape": self._tapes[direction]})

    def certifier(self, share_of_box: float, fading: bool) -> Callable[[Tensor, Tensor], float] | None:
        if self.problem.lengths is not None:
            return None
        floor = floor_of(self.cell, share_of_box)
        batch, parts = self.problem.batch, len(self.cell.parts)
        return partial(largest_jump, batch=batch, parts=parts, floor=floor, fading=fading)


def usable(kernel: str) -> bool:
    """Whether a cell has compiled kernels, none of which has failed before."""
    return build.unavailable() is None and faults.broken(_told_as(kernel)) is None


def _told_as(kernel: str) -> str:
    """The name of a cell's kernels in messages to users: `cpu gru`."""
    return f"cpu {kernel.partition('_')[0]}"


def kernel_of(cell: Cell, over_x: bool) -> Kernel:
    return Kernel(str(cell.kernel), over_x, cell.behind > 0)


def kept_by(cell: Cell, over_x: bool) -> int:
    """Numbers that a step saves for its adjoint. The number of hidden units may be a symbol of torch.compile."""
    kernel = kernel_of(cell, over_x)
    return builtin(kernel.kind, 1, 1 if over_x else None, kernel.masked).taped.width * cell.parts[0]


def call(
    kernel: Kernel, made: Builtin, direction: str, segments: Segments, sizes: dict[str, int], given: Given
) -> None:
    """Run one of the package's kernels over stretches."""

    def run() -> None:
        launch(getattr(build.library(), f"timeloom_{kernel.name}_{direction}"), segments, sizes, given, made.fused.work)

    faults.guarded(_told_as(kernel.kind), run)


def packed(kernel: Kernel, direction: str, made: Builtin, stacks: list[Tensor]) -> list[Tensor | None]:
    """Stacks of matrices, W_hh first, packed for the kernels of a direction."""
    text, matrices = source(kernel), made.fused.matrices
    read = text.forward if direction == "forward" else text.adjoint
    turned = (made.turned, 0)
    return [
        pack(stacks[p.matrix], matrices[p.matrix], p, turned[p.matrix]) if p in read.packs else None for p in text.packs
    ]


Masked = list[tuple[Tensor, int]]
"""Masks, each with its row stride."""


def given_masks(masks: Masked) -> Given:
    if not masks:
        return {}
    return {"masks": addresses([mask for mask, _ in masks]), "mask_strides": numbers([stride for _, stride in masks])}


def masks_of(cell: Cell, rows: Tensor) -> Masked:
    """Masks from the end of rows `(T, B, ·)`, as the kernels take them: the factor of h, then each part's kept share.

    A missing mask is one row of ones or zeros with stride 0.
    """
    if not cell.behind:
        return []
    n, width, at = cell.parts[0], rows.shape[-1], rows.shape[-1] - cell.behind
    found = []
    for there, otherwise in ((cell.masks.dropped, 1.0), *((cell.masks.zoned, 0.0) for _ in cell.parts)):
        found.append((rows[..., at : at + n], width) if there else (rows.new_full((n,), otherwise), 0))
        at += n * there
    return found


def largest_jump(starts: Tensor, ends: Tensor, batch: int, parts: int, floor: float, fading: bool) -> float:
    """The largest relative jump between each stretch's end and the next one's start, stretches in marching order."""
    rows, size = starts.shape
    if rows == 0:
        return 0.0
    jump: float = build.library().timeloom_jump(
        ctypes.c_void_p(starts.data_ptr()), ctypes.c_void_p(ends.data_ptr()), ctypes.c_long(rows // batch),
        ctypes.c_long(batch), ctypes.c_long(size // parts), ctypes.c_long(parts), ctypes.c_float(floor),
        ctypes.c_int(fading),
    )  # fmt: skip
    return jump
