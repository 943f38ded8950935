"""Sweeps by the CUDA kernels that keep the recurrent weights in registers: GRU, LSTM and RNN, all steps in one launch.

Products have float32 accuracy (see products.cuh); half precision weights are multiplied as they are, as in torch's
layers. Inputs, states, starts and ends are always float32. Interface and readable twin: the reference.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from timeloom.buffers import empty
from timeloom.cells.base import NO_MASKS, Cell, Masks
from timeloom.kernels import faults
from timeloom.kernels.cuda import nvrtc, wide
from timeloom.kernels.cuda.chain import ChainSweeper, aligned, has_clusters, index_of, on_device
from timeloom.kernels.cuda.programs import (
    HALVES,
    MOST_UNITS,
    ROWS,
    AdjointArgs,
    ForwardArgs,
    Variant,
    Wide,
    foresee,
    shared_room,
    sweep_function,
    text_of,
)
from timeloom.kernels.cuda.wide import PLAIN, WideWeights, mode_of
from timeloom.kernels.mending import Unless
from timeloom.kernels.reference import AdjointData, floor_of, units_of
from timeloom.problem import Recurrence, Segments

WAVES = ((16, 8), (32, 4), (128, 2))
"""Pairs of hidden units and single rows (a block each) on one multiprocessor up to which these are faster than rows in
tiles: blocks of narrow layers leave room for each other, of wide ones the registers hold just one (`python -m
benchmarks.rows`)."""
CLUSTERED = 0.9
"""Share of the multiprocessors that clusters can use: a cluster must lie within one part (GPC) of the chip."""


@cache
def waves_of(units: int) -> int:
    """Most single rows on one multiprocessor for a layer of this width; see WAVES."""
    return next((waves for most, waves in WAVES if units <= most), 1)


@cache
def most_single(variant: Variant, device: int) -> int:
    """Rows up to which it is fastest to walk each by blocks of its own."""
    processors: int = torch.cuda.get_device_properties(device).multi_processor_count
    if variant.cluster == 1:
        return processors * waves_of(variant.units)
    if variant.cluster == 0 or not has_clusters(device):
        return 0
    return max(1, int(CLUSTERED * processors / variant.cluster))


def usable(device: torch.device) -> bool:
    """Whether kernels can be compiled for a device, and run on it."""
    return device.type == "cuda" and _usable(index_of(device))


@cache
def _usable(index: int) -> bool:
    if not torch.cuda.is_available() or torch.version.hip is not None or not _compiler_is_there():
        return False
    return torch.cuda.get_device_capability(index) >= (8, 0)


def fits(kernel: str | None, units: int, device: torch.device) -> bool:
    """Whether there are kernels for a layer of this width on this device."""
    return usable(device) and _fits(kernel, units, index_of(device))


@cache
def _fits(kernel: str | None, units: int, index: int) -> bool:
    if kernel not in MOST_UNITS:
        return False
    tile = Variant(kernel, units, 0, True, False, 1, True, True)
    return units > MOST_UNITS[kernel] or tile.ring(shared_room(index)) is not None


def has_kernels(problem: Recurrence) -> bool:
    """Whether kernels sweep whole layers of this problem's cell and width, in float32 or in half precision."""
    cell = problem.cell
    return problem.initial.dtype == torch.float32 and fits(cell.kernel, cell.parts[0], problem.u.device)


@cache
def _compiler_is_there() -> bool:
    reason = nvrtc.unavailable()
    if reason is not None:
        faults.tell(f"no CUDA kernels ({reason})", "torch's own layers and sweeps in torch run instead")
    return reason is None


def told_as(kernel: str | None, units: int, dtype: torch.dtype) -> str:
    """The name of a layer's kernels in messages to users: `cuda gru n=64 float32`."""
    return f"cuda {kernel} n={units} {str(dtype).removeprefix('torch.')}"


