"""Sweeps of a compiled step on an NVIDIA GPU, by generated CUDA: the host's side of fused.cuh.

A block walks one row or a few. Arithmetic is float32 throughout. Interface and readable twin: the reference.
"""

from __future__ import annotations

import ctypes
import hashlib
from functools import cache, partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.functional import pad

from timeloom.compile.cuda_layout import Direction, Packed
from timeloom.compile.emit_cuda import CudaSource, emit
from timeloom.compile.program import Fused
from timeloom.compile.refusal import NotFused
from timeloom.kernels.cuda import nvrtc
from timeloom.kernels.cuda.chain import ChainSweeper, aligned, index_of, on_device
from timeloom.kernels.cuda.driver import Function
from timeloom.kernels.cuda.programs import architecture, headers, shared_room
from timeloom.kernels.faults import broken, guarded, or_reference
from timeloom.kernels.generated import form_of, in_normal_form
from timeloom.kernels.mending import Unless
from timeloom.kernels.reference import AdjointData
from timeloom.problem import Recurrence, Segments

_POINTERS = """
    sequence begin end lengths resets origin final inputs starts ends decay incoming written reset_grads
"""
ROWS = 4
"""Rows that a block walks together if there are more rows than multiprocessors and the weights fit on the chip: weights
read from memory at every step take as long for four rows together as for one row four times."""
_sources: WeakKeyDictionary[Fused, dict[tuple[Direction, int, int], CudaSource | str]] = WeakKeyDictionary()


def source_of(fused: Fused, direction: Direction, room: int, rows: int = 1) -> CudaSource | str:
    """The generated source for blocks of `rows` rows with `room` bytes of shared memory, or why there is none."""
    held, key = _sources.setdefault(fused, {}), (direction, room, rows)
    if key not in held:
        try:
            held[key] = emit(fused, direction, room, rows)
        except NotFused as reason:
            held[key] = str(reason)
    return held[key]


@cache
def hindrance(index: int) -> str | None:
    """Why no generated kernels run on this GPU, or None."""
    if torch.version.hip is not None or not torch.cuda.is_available():
        return "generated kernels are for NVIDIA GPUs"
    if nvrtc.unavailable() is not None:
        return nvrtc.unavailable()
    major, minor = torch.cuda.get_device_capability(index)
    return f"sm_{major}{minor} is older than sm_80" if major < 8 else None


def why_not(fused: Fused, device: torch.device) -> str | None:
    """Why a compiled step has no kernels on a GPU, or None if it has."""
    index = index_of(device)
    reason = hindrance(index) or broken(name_of(fused))
    if reason is not None:
        return reason
    sources = (source_of(fused, direction, shared_room(index)) for direction in ("forward", "adjoint"))
    return next((source for source in sources if isinstance(source, str)), None)


_names: WeakKeyDictionary[Fused, str] = WeakKeyDictionary()


def name_of(fused: Fused) -> str:
    """The name of a step's kernels in messages."""
    if fused not in _names:
        text = repr((fused.parts, fused.matrices, fused.adjoint.graph.values, fused.adjoint.next))
        _names[fused] = f"cuda cell {hashlib.sha256(text.encode()).hexdigest()[:8]}"
    return _names[fused]


@cache
def arguments(parts: int, weights: int, vectors: int) -> type[Any]:
    """`FusedArgs` of fused.cuh, field by field."""

    class FusedArgs(ctypes.Structure):
        _fields_ = [
            *[(name, ctypes.c_void_p) for name in _POINTERS.split()],
            ("states", ctypes.c_void_p * parts),
            ("weights", ctypes.c_void_p * (weights + 1)),
            ("vectors", ctypes.c_void_p * (vectors + 1)),
            *[(name, ctypes.c_longlong) for name in ("batch", "lead", "incoming_width", "rows")],
            ("unless", ctypes.c_void_p),
            ("limit", ctypes.c_float),
        ]

    return FusedArgs


