"""Sweeps of a compiled step by generated C: the host's side of fused.h."""

from __future__ import annotations

import ctypes
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.functional import pad

from timeloom.buffers import empty
from timeloom.cells.fused import FusedCell
from timeloom.compile.emit_cpu import Pack, Source, emit
from timeloom.compile.graph import Matrix
from timeloom.compile.program import Fused
from timeloom.compile.sums import weight_grads
from timeloom.kernels.cpu import build
from timeloom.kernels.generated import form_of, in_normal_form
from timeloom.kernels.reference import AdjointData, ReferenceSweeper
from timeloom.problem import Recurrence, Segments

_POINTERS = """
    seq begin end lengths resets origin final inputs starts ends decay incoming written sums
    input_grads tape reset_grads states weights units
"""
_FLAGS: dict[torch.dtype, tuple[str, ...]] = {torch.float32: (), torch.float64: ("-DTIMELOOM_DOUBLE",)}
MOST_SUMMED = 1 << 18
"""Numbers of all weights up to which sweeps sum their gradients: sums beyond a core's cache are left to one product
over all steps."""
_sources: WeakKeyDictionary[Fused, Source] = WeakKeyDictionary()


class _FusedArgs(ctypes.Structure):
    """`fused_args` of fused.h, field by field."""

    _fields_ = [(name, ctypes.c_long) for name in ("batch", "rows", "lead", "incoming_width")] + [
        (name, ctypes.c_void_p) for name in _POINTERS.split()
    ]


def source_of(fused: Fused) -> Source:
    """The generated source of a step; the same for both element types."""
    if fused not in _sources:
        _sources[fused] = emit(fused)
    return _sources[fused]


def library_of(fused: Fused, dtype: torch.dtype) -> ctypes.CDLL | str:
    """The compiled source, or why there is none."""
    if dtype not in _FLAGS:
        return f"no kernels for {dtype}"
    return build.generated(source_of(fused).text, _FLAGS[dtype])


class FusedSums:
    """Sums of the gradients of a compiled step; one of each for every thread."""

    def __init__(self, problem: Recurrence, fused: Fused) -> None:
        self._fused, self._sums = fused, source_of(fused).sums
        self.by_thread = problem.initial.new_zeros(torch.get_num_threads(), self._sums.size)
        self.inputs = empty(problem.steps, problem.batch, sum(fused.inputs), like=problem.initial)
        if problem.lengths is not None:
            self.inputs.zero_()

    def clear(self) -> None:
        self.by_thread.zero_()

    def weights(self) -> tuple[Tensor, ...]:
        return weight_grads(self._fused, self._sums, self.by_thread.sum(0))


