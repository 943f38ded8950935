"""Sweeps by Triton kernels: GRU, LSTM and RNN on a GPU, all steps in one launch. Signature and twin: the reference."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache, partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from timeloom.buffers import empty
from timeloom.kernels.gpu.launch import launch
from timeloom.kernels.reference import AdjointData, ReferenceSweeper, floor_of, units_of
from timeloom.problem import Recurrence, Segments
from timeloom.torch_state import tf32

Given = ParamSpec("Given")
Result = TypeVar("Result")
LARGEST = {"gru": 128, "lstm": 64, "rnn_tanh": 128, "rnn_relu": 128}
"""Hidden units up to which the recurrent weights are kept on the chip, by kernel; beyond, see `wide.py`."""
GATES = {"gru": 3, "lstm": 4, "rnn_tanh": 1, "rnn_relu": 1}
SPARE = 24 << 10
"""Bytes of a multiprocessor's memory that a program takes beside the weights, at most."""
ROWS = 16
"""Stretches a program runs side by side: the fewest that the matrix units take, so that most programs are in flight."""
SLOPES = {"gru": 5, "lstm": 6, "rnn_tanh": 1, "rnn_relu": 1}
"""Derivatives of a step that the adjoint reads, in n."""


def warps(units: int) -> int:
    """Warps of a program for so many units: more would wait for one another."""
    return 1 if units <= 16 else 4 if units <= 32 else 8


@cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def largest(kernel: str, device: torch.device) -> int:
    """Hidden units up to which the recurrent weights are kept on this chip."""
    most = LARGEST[kernel]
    while device.type == "cuda" and most > 16 and 4 * GATES[kernel] * most**2 + SPARE > _on_chip(device):
        most //= 2
    return most


@cache
def _on_chip(device: torch.device) -> int:
    """Bytes that a program may have on a multiprocessor: 227 KiB on an H200, 163 on an A100, 99 on consumers' GPUs."""
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 227 << 10))


def has_kernels(problem: Recurrence) -> bool:
    """Whether there are kernels for a problem: those that keep its weights on the chip, or those for wider ones."""
    on_gpu = problem.cell.kernel is not None and problem.u.device.type == "cuda"
    return on_gpu and problem.initial.dtype == torch.float32 and has_triton()


def is_wide(problem: Recurrence) -> bool:
    """Whether a problem's weights are too many for the chip."""
    return problem.cell.parts[0] > largest(str(problem.cell.kernel), problem.u.device)


def in_full_precision() -> AbstractContextManager[None]:
    """Products of float32 matrices are not rounded to tf32."""
    return tf32.products(False)


