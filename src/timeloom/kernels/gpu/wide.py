"""Sweeps of wide GRUs, LSTMs and RNNs on a GPU: a launch a step, for more weights than a multiprocessor holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from timeloom.kernels.gpu.launch import launch
from timeloom.kernels.gpu.sweeper import GPUSweeper, has_kernels, in_full_precision, is_wide, two
from timeloom.kernels.reference import AdjointData
from timeloom.problem import Recurrence, Segments, cut

BY_LIBRARY = 129
"""Hidden units from which on torch's matrix product and a kernel for the gates run a step. One kernel is faster
below 768, but Triton 3.6 does not compile it for every width ('arith.andi' op requires the same encoding), and the
kernels that keep weights in registers run most of these widths. Resets put rows of the state aside, which the product
does not know of: such layers are swept in torch."""


class WideSweeper(GPUSweeper):
    """Runs stretches of a recurrence of any width on the GPU, one or two launches for each step."""

    @staticmethod
    def supports(problem: Recurrence) -> bool:
        by_library = problem.cell.parts[0] >= BY_LIBRARY
        return has_kernels(problem) and is_wide(problem) and not (by_library and problem.resets is not None)

    def __init__(self, problem: Recurrence, tape: Tensor | None = None) -> None:
        super().__init__(problem, tape)
        from timeloom.kernels.gpu import wide_kernels

        self._steps = wide_kernels
        self._across: Tensor | None = None
        self._by_library = self._n >= BY_LIBRARY and problem.resets is None

    def _forward(
        self, segments: Segments, starts: Tensor, states: list[Tensor] | None, want_decay: bool, lead: int
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        columns = segments.on(starts.device)
        state = self._initial[columns[0]] if lead else starts
        operand = state[:, : self._n].to(self._weights.dtype).contiguous()
        ends, following, following_operand = state.clone(), torch.empty_like(starts), torch.empty_like(operand)
        decay = self._whole(starts) if want_decay else None
        fixed = (self._inputs, self._weights, self._units, self._initial, starts, ends, decay, *two(states), self._tape)
        flags = self._forward_flags(states, want_decay, lead)
        ready = self._weights.new_empty(len(segments), len(self._weights)) if self._by_library else None
        launch = self._launches(self._steps.forward_step, len(segments), flags)
        with in_full_precision():
            for step in range(segments.longest + lead):
                if ready is not None:
                    torch.mm(operand, self._weights.t(), out=ready)
                tensors = (*fixed, state, operand, following, following_operand, ready, *columns, self._marks)
                launch(tensors, self._sizes(segments, lead, step))
                state, following = following, state if step else torch.empty_like(starts)
                operand, following_operand = following_operand, operand if step else torch.empty_like(operand)
        return starts, ends, decay

    def _adjoint(
        self, segments: Segments, ends: Tensor, data: AdjointData, want_decay: bool, lead: int, final: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        begins = ends.clone() if lead == 0 else torch.empty_like(ends)
        decay = self._whole(ends) if want_decay else None
        if data.reset_grads is not None:
            data.reset_grads.zero_()
        if self._across is None:
            self._across = self._weights.t().contiguous()  # as the matrix units read both factors fastest
        lengths = self.problem.ends_on_device() if lead else None
        outputs = (decay, data.incoming, data.gate_grads, data.reset_grads)
        fixed = (self._slopes_at(data.states), self._across, self._units, final, ends, begins, *outputs)
        gates = self._weights.new_empty(len(segments), len(self._weights))
        ready = self._weights.new_empty(len(segments), self._n) if self._by_library else None
        following, passing = torch.empty_like(gates), torch.empty_like(ends)
        columns = (*segments.on(ends.device), lengths, self._marks)
        flags = {"LED": lead > 0, "KEEP": data.gate_grads is not None, "DECAY": want_decay}
        flags["INCOMING"] = data.incoming is not None
        with in_full_precision():
            for product in (False, True):
                launch = self._launches(self._steps.adjoint_step, len(segments), flags | {"PRODUCT": product})
                for step in range(1, segments.longest + lead + 1) if product else range(1):
                    if product and ready is not None:
                        torch.mm(gates, self._across.t(), out=ready)
                    launch((*fixed, gates, following, passing, ready, *columns), self._sizes(segments, lead, step))
                    gates, following = following, gates
        return ends, begins, decay

    def _whole(self, like: Tensor) -> Tensor:
        """A decay before the first step: all of what decays, which is an LSTM's c alone."""
        decay = torch.ones_like(like)
        if len(self.cell.parts) > 1:
            decay[:, : self._n] = 0
        return decay

    def _sizes(self, segments: Segments, lead: int, step: int) -> tuple[int, ...]:
        return len(segments), self.problem.batch, self._n, lead, step

    def _launches(self, kernel: Any, rows: int, flags: dict[str, bool]) -> _Launches:
        options: dict[str, Any] = {name: self._options[name] for name in ("CELL", "RESETS", "PRECISION")}
        if self._by_library:
            tiles = {"ROWS": 8, "UNITS": 128, "DEPTH": 16}
        else:
            tiles = {"ROWS": 64 if rows >= 64 else 16, "UNITS": 32}
            tiles["DEPTH"] = 32 if self._weights.dtype == torch.float32 else 64
        options |= {"READY": self._by_library, "num_warps": 4, "num_stages": 4}
        return _Launches(kernel, rows, self._n, options | tiles | flags)

    def _differentiate(self, states: list[Tensor]) -> Tensor:
        problem = self.problem
        slopes, steps = self.room_for_tape(problem), cut(problem, 1)  # every step is a stretch of its own
        state = torch.cat([part[:-1] for part in states], -1).flatten(0, 1)
        operand = states[0][:-1].flatten(0, 1).to(self._weights.dtype)
        scratch, more_scratch = torch.empty_like(state), torch.empty_like(operand)
        fixed = (self._inputs, self._weights, self._units, self._initial, None, scratch, None, None, None, slopes)
        flags = {"LED": False, "KEEP": False, "TAPE": True, "DECAY": False}
        ready = self._weights.new_empty(len(steps), len(self._weights)) if self._by_library else None
        if ready is not None:
            with in_full_precision():
                torch.mm(operand, self._weights.t(), out=ready)
        launch = self._launches(self._steps.forward_step, len(steps), flags)
        tensors = (*fixed, state, operand, scratch, more_scratch, ready, *steps.on(state.device), self._marks)
        launch(tensors, self._sizes(steps, 0, 0))
        return slopes


class _Launches:
    """Launches of one kernel over all stretches and units. Tensors and numbers are of the same kinds every time and are
    not looked at again: of a launch a step, that would be most of the host's time.
    """

    def __init__(self, kernel: Any, rows: int, n: int, constants: dict[str, Any]) -> None:
        self._grid = (-(-rows // constants["ROWS"]), -(-n // constants["UNITS"]), 1)
        self._kernel, self._constants = kernel, constants
        self._again: Callable[..., None] | None = None

    def __call__(self, tensors: tuple[Tensor | None, ...], sizes: tuple[int, ...]) -> None:
        if self._grid[0] == 0:
            return
        if self._again is None:
            self._again = launch(self._kernel, self._grid, tensors, sizes, **self._constants)
        else:
            self._again(*tensors, *sizes)
