"""The Elman network of torch.nn.RNN, with tanh or relu."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from timeloom.cells.base import Cell, chain_weights, sum_outer, unit_box
from timeloom.cells.projection import project


class RNNCell(Cell):
    """`h⁺ = φ(u + W_hh h)` with φ = tanh or relu. Weights: `W_hh (n, n)`. Gate gradients: those of φ's argument."""

    in_cudnn = True
    gated = False

    def __init__(self, w_hh: Tensor, nonlinearity: str = "tanh") -> None:
        self.weights = (w_hh,)
        self.parts = (w_hh.shape[1],)
        self.gate_width = w_hh.shape[1]
        self.nonlinearity = nonlinearity
        self.kernel = f"rnn_{nonlinearity}"

    @staticmethod
    def project(
        x: Tensor,
        w_ih: Tensor,
        w_hh: Tensor,
        b_ih: Tensor | None = None,
        b_hh: Tensor | None = None,
        *,
        nonlinearity: str = "tanh",
    ) -> tuple[RNNCell, Tensor]:
        """The cell and its inputs from torch's parameters: x `(T, B, D)` to u `(T, B, n)` by one product."""
        bias = None if b_ih is None or b_hh is None else b_ih + b_hh
        return RNNCell(w_hh, nonlinearity), project(x, w_ih, bias)

    def step(self, state: Tensor, u: Tensor) -> Tensor:
        argument = u + F.linear(state, self.weights[0])
        return torch.tanh(argument) if self.nonlinearity == "tanh" else torch.relu(argument)

    def _slope(self, state: Tensor, u: Tensor) -> Tensor:
        h = self.step(state, u)
        return 1 - h * h if self.nonlinearity == "tanh" else torch.where(h <= 0, torch.zeros_like(h), 1)

    def vjp(self, state: Tensor, u: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        slope = self._slope(state, u)
        d_argument = grad * slope if self.nonlinearity == "tanh" else torch.where(slope == 0, 0, grad)
        return d_argument @ self.weights[0], d_argument

    def decay(self, state: Tensor, u: Tensor) -> Tensor:
        """The diagonal of the Jacobian, since no gate carries an Elman unit."""
        return self._slope(state, u) * self.weights[0].diagonal()

    def jacobian(self, state: Tensor, u: Tensor) -> Tensor:
        return chain_weights((self._slope(state, u),), self.weights)

    def diagonal(self, state: Tensor, u: Tensor) -> Tensor:
        return self.decay(state, u)

    def input_grads(self, gate_grads: Tensor) -> Tensor:
        return gate_grads

    def weight_grads(self, previous: Sequence[Tensor], gate_grads: Tensor) -> tuple[Tensor, ...]:
        return (sum_outer(gate_grads, previous[0]),)

    def bound(self, initial: Tensor) -> Tensor | None:
        return unit_box(initial) if self.nonlinearity == "tanh" else None
