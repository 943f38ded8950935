"""Sweeps by the C kernels: GRU, LSTM and RNN in float32 on a CPU. Same signature as the reference, its twin."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor
from torch.nn.functional import pad

from timeloom.problem import Recurrence, Segments
from timeloom.sweep import native
from timeloom.sweep.reference import ReferenceSweeper

_POINTERS = "seq begin end resets origin inputs units weights transposed h c ends leak incoming gate_grads reset_grads"


class _SweepArgs(ctypes.Structure):
    """`sweep_args` of cpu_kernels.c, field by field."""

    _fields_ = [(name, ctypes.c_long) for name in ("batch", "n", "rows")] + [
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
            and native.unavailable() is None
        )

    def __init__(self, problem: Recurrence) -> None:
        super().__init__(problem)
        self._library = native.library()
        n, w_hh = problem.cell.parts[0], problem.cell.weights[0]
        self._fixed = {
            "inputs": problem.u.contiguous(),
            "origin": torch.stack(problem.initial.split(problem.cell.parts, -1)).contiguous(),
            "units": (problem.cell.weights[1] if problem.cell.kernel == "gru" else w_hh.diagonal()).contiguous(),
            "weights": _pack(w_hh.view(-1, n, n).permute(2, 0, 1), self._library.timeloom_lanes()),
        }
        if problem.resets is not None:
            self._fixed["resets"] = problem.resets.contiguous().view(torch.uint8)
        self._transposed: Tensor | None = None

    def forward(
        self, segments: Segments, starts: Tensor, states: list[Tensor] | None = None, want_leak: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        ends = starts.clone(memory_format=torch.contiguous_format)
        leak = torch.empty_like(ends) if want_leak else None
        self._run("forward", segments, states, ends=ends, leak=leak)
        return ends, leak

    def adjoint(
        self,
        segments: Segments,
        ends: Tensor,
        states: list[Tensor],
        incoming: Tensor | None,
        gate_grads: Tensor | None = None,
        reset_grads: Tensor | None = None,
        want_leak: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if self._transposed is None:
            self._transposed = _pack_transposed(self.cell.weights[0], self._library.timeloom_lanes())
        begins = ends.clone(memory_format=torch.contiguous_format)
        leak = torch.empty_like(begins) if want_leak else None
        if reset_grads is not None:
            reset_grads.zero_()
        self._run(
            "adjoint", segments, states, ends=begins, leak=leak, transposed=self._transposed,
            incoming=None if incoming is None else incoming.contiguous(),
            gate_grads=gate_grads, reset_grads=reset_grads,
        )  # fmt: skip
        return begins, leak

    def _run(self, direction: str, segments: Segments, states: list[Tensor] | None, **tensors: Tensor | None) -> None:
        if len(segments) == 0:
            return
        held = {**self._fixed, **{name: tensor for name, tensor in tensors.items() if tensor is not None}}
        held |= {
            "seq": segments.sequence.contiguous(),
            "begin": segments.begin.contiguous(),
            "end": segments.end.contiguous(),
        }
        held |= dict(zip(("h", "c"), states or (), strict=False))
        pointers = {name: tensor.data_ptr() for name, tensor in held.items()}
        args = _SweepArgs(
            self.problem.batch, self.cell.parts[0], len(segments), *(pointers.get(name) for name in _POINTERS.split())
        )
        run = getattr(self._library, f"timeloom_{self.cell.kernel}_{direction}")
        if run(ctypes.byref(args), torch.get_num_threads()) != 0:
            raise MemoryError(f"no memory for the sweep's scratch space ({len(segments)} rows of {self.cell.size})")


def _pack(weight: Tensor, lanes: int) -> Tensor:
    """`(K, G, n)` as the kernels read it: `[block][k][gate][lanes]`, the units padded with zeros to whole blocks."""
    depth, gates, n = weight.shape
    return pad(weight, (0, -n % lanes)).view(depth, gates, -1, lanes).permute(2, 0, 1, 3).contiguous()


def _pack_transposed(w_hh: Tensor, lanes: int) -> Tensor:
    """`(G n, n)` as the adjoint reads it: `[pair of blocks][k][2][lanes]`, each gate's rows padded like the units."""
    n = w_hh.shape[1]
    rows = pad(w_hh.view(-1, n, n), (0, -n % (2 * lanes), 0, -n % lanes)).flatten(0, 1)
    return rows.view(len(rows), -1, 2, lanes).transpose(0, 1).contiguous()