@lru_cache(maxsize=256)
def _variant(
    kernel: str, units: int, weights: torch.dtype, mode: int, adjoint: bool, rows: int, stores: int, decay: bool,
    resets: bool, masks: Masks, device: int,
) -> Variant | Wide:  # fmt: skip
    """The kernel that sweeps this number of rows fastest; `mode`: how wide layers multiply, see wide.cuh."""
    single = Variant(kernel, units, 0, adjoint, True, stores, decay, resets, masks)
    if rows <= most_single(replace(single, stores=0, decay=False, resets=False, masks=NO_MASKS), device):
        return single
    if units <= single.text.most_units:
        return replace(single, half=HALVES[weights], single=False)
    return Wide(kernel, units, mode, adjoint, stores, decay, resets, masks)


@cache
def _foresee(
    kernel: str, units: int, weights: torch.dtype, trains: bool, resets: bool, masks: Masks, device: int
) -> None:
    """Have all kernels compiled in the background that such layers need sooner or later: training then waits once."""
    single = Variant(kernel, units, 0, False, True, 0, False, False)
    shapes = [single] if most_single(single, device) else []
    if units <= single.text.most_units:
        shapes.append(replace(single, half=HALVES[weights], single=False))
    keeps = 2 if trains and single.text.saved else 1
    kinds = [
        (False, keeps, False),
        (True, 1, False),
        (False, 0, True),
        (True, 0, True),
        (False, keeps, True),
        (True, 1, True),
    ]
    foresee(
        device,
        [
            replace(shape, adjoint=adjoint, stores=stores, decay=decay, resets=resets, masks=masks)
            for adjoint, stores, decay in kinds
            if trains or not adjoint
            for shape in shapes
        ],
    )


def launches_each_step(kernel: str, units: int, rows: int, device: torch.device) -> bool:
    """Whether sweeps of this number of rows take a launch for every step."""
    found = _variant(kernel, units, torch.float32, PLAIN, False, rows, 0, False, False, NO_MASKS, index_of(device))
    return isinstance(found, Wide)


