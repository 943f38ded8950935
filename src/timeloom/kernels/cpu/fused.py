"""Sweeps of a compiled step by C generated for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from timeloom.buffers import empty
from timeloom.cells.fused import FusedCell
from timeloom.compile.emit_cpu import Sources, emit
from timeloom.compile.program import Fused
from timeloom.compile.sums import weight_grads
from timeloom.kernels import faults
from timeloom.kernels.cpu import build
from timeloom.kernels.cpu.launch import Given, Kernel, addresses, launch
from timeloom.kernels.cpu.pack import pack
from timeloom.kernels.cpu.sweeper import CompiledSweeper, largest_jump
from timeloom.kernels.generated import form_of, in_normal_form
from timeloom.kernels.reference import AdjointData
from timeloom.problem import Recurrence, Segments

_FLAGS: dict[torch.dtype, tuple[str, ...]] = {torch.float32: (), torch.float64: ("-DTIMELOOM_DOUBLE",)}
MOST_SUMMED = 1 << 18
"""Number of weights up to which sweeps sum their gradients: sums beyond a core's cache are left to one product over all
steps."""
_sources: WeakKeyDictionary[Fused, Sources] = WeakKeyDictionary()


def sources_of(fused: Fused) -> Sources:
    """The generated sources of a step; the same for both element types."""
    if fused not in _sources:
        _sources[fused] = emit(fused)
    return _sources[fused]


def why_not(fused: Fused, dtype: torch.dtype) -> str | None:
    """Why a compiled step has no kernels on this CPU, or None if it has; those of a training step are built here."""
    if dtype not in _FLAGS:
        return f"no kernels for {dtype}"
    found = build.generated(sources_of(fused).common, _FLAGS[dtype])
    return found.strip().splitlines()[0] if isinstance(found, str) else None


class FusedSums:
    """Gradients of a compiled step's inputs, and sums of its weight gradients, one set for each thread."""

    def __init__(self, problem: Recurrence, fused: Fused) -> None:
        self._fused, self._sums = fused, sources_of(fused).sums
        room = max(self._sums.size, 1)  # even without weights: kernels test whether there is a buffer for sums
        self.by_thread = problem.initial.new_zeros(torch.get_num_threads(), room)
        self.inputs: Tensor | None = None
        if problem.wants_u:
            self.inputs = empty(problem.steps, problem.batch, sum(fused.inputs), like=problem.initial)
        if self.inputs is not None and problem.lengths is not None:
            self.inputs.zero_()

    def clear(self) -> None:
        self.by_thread.zero_()

    def weights(self) -> tuple[Tensor, ...]:
        return weight_grads(self._fused, self._sums, self.by_thread.sum(0))


class FusedSweeper(CompiledSweeper):
    """Sweeps of any compiled step, in float32 and float64."""

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
        return 0 if form is None else form.work

    @staticmethod
    def tape_width(problem: Recurrence) -> int:
        form = form_of(problem)
        return 0 if form is None else sources_of(form).tape

    def __init__(self, problem: Recurrence) -> None:
        super().__init__(problem)
        self._form, inputs = in_normal_form(problem)
        self._units = [unit.detach().contiguous() for unit in self._form.units]
        self._kernels: dict[str, tuple[Kernel, list[Tensor]]] = {}
        inputs = inputs.contiguous()
        self._sizes = {"batch": problem.batch, "input_stride": inputs.shape[-1]}
        self._fixed = {"inputs": inputs, "origin": problem.initial.contiguous(), "tape": problem.tape}
        self._fixed |= {"units": addresses(self._units)}
        if problem.resets is not None:
            self._fixed["resets"] = problem.resets.contiguous().view(torch.uint8)

    def _launch(self, direction: str, segments: Segments, sizes: dict[str, int], given: Given) -> None:
        if direction not in self._kernels:
            self._kernels[direction] = self._kernel(direction)
        kernel, weights = self._kernels[direction]
        launch(kernel, segments, sizes, given | {"weights": addresses(weights)}, self._form.fused.work)

    def _kernel(self, direction: str) -> tuple[Kernel, list[Tensor]]:
        """The kernel of a direction, and the weights in its layout."""
        fused, sources = self._form.fused, sources_of(self._form.fused)
        source = sources.forward
        if direction == "adjoint":
            source = (None if self.problem.tape is None else sources.taped) or sources.adjoint
        found = build.generated((source.text,), _FLAGS[self.problem.u.dtype])
        if isinstance(found, str):
            raise faults.KernelFault(found)
        weights = [pack(self._form.matrices[p.matrix], fused.matrices[p.matrix], p) for p in source.packs]
        return getattr(found[0], f"timeloom_fused_{direction}"), weights

    def certifier(self, share_of_box: float, fading: bool) -> Callable[[Tensor, Tensor], float] | None:
        problem, parts = self.problem, self.cell.parts
        if problem.lengths is not None or problem.initial.dtype != torch.float32 or len(set(parts)) != 1:
            return None
        if self.cell.bound(problem.initial) is not None:  # the scale of jumps then depends on the box, too
            return None
        return partial(largest_jump, batch=problem.batch, parts=len(parts), floor=0.0, fading=fading)

    def new_sums(self) -> FusedSums | None:
        cell = self.problem.cell
        if not isinstance(cell, FusedCell) or sources_of(cell.fused).sums.size > MOST_SUMMED:
            return None
        return FusedSums(self.problem, cell.fused)

    def _run_adjoint(self, segments: Segments, data: AdjointData, lead: int, **tensors: Tensor | None) -> None:
        if data.sums is not None:
            assert isinstance(data.sums, FusedSums)
            tensors |= {"sums": data.sums.by_thread, "input_grads": data.sums.inputs}
        super()._run_adjoint(segments, data, lead, **tensors)