def on_its_device(
    method: Callable[Concatenate[GPUSweeper, Given], Result],
) -> Callable[Concatenate[GPUSweeper, Given], Result]:
    """Run a sweeper's method on the GPU that holds its tensors: Triton launches on the current one."""

    @wraps(method)
    def run(self: GPUSweeper, /, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        with torch.cuda.device_of(self.problem.initial):
            return method(self, *args, **kwargs)

    return run


class GPUSweeper(ReferenceSweeper):
    """Runs stretches of a recurrence on the GPU, all steps in one launch; dense transfers stay with the reference.

    Starts and ends are float32; the weights' dtype is that of the products, and inputs and states may be half precision
    too. `tape` `(T, B, SLOPES n)` receives what the adjoint needs of every step while the states are stored;
    sweeps that read it add the gate gradients up, too.
    """

    @staticmethod
    def supports(problem: Recurrence) -> bool:
        return has_kernels(problem) and not is_wide(problem)

    def __init__(self, problem: Recurrence, tape: Tensor | None = None) -> None:
        super().__init__(problem)
        self._summed: Tensor | None = None
        from timeloom.kernels.gpu import sweep_kernels  # Triton is imported only where it is used

        self._kernels = sweep_kernels
        self._tape = tape
        kernel, w_hh = problem.cell.kernel, problem.cell.weights[0]
        assert kernel is not None
        self._n = problem.cell.parts[0]
        self._weights = w_hh.contiguous()
        self._units = units_of(problem.cell)
        self._inputs, self._initial = problem.u.contiguous(), problem.initial.contiguous()
        self._marks = None if problem.resets is None else problem.resets.contiguous().view(torch.uint8)
        self._padded = max(16, 1 << (self._n - 1).bit_length())
        self._options: dict[str, Any] = {
            "CELL": getattr(sweep_kernels, kernel.upper()),
            "UNITS": self._padded,
            "RESETS": problem.resets is not None,
            "PRECISION": "tf32x3",
            "num_warps": warps(self._padded),
        }
        self._slopes: tuple[list[Tensor], Tensor] | None = None
        self._bound: Tensor | None = None

    @on_its_device
    def forward(
        self, segments: Segments, starts: Tensor, states: list[Tensor] | None = None, want_decay: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        _, ends, decay = self._forward(segments, starts.contiguous(), states, want_decay, 0)
        return ends, decay

    @on_its_device
    def forward_entering(
        self, segments: Segments, lead: int, states: list[Tensor] | None, want_decay: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        starts = self._initial.new_empty(len(segments), self.cell.size)
        return self._forward(segments, starts, states, want_decay, self._within(lead))

    def _forward(
        self, segments: Segments, starts: Tensor, states: list[Tensor] | None, want_decay: bool, lead: int
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        ends = torch.empty_like(starts)
        decay = torch.empty_like(starts) if want_decay else None
        tensors = (self._inputs, self._weights, self._units, self._initial, starts, ends, decay, *two(states))
        columns = segments.on(starts.device)
        flags = self._forward_flags(states, want_decay, lead)
        self._launch(self._kernels.forward_kernel, segments, (*tensors, self._tape, *columns), lead, flags)
        return starts, ends, decay

    def _forward_flags(self, states: list[Tensor] | None, want_decay: bool, lead: int) -> dict[str, bool]:
        keep = states is not None
        return {"LED": lead > 0, "KEEP": keep, "TAPE": keep and self._tape is not None, "DECAY": want_decay}

    @on_its_device
    def adjoint(
        self, segments: Segments, ends: Tensor, data: AdjointData, want_decay: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        _, begins, decay = self._adjoint(segments, ends.contiguous(), data, want_decay, 0, None)
        return begins, decay

    @on_its_device
    def adjoint_entering(
        self, segments: Segments, lead: int, final: Tensor | None, data: AdjointData, want_decay: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """As the reference's; without `final`, the gradient at the end of a sequence is zero, too."""
        ends = self._initial.new_empty(len(segments), self.cell.size)
        final = None if final is None else final.contiguous()
        return self._adjoint(segments, ends, data, want_decay, self._within(lead), final)

    def _within(self, lead: int) -> int:
        """A lead-in no longer than all of time: kernels count its steps, those before the first one too."""
        return min(lead, self.problem.steps)

    def _adjoint(
        self, segments: Segments, ends: Tensor, data: AdjointData, want_decay: bool, lead: int, final: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        begins = torch.empty_like(ends)
        decay = torch.empty_like(ends) if want_decay else None
        lengths = self.problem.ends_on_device() if lead else None
        keep, slopes = data.gate_grads is not None, self._slopes_at(data.states)
        sums = ends.new_empty(len(ends), self.cell.gate_width) if keep and self._tape is not None else None
        outputs = (decay, data.incoming, data.gate_grads, sums, data.reset_grads)
        tensors = (slopes, self._weights, self._units, final, ends, begins, *outputs)
        flags = {"LED": lead > 0, "KEEP": keep, "INCOMING": data.incoming is not None, "DECAY": want_decay}
        flags["SUM"] = sums is not None
        columns = (*segments.on(ends.device), lengths)
        self._launch(self._kernels.adjoint_kernel, segments, (*tensors, *columns), lead, flags)
        self._summed = sums
        return ends, begins, decay

    def bias_grads(self, gate_grads: Tensor) -> Tensor:
        """The sum `(G,)` of the gate gradients `(T, B, G)` that the last sweep of all stretches stored."""
        if self._summed is not None:
            return self._summed.sum(0)
        flat = gate_grads.flatten(0, 1)
        return torch.mm(flat.new_ones(1, len(flat)), flat).squeeze(0)

    def _launch(
        self, kernel: Any, segments: Segments, tensors: tuple[Tensor | None, ...], lead: int, flags: dict[str, bool]
    ) -> None:
        rows = len(segments)
        if rows == 0:
            return
        sizes = (rows, self.problem.batch, self._n, segments.longest, lead)
        grid = (-(-rows // ROWS), 1, 1)
        launch(kernel, grid, (*tensors, self._marks), sizes, ROWS=ROWS, **flags, **self._options)

    def certifier(self, share_of_box: float, fading: bool) -> Callable[[Tensor, Tensor], Tensor] | None:
        if self.problem.lengths is not None:
            return None
        return partial(self.certify, share_of_box=share_of_box, joint=fading)

    @on_its_device
    def certify(
        self, starts: Tensor, ends: Tensor, share_of_box: float, decay: Tensor | None = None, joint: bool = False
    ) -> Tensor:
        """A bound of the largest relative jump between each stretch's end and the next one's start.

        With their decay, of the largest relative error of a start: how far one more correction would move it, which is
        what the jumps before it add up to. `joint` measures h and c against the larger of the two: for gradients, of
        which an LSTM's by h is small and all rounding, and enters the gates beside that by c.
        """
        floor = floor_of(self.cell, share_of_box)
        worst = starts.new_zeros(())
        rows, tile, batch = len(starts), 32, self.problem.batch
        there, shift = (ends, batch) if decay is None else (self.correct(starts, ends, decay, boxed=False), 0)
        grid, numbers = (-(-rows // tile), 1, 1), (rows, batch, shift, self._n, floor)
        constants = {"ROWS": tile, "UNITS": min(128, self._padded), "PARTS": len(self.cell.parts), "JOINT": joint}
        launch(self._kernels.jumps_kernel, grid, (starts, there, worst), numbers, **constants)
        return worst

    @on_its_device
    def correct(self, starts: Tensor, ends: Tensor, decay: Tensor, boxed: bool) -> Tensor:
        """New starts from the jumps between stretches of sequences of one length, carried along by their decay.

        `boxed` keeps them where the cell's states live.
        """
        corrected = torch.empty_like(starts)
        if self._bound is None:
            self._bound = self.cell.bound(self._initial)
        bound, columns = self._bound if boxed else None, 4
        links, width = len(starts) // self.problem.batch, self._initial.numel()
        tensors, grid = (starts, ends, decay, bound, corrected), (-(-width // columns), 1, 1)
        at_once = min(1024, 1 << (links - 1).bit_length())
        constants = {"BOXED": bound is not None, "LINKS": at_once, "COLUMNS": columns}
        launch(self._kernels.correct_kernel, grid, tensors, (links, width), **constants)
        return corrected

    def _slopes_at(self, states: list[Tensor]) -> Tensor:
        """Derivatives of all steps at these states, computed once for all sweeps of a backward pass."""
        if self._tape is not None:
            return self._tape
        if self._slopes is None or self._slopes[0] is not states:
            self._slopes = (states, self._differentiate(states))
        return self._slopes[1]

    def _differentiate(self, states: list[Tensor]) -> Tensor:
        """What `tape` would hold, `(T, B, SLOPES n)`."""
        slopes = self.room_for_tape(self.problem)
        tensors = (self._inputs, self._weights, self._units, self._initial, *two(states), self._marks, slopes)
        (steps, batch), tile = self._inputs.shape[:2], 32
        grid, numbers = (-(-steps * batch // tile), 1, 1), (steps * batch, batch, self._n)
        launch(self._kernels.slopes_kernel, grid, tensors, numbers, ROWS=tile, **self._options)
        return slopes

    @staticmethod
    def room_for_tape(problem: Recurrence) -> Tensor:
        width = SLOPES[str(problem.cell.kernel)] * problem.cell.parts[0]
        return empty(problem.steps, problem.batch, width, like=problem.u)


def two(states: list[Tensor] | None) -> tuple[Tensor | None, Tensor | None]:
    """States of h and c; None where there is none."""
    if states is None:
        return None, None
    return states[0], states[1] if len(states) > 1 else None
