"""Sweeps in plain torch: any cell, any device, any dtype. The truth that the kernels are tested against."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from timeloom.cells.base import Cell
from timeloom.problem import Recurrence, Segments
from timeloom.torch_state.precision import solved_in


class GradientSums(Protocol):
    """Gradients of a cell's inputs and weights, summed during adjoint sweeps instead of from stored gate gradients."""

    def clear(self) -> None:
        """Set all sums to zero."""

    @property
    def inputs(self) -> Tensor | None:
        """The gradients of the inputs, `(T, B, K)`; None if they are not asked for."""

    def weights(self) -> tuple[Tensor, ...]:
        """The gradients of the weights, in the cell's order."""


@dataclass(frozen=True)
class AdjointData:
    """What an adjoint sweep reads, and where it writes."""

    states: list[Tensor]
    """One `(T + 1, B, part)` for each part of the state."""
    incoming: Tensor | None
    """The loss's direct gradient with respect to the outputs `(T, B, n)`, or to whole states `(T, B, S)`."""
    gate_grads: Tensor | None = None
    """`(T, B, G)`, receives the cell's gate gradients."""
    reset_grads: Tensor | None = None
    """`(R, S)`, receives the gradient that flows into the state at resets."""
    sums: GradientSums | None = None
    """Used instead of `gate_grads`: accumulates the input and weight gradients."""


