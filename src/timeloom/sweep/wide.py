"""Sweeps of wide GRUs, LSTMs and RNNs on a GPU: a launch a step, for more weights than a multiprocessor holds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from timeloom.problem import Recurrence, Segments, cut
from timeloom.sweep.gpu import LARGEST, GPUSweeper, has_triton, two


class WideSweeper(GPUSweeper):
    """Runs stretches of a recurrence of any width on the GPU, one launch for each step."""

    @staticmethod
    def supports(problem: Recurrence) -> bool:
        return (
            problem.cell.kernel is not None
            and problem.cell.parts[0] > LARGEST[problem.cell.kernel]
            and problem.u.device.type == "cuda"
            and problem.initial.dtype == torch.float32
            and has_triton()
        )

    def __init__(self, problem: Recurrence, tape: Tensor | None = None) -> None:
        super().__init__(problem, tape)
        from timeloom.sweep import wide_kernels

        self._steps = wide_kernels
        self._across: Tensor | None = None
        self._gates = len(self._weights) // self._n

    def _forward(
        self, segments: Segments, starts: Tensor, states: list[Tensor] | None, want_leak: bool, lead: int
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        columns = segments.on(starts.device)
        state = self._initial[columns[0]] if lead else starts
        ends, following = state.clone(), torch.empty_like(starts)
        leak = self._whole(starts) if want_leak else None
        fixed = (self._inputs, self._weights, self._units, self._initial, starts, ends, leak, *two(states), self._tape)
        flags = self._forward_flags(states, want_leak, lead)
        launch = _Launches(self._steps.forward_step, len(segments), self._n, self._marked(flags))
        for step in range(segments.longest + lead):
            launch((*fixed, state, following, *columns, self._marks), self._sizes(segments, lead, step))
            state, following = following, state if step else torch.empty_like(starts)
        return starts, ends, leak

    def _adjoint(
        self,
        segments: Segments,
        ends: Tensor,
        states: list[Tensor],
        incoming: Tensor | None,
        into: tuple[Tensor | None, Tensor | None],
        want_leak: bool,
        lead: int,
        final: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        begins = ends.clone() if lead == 0 else torch.empty_like(ends)
        leak = self._whole(ends) if want_leak else None
        if into[1] is not None:
            into[1].zero_()
        if self._across is None:
            self._across = self._weights.t().contiguous()
        lengths = self.problem.ends_on_device() if lead else None
        fixed = (self._slopes_at(states), self._across, self._units, final, ends, begins, leak, incoming, *into)
        gates = self._across.new_empty(len(segments), self.cell.gate_width)
        following, passing = torch.empty_like(gates), torch.empty_like(ends)
        columns = (*segments.on(ends.device), lengths, self._marks)
        flags = {"LED": lead > 0, "KEEP": into[0] is not None, "INCOMING": incoming is not None, "LEAK": want_leak}
        for product in (False, True):
            launch = _Launches(
                self._steps.adjoint_step, len(segments), self._n, self._marked(flags | {"PRODUCT": product})
            )
            for step in range(1, segments.longest + lead + 1) if product else range(1):
                launch((*fixed, gates, following, passing, *columns), self._sizes(segments, lead, step))
                gates, following = following, gates
        return ends, begins, leak

    def _whole(self, like: Tensor) -> Tensor:
        """A leak before the first step: all of what leaks, which is an LSTM's c alone."""
        leak = torch.ones_like(like)
        if len(self.cell.parts) > 1:
            leak[:, : self._n] = 0
        return leak

    def _sizes(self, segments: Segments, lead: int, step: int) -> tuple[int, ...]:
        return len(segments), self.problem.batch, self._n, lead, step

    def _marked(self, flags: dict[str, bool]) -> dict[str, Any]:
        options = {name: self._options[name] for name in ("CELL", "RESETS", "PRECISION")}
        return options | flags

    def _differentiate(self, states: list[Tensor]) -> Tensor:
        problem = self.problem
        slopes, steps = self.room_for_tape(problem), cut(problem, 1)  # every step is a stretch of its own
        state = torch.cat([part[:-1] for part in states], -1).flatten(0, 1)
        scratch = torch.empty_like(state)
        fixed = (self._inputs, self._weights, self._units, self._initial, None, scratch, None, None, None, slopes)
        flags = {"LED": False, "KEEP": False, "TAPE": True, "LEAK": False}
        launch = _Launches(self._steps.forward_step, len(steps), self._n, self._marked(flags))
        launch((*fixed, state, scratch, *steps.on(state.device), self._marks), self._sizes(steps, 0, 0))
        return slopes


class _Launches:
    """Launches of one kernel over all stretches and units, the second and later ones without a look at the arguments'
    types: of a launch a step, that is most of the host's time.
    """

    def __init__(self, kernel: Any, rows: int, n: int, flags: dict[str, Any]) -> None:
        tiles: dict[str, Any] = {"ROWS": 64 if rows >= 64 else 16, "UNITS": 32 if n < 512 else 64, "DEPTH": 32}
        self._grid = (-(-rows // tiles["ROWS"]), -(-n // tiles["UNITS"]), 1)
        self._kernel, self._flags = kernel, tiles | flags
        self._compiled: Any = None

    def __call__(self, tensors: tuple[Tensor | None, ...], sizes: tuple[int, ...]) -> None:
        if self._grid[0] == 0:
            return
        if self._compiled is None:
            self._compiled = self._kernel[self._grid](*tensors, *sizes, **self._flags, num_warps=4)
        else:
            constants = (self._flags[name] for name in self._kernel.arg_names[len(tensors) + len(sizes) :])
            self._compiled[self._grid](*tensors, *sizes, *constants)