class CUDASweeper(ChainSweeper):
    """Runs stretches of a recurrence on an NVIDIA GPU; dense transfers are left to the reference.

    `saved` `(T, B, SAVED n)` receives the gate values wherever states are stored, for the adjoint. `mask` `(B, n)` is
    each sequence's factor of h in the recurrent products, if it is not to be read from the inputs.
    """

    @staticmethod
    def supports(problem: Recurrence) -> bool:
        cell = problem.cell
        if problem.u.dtype != torch.float32 or not has_kernels(problem):
            return False
        return faults.broken(told_as(cell.kernel, cell.parts[0], cell.weights[0].dtype)) is None

    def __init__(self, problem: Recurrence, saved: Tensor | None = None, mask: Tensor | None = None) -> None:
        super().__init__(problem)
        kernel = str(problem.cell.kernel)
        self._text, self._kernel = text_of(kernel, problem.cell.masks), kernel
        weights = problem.cell.weights[0]
        self._dtype, self._wide = weights.dtype, dict[int, WideWeights]()
        self.told_as = told_as(kernel, self._n, weights.dtype)
        self._weights = aligned(weights.float())
        self._vectors = units_of(problem.cell).float()
        self._marks = None if problem.resets is None else problem.resets.contiguous().view(torch.uint8)
        self._mask = sequence_mask(problem.cell, problem.u) if mask is None else mask
        self.saved = saved

    @faults.or_reference
    def forward(
        self, segments: Segments, starts: Tensor, states: list[Tensor] | None = None, want_decay: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        _, ends, decay = self._forward(segments, starts.contiguous(), states, want_decay, 0)
        return ends, decay

    def retry(
        self, unless: Unless, segments: Segments, lead: int, starts: Tensor, states: list[Tensor], want_decay: bool
    ) -> Tensor:
        """All stretches behind a longer warm-up if the certificate is missed: writes starts, states; returns ends."""
        return self._forward(segments, starts, states, want_decay, min(lead, self.problem.steps), unless)[1]

    def retry_adjoint(
        self, unless: Unless, segments: Segments, lead: int, ends: Tensor, final: Tensor | None, data: AdjointData,
        begins: Tensor, want_decay: bool,
    ) -> None:  # fmt: skip
        """The same for gradients: writes those at ends and beginnings of stretches, and of gates."""
        final = None if final is None else final.contiguous()
        self._adjoint(segments, ends, data, want_decay, min(lead, self.problem.steps), final, unless, begins)

    def mend(self, unless: Unless, states: list[Tensor], want_decay: bool = False) -> None:
        """Recompute all states in one chunk, if the chunks were not certified."""
        self._forward(self._whole(reverse=False), self._initial, states, want_decay, 0, unless)

    def mend_adjoint(
        self, unless: Unless, final: Tensor, data: AdjointData, begins: Tensor, want_decay: bool = False
    ) -> None:
        """Recompute all gradients in one chunk, if the chunks were not certified; the initial state's into `begins`."""
        self._adjoint(self._whole(reverse=True), final, data, want_decay, 0, None, unless, begins)

    @faults.or_reference
    def forward_entering(
        self, segments: Segments, lead: int, states: list[Tensor] | None, want_decay: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        starts = self._initial.new_empty(len(segments), self.cell.size)
        return self._forward(segments, starts, states, want_decay, min(lead, self.problem.steps))

    def _forward(
        self, segments: Segments, starts: Tensor, states: list[Tensor] | None, want_decay: bool, lead: int,
        unless: Unless | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
        ends = torch.empty_like(starts)
        decay = torch.empty_like(starts) if want_decay else None
        tensors = {"inputs": aligned(self.problem.u), "starts": starts, "ends": ends, "decay": decay}
        if states is not None:
            tensors["saved"] = self.saved
        stores = 0 if states is None else 1 if self.saved is None else 2
        self._launch(ForwardArgs, segments, states, lead, stores, tensors, unless)
        return starts, ends, decay

    @faults.or_reference
    def adjoint(
        self, segments: Segments, ends: Tensor, data: AdjointData, want_decay: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        _, begins, decay = self._adjoint(segments, ends.contiguous(), data, want_decay, 0, None)
        return begins, decay

    @faults.or_reference
    def adjoint_entering(
        self, segments: Segments, lead: int, final: Tensor | None, data: AdjointData, want_decay: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """As in the reference; without `final`, the gradient at the end of a sequence is zero, too."""
        ends = self._initial.new_empty(len(segments), self.cell.size)
        final = None if final is None else final.contiguous()
        return self._adjoint(segments, ends, data, want_decay, min(lead, self.problem.steps), final)

    def _adjoint(
        self, segments: Segments, ends: Tensor, data: AdjointData, want_decay: bool, lead: int, final: Tensor | None,
        unless: Unless | None = None, begins: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
        begins = torch.empty_like(ends) if begins is None else begins
        decay = torch.empty_like(ends) if want_decay else None
        reset_grads = data.reset_grads
        if reset_grads is None and self._marks is not None:
            reset_grads = torch.empty_like(ends)
        tensors = {"saved": self._saved_at(data.states), "starts": ends, "ends": begins, "decay": decay, "final": final}
        tensors |= {"gate_grads": data.gate_grads, "reset_grads": reset_grads}
        tensors["incoming"] = None if data.incoming is None else aligned(data.incoming)
        if lead:
            tensors["lengths"] = self.problem.ends_on_device()
        self._launch(AdjointArgs, segments, data.states, lead, int(data.gate_grads is not None), tensors, unless)
        return ends, begins, decay

    def _launch(
        self,
        kind: type[Any],
        segments: Segments,
        states: list[Tensor] | None,
        lead: int,
        stores: int,
        tensors: dict[str, Any],
        unless: Unless | None,
    ) -> None:
        rows = len(segments)
        if rows == 0:
            return
        decays, adjoint = tensors["decay"] is not None, kind is AdjointArgs
        variant = self._variant(adjoint, rows, stores, decays)
        turned = adjoint and isinstance(variant, Variant) and not variant.single
        tensors |= {"weights": self._turned if turned else self._weights, "vectors": self._vectors}
        tensors |= {"origin": self._initial, "resets": self._marks, "mask": self._mask}
        tensors |= zip(("h", "c"), states or (), strict=False)
        tensors |= zip(("sequence", "begin", "end"), segments.on(self._initial.device), strict=True)
        pointers = {name: tensor.data_ptr() for name, tensor in tensors.items() if tensor is not None}
        args = kind(steps=self.problem.steps, batch=self.problem.batch, rows=rows, lead=lead, **pointers)
        if unless is not None:
            assert isinstance(variant, Variant)
            args.unless, args.limit = unless.certificate.data_ptr(), unless.limit_on_device
        with on_device(self._device):
            faults.guarded(self.told_as, lambda: self._start(variant, segments.longest + lead, args))

    def _start(self, variant: Variant | Wide, steps: int, args: Any) -> None:
        if isinstance(variant, Wide):
            if variant.mode not in self._wide:
                self._wide[variant.mode] = WideWeights(self.cell.weights[0], variant.mode)
            wide.sweep(args, steps, variant, self._wide[variant.mode], self._initial.device)
        else:
            trains = variant.adjoint or variant.stores == 2 or not self._text.saved
            _foresee(self._kernel, self._n, self._dtype, trains, variant.resets, variant.masks, self._device)
            blocks = args.rows * variant.cluster if variant.single else -(-args.rows // ROWS)
            sweep_function(self._device, variant)(blocks, args)

    def _variant(self, adjoint: bool, rows: int, stores: int, decay: bool) -> Variant | Wide:
        marked, mode, masks = self._marks is not None, mode_of(self._kernel, self._dtype, rows), self.cell.masks
        return _variant(
            self._kernel, self._n, self._dtype, mode, adjoint, rows, stores, decay, marked, masks, self._device
        )

    @cached_property
    def _turned(self) -> Tensor:
        """The recurrent matrices transposed, one by one, as adjoint sweeps of tiles read their rows."""
        return self._weights.view(-1, self._n, self._n).transpose(1, 2).contiguous()

    def least_scale(self, share_of_box: float) -> float:
        return floor_of(self.cell, share_of_box)

    def _saved_at(self, states: list[Tensor]) -> Tensor | None:
        """The gate values at all states, computed once for all sweeps of a backward pass."""
        if self.saved is None and self._text.saved:
            previous = states[0][:-1]
            if self.problem.resets is not None:
                origin = self._initial[:, : self._n]
                previous = torch.where(self.problem.resets.unsqueeze(-1), origin, previous)
            self.saved = torch.cat(self.cell._gates(previous, self.problem.u), -1)  # type: ignore[attr-defined]
        return self.saved

    @staticmethod
    def room_for_saved(problem: Recurrence) -> Tensor | None:
        """A buffer for what the adjoint needs beside the states; None if that is nothing."""
        width = text_of(str(problem.cell.kernel), problem.cell.masks).saved * problem.cell.parts[0]
        return empty(problem.steps, problem.batch, width, like=problem.initial) if width else None


def sequence_mask(cell: Cell, rows: Tensor) -> Tensor | None:
    """Each sequence's factor of h in the recurrent products, `(B, n)`, or None.

    It is read from the masks behind the first of the rows `(T, B, ·)`.
    """
    if not cell.masks.dropped or not rows.numel():
        return None
    first = rows.shape[-1] - cell.behind
    return rows[0, :, first : first + cell.parts[0]].contiguous()