class ReferenceSweeper:
    """Runs stretches of a recurrence, forward or adjoint, all stretches as one batch, one step at a time."""

    of_layer = False
    """Whether a whole layer is swept, which handles failing kernels itself."""
    limit = math.inf
    """The bound up to which the certificate of a layer's sweep is met."""
    met: Tensor | None = None
    """The last certificate, a number on the device, if it is met, else zero: where the kernels tell this, too."""
    recordable: ClassVar[bool] = False
    """Whether its sweeps are launches on a GPU that may be captured and replayed."""
    mends: ClassVar[bool] = False
    """Whether it has sweeps that run only if a certificate is missed (`mend`, `mend_adjoint`; see kernels.mending)."""

    @staticmethod
    def supports(problem: Recurrence) -> bool:
        return True

    @staticmethod
    def tape_width(problem: Recurrence) -> int:
        """Numbers per step that forward sweeps can save for adjoint sweeps, in `problem.tape`."""
        return 0

    @staticmethod
    def work(problem: Recurrence) -> int:
        """Multiplications per step and row if threads can share a row's units, or 0 if they cannot."""
        return 0

    def __init__(self, problem: Recurrence) -> None:
        self.problem = problem
        self.cell = problem.cell

    def forward(
        self, segments: Segments, starts: Tensor, states: list[Tensor] | None = None, want_decay: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Run each stretch from its own start `(R, S)`.

        Returns the ends `(R, S)` and, when asked, the product of the cell's decay along each stretch `(R, S)`. When
        given, `states`, one `(T + 1, B, part)` for each part of the state, receives the state after step t at index
        t + 1.
        """
        time, alive, sequence = self._layout(segments)
        inputs = self.problem.u[time, sequence]
        at_reset, origin = self._resets(time, sequence, alive)
        state, decay, history = starts, torch.ones_like(starts) if want_decay else None, []
        for j in range(len(time)):
            if at_reset is not None:
                state = torch.where(at_reset[j], origin, state)
            if decay is not None:
                keep = self.cell.decay(state, inputs[j])
                keep = keep if at_reset is None else keep.masked_fill(at_reset[j], 0)
                decay = _advance(alive, j, decay * keep, decay)
            state = _advance(alive, j, self.cell.step(state, inputs[j]), state)
            history.append(state)
        if states is not None and history:
            rows, time, sequence = _inside(alive, torch.stack(history), time, sequence.expand_as(time))
            for buffer, part in zip(states, rows.split(self.cell.parts, -1), strict=True):
                buffer[time + 1, sequence] = part
        return state, decay

    def adjoint(
        self, segments: Segments, ends: Tensor, data: AdjointData, want_decay: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Carry gradients `(R, S)` from each stretch's end back to its begin.

        At each step `incoming[t]` is added, then the step's vjp is taken at the stored states. Returns the gradients
        at the begins and, when asked, the decay along each stretch.
        """
        time, alive, sequence = self._layout(segments)
        inputs = self.problem.u[time, sequence]
        previous = torch.cat([part[time, sequence] for part in data.states], -1)
        at_reset, origin = self._resets(time, sequence, alive)
        if at_reset is not None:
            previous = torch.where(at_reset, origin, previous)
        carry, decay, history = ends, torch.ones_like(ends) if want_decay else None, []
        to_reset = torch.zeros_like(ends)
        for j in reversed(range(len(time))):
            grad = carry
            if data.incoming is not None:
                direct = data.incoming[time[j], sequence]
                grad = torch.cat([carry[:, : direct.shape[1]] + direct, carry[:, direct.shape[1] :]], -1)
            if decay is not None:
                keep = self.cell.decay(previous[j], inputs[j])
                keep = keep if at_reset is None else keep.masked_fill(at_reset[j], 0)
                decay = _advance(alive, j, decay * keep, decay)
            back, gates = self.cell.vjp(previous[j], inputs[j], grad)
            history.append(gates)
            if at_reset is not None:
                to_reset = _advance(alive, j, to_reset + torch.where(at_reset[j], back, 0), to_reset)
                back = back.masked_fill(at_reset[j], 0)
            carry = _advance(alive, j, back, carry)
        if data.gate_grads is not None and history:
            gates, time, sequence = _inside(alive, torch.stack(history[::-1]), time, sequence.expand_as(time))
            data.gate_grads[time, sequence] = gates
        if data.reset_grads is not None:
            data.reset_grads.copy_(to_reset)
        return carry, decay

    def forward_entering(
        self, segments: Segments, lead: int, states: list[Tensor], want_decay: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """`forward` after a warm-up: each stretch is entered `lead` steps early, from the initial state.

        Returns the starts so found, the ends and the decay.
        """
        empty = segments.end <= segments.begin  # its start is not used
        early_begin = torch.where(empty, segments.begin, (segments.begin - lead).clamp(min=0))
        early = Segments(segments.sequence, early_begin, segments.begin)
        starts, _ = self.forward(early, self.problem.initial[segments.sequence.to(self.problem.initial.device)])
        return starts, *self.forward(segments, starts, states, want_decay)

    def adjoint_entering(
        self, segments: Segments, lead: int, final: Tensor, data: AdjointData, want_decay: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """`adjoint` after a warm-up: each stretch is entered `lead` steps behind its end.

        There the gradient is zero, or `final` `(B, S)` at the end of a sequence. Returns the gradients so found at the
        ends, those at the begins and the decay.
        """
        lengths = self.problem.ends()[segments.sequence]
        empty = segments.end <= segments.begin
        enter = torch.where(empty, segments.end, torch.minimum(segments.end + lead, lengths))
        behind = Segments(segments.sequence, segments.end, enter)
        at_end = (enter == lengths).to(final.device).unsqueeze(-1)
        entry = torch.where(at_end, final[segments.sequence.to(final.device)], 0)
        ends, _ = self.adjoint(behind, entry, AdjointData(data.states, data.incoming))
        return ends, *self.adjoint(segments, ends, data, want_decay)

    def new_sums(self) -> GradientSums | None:
        """Room for sums of gradients, if adjoint sweeps can accumulate them."""
        return None

    def certifier(self, share_of_box: float, fading: bool) -> Callable[[Tensor, Tensor], Tensor | float] | None:
        """A function `(starts, ends)` that bounds the largest relative jump quickly, if the device has one."""
        return None

    def transfer(self, segments: Segments, states: list[Tensor], starts: Tensor | None = None) -> Tensor:
        """The dense transfer `∂end/∂start` of each stretch at the stored states, `(R, S, S)`.

        `starts` `(R, S)`: the states before the first step of each stretch, if not the stored ones.
        """
        time, alive, sequence = self._layout(segments)
        at_reset, origin = self._resets(time, sequence, alive)
        given = self.problem.initial.dtype  # half precision products are too coarse for transfers, and slow
        product = torch.eye(self.cell.size, dtype=solved_in(self.problem.initial), device=self.problem.u.device)
        product = product.repeat(len(segments), 1, 1)
        for j in range(len(time)):
            if j == 0 and starts is not None:
                previous = starts
            else:
                previous = torch.cat([part[time[j], sequence] for part in states], -1)
            if at_reset is not None:
                previous = torch.where(at_reset[j], origin, previous)
            following = self.cell.jacobian(previous, self.problem.u[time[j], sequence]).to(product.dtype) @ product
            if at_reset is not None:
                following = following.masked_fill(at_reset[j].unsqueeze(-1), 0)
            product = following if alive is None else torch.where(alive[j].unsqueeze(-1), following, product)
        return product.to(given)

    def _layout(self, segments: Segments) -> tuple[Tensor, Tensor | None, Tensor]:
        """Times `(L, R)` clamped to the sequence, whether each is inside its stretch `(L, R, 1)` (None if all are), and
        sequences `(R,)`.
        """
        device = self.problem.u.device
        time = segments.begin + torch.arange(segments.longest, device="cpu")[:, None]
        alive = time < segments.end
        inside = None if bool(alive.all()) else alive.unsqueeze(-1).to(device)
        time = time.clamp(max=max(self.problem.steps - 1, 0))
        return time.to(device), inside, segments.sequence.to(device)

    def _resets(self, time: Tensor, sequence: Tensor, alive: Tensor | None) -> tuple[Tensor | None, Tensor]:
        """Which steps begin with a reset `(L, R, 1)`, and the state that resets restore in each row `(R, S)`."""
        origin = self.problem.initial[sequence]
        if self.problem.resets is None:
            return None, origin
        at_reset = self.problem.resets[time, sequence].unsqueeze(-1)
        return at_reset if alive is None else at_reset & alive, origin


def units_of(cell: Cell) -> Tensor:
    """The vector `(n,)` that kernels take beside W_hh: a GRU's b_hn, the diagonal of an RNN's W_hh; unused by LSTMs."""
    if cell.kernel == "gru":
        return cell.weights[1].contiguous()
    return cell.weights[0][0] if cell.kernel == "lstm" else cell.weights[0].diagonal().contiguous()


def floor_of(cell: Cell, share_of_box: float) -> float:
    """The least scale of a jump in the first part of a kernel's state: zero for relu, whose states have no box."""
    return 0.0 if cell.kernel == "rnn_relu" else share_of_box


def _advance(alive: Tensor | None, step: int, following: Tensor, current: Tensor) -> Tensor:
    """The new value where a row is still inside its stretch, the old one where it has finished."""
    return following if alive is None else torch.where(alive[step], following, current)


def _inside(alive: Tensor | None, *values: Tensor) -> tuple[Tensor, ...]:
    """The entries of `(L, R, ...)` tensors that lie inside their stretches."""
    if alive is None:
        return values
    written = alive.squeeze(-1)
    return tuple(value[written] for value in values)
