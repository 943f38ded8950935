"""One layer in one direction: its inputs, and the result of its forward solve."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from timeloom.cells.base import Cell
from timeloom.kernels.layer import Layer
from timeloom.problem import Recurrence
from timeloom.report import SolveReport

Grads = Sequence[Tensor | None]
"""The loss's gradients with respect to the outputs `(T, B, n)` and the final state `(B, S)`."""


class Inputs(NamedTuple):
    """The tensors of one layer and direction: parameters as in torch, None if absent; lengths on the CPU."""

    x: Tensor
    """`(T, B, D)`"""
    initial: Tensor
    """`(B, S)`"""
    w_ih: Tensor
    w_hh: Tensor
    b_ih: Tensor | None
    b_hh: Tensor | None
    w_hr: Tensor | None
    lengths: Tensor | None = None
    """`(B,)`"""
    resets: Tensor | None = None
    """`(T, B)`"""

    @property
    def weights(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
        return self.w_ih, self.w_hh, self.b_ih, self.b_hh, self.w_hr

    @property
    def live(self) -> tuple[Tensor | None, ...]:
        """The tensors that may require gradients."""
        return self.x, self.initial, *self.weights

    def with_live(self, live: Iterable[Tensor | None]) -> Inputs:
        """The same inputs with other live tensors."""
        return self._replace(**dict(zip(Inputs._fields, live, strict=False)))  # type: ignore[arg-type]

    @property
    def taped(self) -> bool:
        """Whether a backward pass may follow."""
        return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in self.live)

    @property
    def masked(self) -> bool:
        """Whether masks of a dropout inside the recurrence stand behind the inputs (see `timeloom.cells.masked`)."""
        return self.x.shape[-1] != self.w_ih.shape[1]

    @property
    def whole(self) -> bool:
        """Whether all sequences have the full length and no resets."""
        return self.lengths is None and self.resets is None


class Solution(NamedTuple):
    """The result of a forward solve.

    kept: the states of every part `(T + 1, B, part)`, followed by whatever else the backward pass needs.
    final: the state after each sequence's last step, `(B, S)`; it may be a view of the states.
    """

    cell: Cell
    kept: list[Tensor]
    final: Tensor
    report: SolveReport


def layer_of(kind: type[Layer], cell: Cell, inputs: Inputs) -> Layer:
    return kind(cell, inputs.x, inputs.initial, inputs.w_ih, inputs.w_hh, inputs.b_ih, inputs.b_hh, inputs.resets)


def sizes_of(cell: Cell, inputs: Inputs) -> Recurrence:
    """The problem as planners read it: x stands for the projected inputs, only its shape, dtype and device count."""
    return Recurrence(cell, inputs.x, inputs.initial, inputs.lengths, inputs.resets)
