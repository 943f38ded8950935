"""Sweeps by the C kernels: GRU, LSTM and RNN in float32 on a CPU. Same signature as the reference, its twin."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from timeloom.kernels import faults
from timeloom.kernels.cpu import build
from timeloom.kernels.reference import AdjointData, ReferenceSweeper, floor_of, units_of
from timeloom.problem import Recurrence, Segments

_SIZES = "batch n rows depth lead dropped zoned"
_POINTERS = (
    "seq begin end lengths resets origin final inputs x bias units weights x_weights transposed x_transposed h c tape"
    " starts ends decay incoming gate_grads reset_grads x_grads sums"
)


class _SweepArgs(ctypes.Structure):
    """`sweep_args` of sweep.h, field by field."""

    _fields_ = [(name, ctypes.c_long) for name in _SIZES.split()] + [
        (name, ctypes.c_void_p) for name in _POINTERS.split()
    ]


class CPUSweeper(ReferenceSweeper):
    """Runs stretches of a recurrence in compiled code; the dense transfer stays with the reference."""

    @staticmethod
    def supports(problem: Recurrence) -> bool:
        u = problem.u
        return (
            problem.cell.kernel is not None
            and u.device.type == "cpu"
            and u.dtype == torch.float32
            and usable(problem.cell.kernel)
        )

    def __init__(self, problem: Recurrence, tape: Tensor | None = None) -> None:
        """`tape` `(T, B, 4n)` receives the gates' values wherever forward sweeps write states."""
        super().__init__(problem)
        self._tape = tape
        n, w_hh = problem.cell.parts[0], problem.cell.weights[0]
        self._fixed: dict[str, Tensor | None] = {
            "inputs": problem.u.contiguous(),
            "origin": origin(problem.initial, problem.cell.parts),
            "units": units_of(problem.cell),
            "weights": pack(w_hh, n),
        }
        if problem.resets is not None:
            self._fixed["resets"] = problem.resets.contiguous().view(torch.uint8)
        self._transposed: Tensor | None = None

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
        ends, begins, decay = self._boundaries(segments, want_decay)
        found = {"starts": ends, "ends": begins, "decay": decay, "final": final.contiguous()}
        found["lengths"] = self.problem.ends()
        self._run_adjoint(segments, data, lead, **found)
        return ends, begins, decay

    def certifier(self, share_of_box: float, fading: bool) -> Callable[[Tensor, Tensor], float] | None:
        if self.problem.lengths is not None:
            return None
        floor = floor_of(self.cell, share_of_box)
        batch, parts = self.problem.batch, len(self.cell.parts)
        return partial(largest_jump, batch=batch, parts=parts, floor=floor, fading=fading)

    def _boundaries(self, segments: Segments, want_decay: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        starts = self.problem.initial.new_empty(len(segments), self.cell.size)
        return starts, torch.empty_like(starts), torch.empty_like(starts) if want_decay else None

    def _run_adjoint(self, segments: Segments, data: AdjointData, lead: int, **tensors: Tensor | None) -> None:
        if self._transposed is None:
            self._transposed = pack_transposed(through_h(self.cell.weights[0], self.cell.kernel), self.cell.parts[0])
        if data.reset_grads is not None:
            data.reset_grads.zero_()
        tensors |= {"incoming": None if data.incoming is None else data.incoming.contiguous()}
        tensors |= {"transposed": self._transposed, "gate_grads": data.gate_grads, "reset_grads": data.reset_grads}
        self._run("adjoint", segments, data.states, lead, **tensors)

    def _run(
        self, direction: str, segments: Segments, states: list[Tensor] | None, lead: int, **tensors: Tensor | None
    ) -> None:
        if len(segments) == 0:
            return
        tensors |= dict(zip(("h", "c"), states or (), strict=False))
        if states is not None and direction == "forward":
            tensors["tape"] = self._tape
        sizes = {"batch": self.problem.batch, "n": self.cell.parts[0], "lead": lead} | self.cell.masks._asdict()
        call(f"{self.cell.kernel}_{direction}", segments, sizes, self._fixed | tensors)


def usable(kernel: str) -> bool:
    """Whether there are compiled kernels of a cell, and none of them failed before."""
    return build.unavailable() is None and faults.broken(_told_as(kernel)) is None


def _told_as(kernel: str) -> str:
    """The name by which users know the kernels of a cell: `cpu gru`."""
    return f"cpu {kernel.partition('_')[0]}"


def call(kernel: str, segments: Segments, sizes: dict[str, int], tensors: dict[str, Tensor | None]) -> None:
    """Run a kernel over stretches; what is not among `tensors`, or None, is NULL to it."""
    held = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    held |= zip(("seq", "begin", "end"), (column.contiguous() for column in segments.columns), strict=True)
    args = _SweepArgs(rows=len(segments), **sizes, **{name: tensor.data_ptr() for name, tensor in held.items()})

    def launch() -> int:
        status: int = getattr(build.library(), f"timeloom_{kernel}")(ctypes.byref(args), torch.get_num_threads())
        return status

    if faults.guarded(_told_as(kernel), launch) != 0:
        raise MemoryError(f"no memory for the sweep's scratch space ({len(segments)} rows of {sizes['n']} units)")


def largest_jump(starts: Tensor, ends: Tensor, batch: int, parts: int, floor: float, fading: bool) -> float:
    """The largest relative jump between each stretch's end and the next one's start, stretches in marching order."""
    rows, size = starts.shape
    jump: float = build.library().timeloom_jump(
        ctypes.c_void_p(starts.data_ptr()), ctypes.c_void_p(ends.data_ptr()), ctypes.c_long(rows // batch),
        ctypes.c_long(batch), ctypes.c_long(size // parts), ctypes.c_long(parts), ctypes.c_float(floor),
        ctypes.c_int(fading),
    )  # fmt: skip
    return jump


def origin(initial: Tensor, parts: tuple[int, ...]) -> Tensor:
    """`(B, S)` as the kernels read it: `(parts, B, n)`."""
    return torch.stack(initial.split(parts, -1)).contiguous()


def through_h(w_hh: Tensor, kernel: str | None) -> Tensor:
    """`W_hh`'s rows in the order in which the adjoint has their gradients: the GRU's candidate first."""
    return torch.cat([w_hh[-(len(w_hh) // 3) :], w_hh[: -(len(w_hh) // 3)]]) if kernel == "gru" else w_hh


def pack(weight: Tensor, n: int) -> Tensor:
    """`(G n, K)` as the kernels read it: `[block][k][gate][lanes]`, the units padded with zeros to whole blocks."""
    lanes = build.library().timeloom_lanes()
    by_depth = weight.view(-1, n, weight.shape[1]).permute(2, 0, 1)
    depth, gates, _ = by_depth.shape
    return pad(by_depth, (0, -n % lanes)).view(depth, gates, -1, lanes).permute(2, 0, 1, 3).contiguous()


def pack_transposed(weight: Tensor, n: int) -> Tensor:
    """`(G n, K)` as the adjoint reads it: `[pair of blocks of K][G units][2][lanes]`, all padded with zeros."""
    lanes = build.library().timeloom_lanes()
    width = weight.shape[1]
    rows = pad(weight.view(-1, n, width), (0, -width % (2 * lanes), 0, -n % lanes)).flatten(0, 1)
    return rows.view(len(rows), -1, 2, lanes).transpose(0, 1).contiguous()
