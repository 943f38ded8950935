"""The implicit GRU: a GRU whose decay is an implicit Euler step, stable for steps of any size."""

from __future__ import annotations

import torch
from torch import Tensor

from timeloom.cells.gru import GRUCell, implicit_keep, implicit_keep_slope


class ImplicitGRUCell(GRUCell):
    """The multigrid paper's GRU over projected inputs; r, z and n are the GRU's.

        g = γ (1 − z)      h⁺ = (h + g ⊙ n) / (1 + g)

    that is, `h⁺ = n + k ⊙ (h − n)` with `k = 1 / (1 + g)`. γ is the size of the step: 1 for the network itself. Even
    then it is another network than the GRU: a step keeps at least half of h. Weights and gate gradients are the GRU's.
    """

    kernel = None
    generated = True
    in_cudnn = False

    def __init__(self, w_hh: Tensor, b_hn: Tensor, gamma: float = 1.0) -> None:
        super().__init__(w_hh, b_hn)
        self.gamma = gamma

    def _keep(self, update: Tensor) -> Tensor:
        return implicit_keep(update, self.gamma)

    def _taken(self, update: Tensor) -> Tensor:
        """`1 − k`, computed from 1 − z, since subtracting a k near 1 would lose digits."""
        rate = self.gamma * (1 - update)
        return rate / (1 + rate)

    def step(self, state: Tensor, u: Tensor) -> Tensor:
        _, update, _, candidate = self._gates(state, u)
        return torch.lerp(state, candidate, self._taken(update))

    def _keep_slope(self, update: Tensor) -> Tensor:
        return implicit_keep_slope(update, self.gamma)

    def decay(self, state: Tensor, u: Tensor) -> Tensor:
        return implicit_keep(super().decay(state, u), self.gamma)
