"""Sweeps of a compiled step by C that was generated for it."""

from __future__ import annotations

import ctypes
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from timeloom.buffers import empty
from timeloom.cells.fused import FusedCell
from timeloom.compile.emit_cpu import Source, emit
from timeloom.compile.program import Fused
from timeloom.compile.sums import weight_grads
from timeloom.kernels.cpu import build
from timeloom.kernels.cpu.launch import Given, addresses, launch
from timeloom.kernels.cpu.pack import pack
from timeloom.kernels.cpu.sweeper import CompiledSweeper
from timeloom.kernels.generated import form_of, in_normal_form
from timeloom.kernels.reference import AdjointData
from timeloom.problem import Recurrence, Segments

_FLAGS: dict[torch.dtype, tuple[str, ...]] = {torch.float32: (), torch.float64: ("-DTIMELOOM_DOUBLE",)}
MOST_SUMMED = 1 << 18
"""Numbers of all weights up to which sweeps sum their gradients: sums beyond a core's cache are left to one product
over all steps."""
_sources: WeakKeyDictionary[Fused, Source] = WeakKeyDictionary()


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


def why_not(fused: Fused, dtype: torch.dtype) -> str | None:
    """Why a compiled step has no kernels on this CPU, or None where it has."""
    library = library_of(fused, dtype)
    return library.strip().splitlines()[0] if isinstance(library, str) else None


class FusedSums:
    """Sums of the gradients of a compiled step; one of each for every thread."""

    def __init__(self, problem: Recurrence, fused: Fused) -> None:
        self._fused, self._sums = fused, source_of(fused).sums
        room = max(self._sums.size, 1)  # where there are no weights, too: kernels ask whether there is memory for sums
        self.by_thread = problem.initial.new_zeros(torch.get_num_threads(), room)
        self.inputs = empty(problem.steps, problem.batch, sum(fused.inputs), like=problem.initial)
        if problem.lengths is not None:
            self.inputs.zero_()

    def clear(self) -> None:
        self.by_thread.zero_()

    def weights(self) -> tuple[Tensor, ...]:
        return weight_grads(self._fused, self._sums, self.by_thread.sum(0))


class FusedSweeper(CompiledSweeper):
    """Any step that was compiled, in float32 and float64."""

    @staticmethod
    def supports(problem: Recurrence) -> bool:
        u = problem.u
        if u.device.type != "cpu" or u.dtype != problem.initial.dtype or u.dtype not in _FLAGS:
            return False
        if build.unavailable() is not None:
            return False
        form = form_of(problem)
        return form is not None and why_not(form, u.dtype) is None

    @staticmethod
    def work(problem: Recurrence) -> int:
        form = form_of(problem)
        return form.work if form is not None and source_of(form).sharable else 0

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
        self._work = self.work(problem)
        weights = [pack(cell.matrices[p.matrix], fused.matrices[p.matrix], p) for p in source_of(fused).packs]
        units = [unit.detach().contiguous() for unit in cell.units]
        self._held = (weights, units)
        inputs = inputs.contiguous()
        self._sizes = {"batch": problem.batch, "input_stride": inputs.shape[-1]}
        self._fixed = {"inputs": inputs, "origin": problem.initial.contiguous(), "tape": problem.tape}
        self._fixed |= {"weights": addresses(weights), "units": addresses(units)}
        if problem.resets is not None:
            self._fixed["resets"] = problem.resets.contiguous().view(torch.uint8)

    def _launch(self, direction: str, segments: Segments, sizes: dict[str, int], given: Given) -> None:
        launch(getattr(self._library, f"timeloom_fused_{direction}"), segments, sizes, given, self._work)

    def new_sums(self) -> FusedSums | None:
        cell = self.problem.cell
        if not isinstance(cell, FusedCell) or source_of(cell.fused).sums.size > MOST_SUMMED:
            return None
        return FusedSums(self.problem, cell.fused)

    def _run_adjoint(self, segments: Segments, data: AdjointData, lead: int, **tensors: Tensor | None) -> None:
        if data.sums is not None:
            assert isinstance(data.sums, FusedSums)
            tensors |= {"sums": data.sums.by_thread, "input_grads": data.sums.inputs}
        super()._run_adjoint(segments, data, lead, **tensors)