class FusedSweeper(ReferenceSweeper):
    """Runs stretches of a compiled step in generated code; the dense transfer stays with the reference."""

    @staticmethod
    def supports(problem: Recurrence) -> bool:
        u = problem.u
        if u.device.type != "cpu" or u.dtype != problem.initial.dtype or u.dtype not in _FLAGS:
            return False
        if build.unavailable() is not None:
            return False
        form = form_of(problem)
        return form is not None and not isinstance(library_of(form, u.dtype), str)

    @staticmethod
    def tape_width(problem: Recurrence) -> int:
        form = form_of(problem)
        return 0 if form is None else source_of(form).tape

    def __init__(self, problem: Recurrence) -> None:
        super().__init__(problem)
        cell, inputs = in_normal_form(problem)
        fused, dtype = cell.fused, problem.u.dtype
        library = library_of(fused, dtype)
        assert not isinstance(library, str)
        self._library = library
        lanes = build.library().timeloom_lanes() * 4 // dtype.itemsize
        held = [
            pack(cell.matrices[p.matrix].detach(), fused.matrices[p.matrix], p, lanes) for p in source_of(fused).packs
        ]
        units = [pad(unit.detach(), (0, 2 * lanes)).contiguous() for unit in cell.units]
        self._held = (held, units)
        self._fixed: dict[str, Tensor | ctypes.Array[ctypes.c_void_p]] = {
            "inputs": inputs.contiguous(),
            "origin": problem.initial.contiguous(),
            "weights": _addresses(held),
            "units": _addresses(units),
        }
        if problem.tape is not None:
            self._fixed["tape"] = problem.tape
        if problem.resets is not None:
            self._fixed["resets"] = problem.resets.contiguous().view(torch.uint8)

    def forward(
        self, segments: Segments, starts: Tensor, states: list[Tensor] | None = None, want_decay: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        ends = starts.clone(memory_format=torch.contiguous_format)
        decay = torch.empty_like(ends) if want_decay else None
        self._run("forward", segments, states, 0, ends=ends, decay=decay)
        return ends, decay

    def forward_entering(
        self, segments: Segments, lead: int, states: list[Tensor], want_decay: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        starts, ends, decay = self._boundaries(segments, want_decay)
        if lead == 0:
            starts = self.problem.initial[segments.sequence]
            return starts, *self.forward(segments, starts, states, want_decay)
        self._run("forward", segments, states, lead, starts=starts, ends=ends, decay=decay)
        return starts, ends, decay

    def adjoint(
        self, segments: Segments, ends: Tensor, data: AdjointData, want_decay: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        begins = ends.clone(memory_format=torch.contiguous_format)
        decay = torch.empty_like(begins) if want_decay else None
        self._run_adjoint(segments, data, 0, ends=begins, decay=decay)
        return begins, decay

    def adjoint_entering(
        self, segments: Segments, lead: int, final: Tensor, data: AdjointData, want_decay: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        if lead == 0:
            return super().adjoint_entering(segments, lead, final, data, want_decay)
        ends, begins, decay = self._boundaries(segments, want_decay)
        found = {"starts": ends, "ends": begins, "decay": decay, "final": final.contiguous()}
        self._run_adjoint(segments, data, lead, **found, lengths=self.problem.ends())
        return ends, begins, decay

    def new_sums(self) -> FusedSums | None:
        cell = self.problem.cell
        if not isinstance(cell, FusedCell) or source_of(cell.fused).sums.size > MOST_SUMMED:
            return None
        return FusedSums(self.problem, cell.fused)

    def _boundaries(self, segments: Segments, want_decay: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        starts = self.problem.initial.new_empty(len(segments), self.cell.size)
        return starts, torch.empty_like(starts), torch.empty_like(starts) if want_decay else None

    def _run_adjoint(self, segments: Segments, data: AdjointData, lead: int, **tensors: Tensor | None) -> None:
        if data.reset_grads is not None:
            data.reset_grads.zero_()
        incoming = None if data.incoming is None else data.incoming.contiguous()
        tensors |= {"incoming": incoming, "written": data.gate_grads, "reset_grads": data.reset_grads}
        if data.sums is not None:
            assert isinstance(data.sums, FusedSums)
            tensors |= {"sums": data.sums.by_thread, "input_grads": data.sums.inputs}
        self._run("adjoint", segments, data.states, lead, **tensors)

    def _run(
        self, direction: str, segments: Segments, states: list[Tensor] | None, lead: int, **tensors: Tensor | None
    ) -> None:
        if len(segments) == 0:
            return
        held = {name: tensor for name, tensor in tensors.items() if tensor is not None} | self._fixed
        held |= zip(("seq", "begin", "end"), (column.contiguous() for column in segments.columns), strict=True)
        if states is not None:
            held["states"] = _addresses(states)
        incoming = tensors.get("incoming")
        sizes = {"batch": self.problem.batch, "rows": len(segments), "lead": lead}
        sizes["incoming_width"] = 0 if incoming is None else incoming.shape[-1]
        args = _FusedArgs(**sizes, **{name: _address(value) for name, value in held.items()})
        run = getattr(self._library, f"timeloom_fused_{direction}")
        if run(ctypes.byref(args), torch.get_num_threads()) != 0:
            raise MemoryError(
                f"no memory for the sweep's scratch space ({len(segments)} rows of {self.cell.size} units)"
            )


def _addresses(tensors: list[Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * max(len(tensors), 1))(*[tensor.data_ptr() for tensor in tensors])


def _address(value: Tensor | ctypes.Array[ctypes.c_void_p]) -> int:
    return value.data_ptr() if isinstance(value, Tensor) else ctypes.addressof(value)


def pack(weights: Tensor, matrix: Matrix, how: Pack, lanes: int) -> Tensor:
    """A stack `(count, blocks, out, in)` as the generated loops read it; see `Pack`. Units are padded with zeros;
    of block-diagonal matrices only the band around the blocks is kept.
    """
    if how.transposed:
        weights, matrix = weights.transpose(-1, -2), matrix.transposed
    units, width, whole = how.span * lanes, matrix.blocks * matrix.outputs, matrix.blocks * matrix.inputs
    if matrix.blocks == 1:
        dense = weights.flatten(0, 1)  # (count, out, in)
    else:
        dense = torch.stack([torch.block_diag(*blocks) for blocks in weights])
    dense = pad(dense, (0, 0, 0, -width % units)).unflatten(1, (-1, units))  # (count, blocks of units, units, in)
    if matrix.blocks > 1:
        firsts = range(0, width, units)
        lasts = [min(first + units, width) for first in firsts]
        depth = max(
            ((last - 1) // matrix.outputs + 1 - first // matrix.outputs) * matrix.inputs
            for first, last in zip(firsts, lasts, strict=True)
        )
        begins = [min(first // matrix.outputs * matrix.inputs, whole - depth) for first in firsts]
        dense = torch.stack([dense[:, j, :, k : k + depth] for j, k in enumerate(begins)], 1)
    order = (1, 0, 3, 2) if how.transposed else (1, 3, 0, 2)
    return dense.permute(*order).contiguous()