@cache
def processors(index: int) -> int:
    """The number of a GPU's multiprocessors."""
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


@cache
def _function(index: int, direction: Direction, text: str, threads: int, shared: int) -> Function:
    code = nvrtc.compile_source(text, architecture(index), headers())
    return Function(index, code, f"fused_{direction}", threads, shared)


def compile_for(fused: Fused, device: torch.device) -> str | None:
    """Compile the kernels of a step now; returns why that failed, or None."""
    index = index_of(device)
    reason = why_not(fused, device)
    adjoint = source_of(fused, "adjoint", shared_room(index)) if reason is None else ""
    if isinstance(adjoint, CudaSource):
        nvrtc.compile_ahead(adjoint.text, architecture(index), headers())
    for direction in ("forward", "adjoint"):
        source = source_of(fused, direction, shared_room(index)) if reason is None else ""
        if isinstance(source, CudaSource):
            try:
                _function(index, direction, source.text, source.threads, source.shared)
            except RuntimeError as error:
                reason = str(error).splitlines()[0]
    return reason


class FusedCUDASweeper(ChainSweeper):
    """Runs stretches of a compiled step in generated code; dense transfers are left to the reference."""

    recordable = True
    mends = True

    @staticmethod
    def supports(problem: Recurrence) -> bool:
        u = problem.u
        if u.device.type != "cuda" or not u.dtype == problem.initial.dtype == torch.float32:
            return False
        if hindrance(index_of(u.device)) is not None:
            return False
        form = form_of(problem)
        return form is not None and why_not(form, u.device) is None

    def __init__(self, problem: Recurrence) -> None:
        super().__init__(problem)
        self._form, inputs = in_normal_form(problem)
        self.told_as = name_of(self._form.fused)
        self._inputs = aligned(inputs)
        self._marks = None if problem.resets is None else problem.resets.contiguous().view(torch.uint8)
        self._vectors = [unit.detach().contiguous() for unit in self._form.units]
        self._packed: dict[Packed, Tensor] = {}

    @or_reference
    def forward(
        self, segments: Segments, starts: Tensor, states: list[Tensor] | None = None, want_decay: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        _, ends, decay = self._forward(segments, starts.contiguous(), states, want_decay, 0)
        return ends, decay

    @or_reference
    def forward_entering(
        self, segments: Segments, lead: int, states: list[Tensor], want_decay: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        if lead == 0:
            starts = self._initial[segments.on(self._initial.device)[0]]
        else:
            starts = self._initial.new_empty(len(segments), self.cell.size)
        return self._forward(segments, starts, states, want_decay, min(lead, self.problem.steps))

    def mend(self, unless: Unless, states: list[Tensor]) -> None:
        self._forward(self._whole(reverse=False), self._initial, states, False, 0, unless)

    def mend_adjoint(self, unless: Unless, final: Tensor, data: AdjointData, begins: Tensor) -> None:
        self._adjoint(self._whole(reverse=True), final.contiguous(), data, False, 0, begins, unless)

    def _forward(
        self, segments: Segments, starts: Tensor, states: list[Tensor] | None, want_decay: bool, lead: int,
        unless: Unless | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
        ends = torch.empty_like(starts)
        decay = torch.empty_like(starts) if want_decay else None
        self._run("forward", segments, states, lead, unless, starts=starts, ends=ends, decay=decay)
        return starts, ends, decay

    @or_reference
    def adjoint(
        self, segments: Segments, ends: Tensor, data: AdjointData, want_decay: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        _, begins, decay = self._adjoint(segments, ends.contiguous(), data, want_decay, 0)
        return begins, decay

    @or_reference
    def adjoint_entering(
        self, segments: Segments, lead: int, final: Tensor, data: AdjointData, want_decay: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        if lead == 0:
            return super().adjoint_entering(segments, lead, final, data, want_decay)
        ends = self._initial.new_empty(len(segments), self.cell.size)
        final, lengths = final.contiguous(), self.problem.ends_on_device()
        lead = min(lead, self.problem.steps)
        return self._adjoint(segments, ends, data, want_decay, lead, final=final, lengths=lengths)

    def _adjoint(
        self, segments: Segments, ends: Tensor, data: AdjointData, want_decay: bool, lead: int,
        begins: Tensor | None = None, unless: Unless | None = None, **tensors: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
        begins = torch.empty_like(ends) if begins is None else begins
        decay = torch.empty_like(ends) if want_decay else None
        if data.reset_grads is not None:
            data.reset_grads.zero_()
        incoming = None if data.incoming is None else aligned(data.incoming)
        found = {"incoming": incoming, "written": data.gate_grads, "reset_grads": data.reset_grads}
        states = [aligned(part) for part in data.states]
        self._run("adjoint", segments, states, lead, unless, starts=ends, ends=begins, decay=decay, **found, **tensors)
        return ends, begins, decay

    def _run(
        self, direction: Direction, segments: Segments, states: list[Tensor] | None, lead: int, unless: Unless | None,
        **tensors: Tensor | None,
    ) -> None:  # fmt: skip
        if len(segments) == 0:
            return
        source = self._source(direction, len(segments) if unless is None else unless.rows)
        incoming = tensors.get("incoming")
        tensors |= {"inputs": self._inputs, "origin": self._initial, "resets": self._marks}
        tensors |= zip(("sequence", "begin", "end"), segments.on(self._initial.device), strict=True)
        pointers = {name: tensor.data_ptr() for name, tensor in tensors.items() if tensor is not None}
        args = arguments(source.parts, len(source.weights), source.vectors)(**pointers)
        args.batch, args.lead, args.rows = self.problem.batch, lead, len(segments)
        args.incoming_width = 0 if incoming is None else incoming.shape[-1]
        if unless is not None:
            args.unless, args.limit = unless.certificate.data_ptr(), unless.limit_on_device
        for name, held in (
            ("states", states or ()),
            ("weights", [self._pack(packed) for packed in source.weights]),
            ("vectors", self._vectors),
        ):
            for number, tensor in enumerate(held):
                getattr(args, name)[number] = tensor.data_ptr()
        blocks = -(-len(segments) // source.rows)
        guarded(self.told_as, partial(self._launch, direction, source, blocks, args))

    def _source(self, direction: Direction, rows: int) -> CudaSource:
        """The kernel that sweeps this number of rows fastest."""
        fused, room = self._form.fused, self._room()
        several = source_of(fused, direction, room, ROWS) if rows > self._processors() else ""
        together = isinstance(several, CudaSource) and "memory" not in several.places
        source = several if together else source_of(fused, direction, room)
        assert isinstance(source, CudaSource)
        return source

    def _room(self) -> int:
        return shared_room(self._device)

    def _processors(self) -> int:
        return processors(self._device)

    def _launch(self, direction: Direction, source: CudaSource, blocks: int, args: Any) -> None:
        with on_device(self._device):
            _function(self._device, direction, source.text, source.threads, source.shared)(blocks, args)

    def _pack(self, how: Packed) -> Tensor:
        """A stack `(count, blocks, out, in)` in the kernel's layout; see `Packed`."""
        if how not in self._packed:
            weights = self._form.matrices[how.matrix].detach()
            self._packed[how] = in_fours(weights, how.transposed) if how.in_fours else weights.contiguous()
        return self._packed[how]


def in_fours(weights: Tensor, transposed: bool) -> Tensor:
    """`(count, blocks, out, in)` as `(count, in / 4, blocks · out, 4)`, padded with zeros: neighbouring units lie side
    by side.
    """
    weights = (weights.transpose(-1, -2) if transposed else weights).flatten(1, 2)
    padded: Tensor = pad(weights, (0, -weights.shape[-1] % 4))
    packed: Tensor = padded.unflatten(-1, (-1, 4)).transpose(1, 2).contiguous()
    return packed
