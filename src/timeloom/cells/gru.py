"""The GRU of torch.nn.GRU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from timeloom.cells.base import Cell, chain_weights, sum_outer, unit_box
from timeloom.cells.projection import project


class GRUCell(Cell):
    """Torch's GRU over projected inputs.

        r = σ(u_r + W_hr h)      z = σ(u_z + W_hz h)      M = W_hn h + b_hn
        n = tanh(u_n + r ⊙ M)    h⁺ = n + z ⊙ (h − n)

    with `u = W_i x + b_i` and the biases b_hr and b_hz added to it. Weights: `W_hh (3n, n)` and `b_hn (n,)`.
    Gate gradients: those of the arguments of σ, σ, tanh, and of M: `(N, 4n)`.
    """

    kernel = "gru"

    def __init__(self, w_hh: Tensor, b_hn: Tensor) -> None:
        self.weights = (w_hh, b_hn)
        self.parts = (w_hh.shape[1],)
        self.gate_width = 4 * w_hh.shape[1]

    @staticmethod
    def project(
        x: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
    ) -> tuple[GRUCell, Tensor]:
        """The cell and its inputs from torch's parameters: x `(T, B, D)` to u `(T, B, 3n)` by one product."""
        n = w_hh.shape[1]
        if b_ih is None or b_hh is None:
            return GRUCell(w_hh, w_hh.new_zeros(n)), project(x, w_ih, None)
        return GRUCell(w_hh, b_hh[2 * n :]), project(x, w_ih, b_ih + F.pad(b_hh[: 2 * n], (0, n)))

    def _gates(self, h: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        w_hh, b_hn = self.weights
        u_r, u_z, u_n = u.chunk(3, -1)
        g_r, g_z, g_n = F.linear(h, w_hh).chunk(3, -1)
        reset, update, inner = torch.sigmoid(u_r + g_r), torch.sigmoid(u_z + g_z), g_n + b_hn
        return reset, update, inner, torch.tanh(u_n + reset * inner)

    def step(self, state: Tensor, u: Tensor) -> Tensor:
        _, update, _, candidate = self._gates(state, u)
        return torch.lerp(candidate, state, update)

    def _slopes(self, h: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """`z`, and ∂h⁺ by the arguments of the reset gate, the update gate, the candidate, and by M."""
        reset, update, inner, candidate = self._gates(h, u)
        by_candidate = (1 - update) * (1 - candidate * candidate)
        by_reset = by_candidate * inner * reset * (1 - reset)
        by_update = (h - candidate) * update * (1 - update)
        return update, by_reset, by_update, by_candidate, by_candidate * reset

    def vjp(self, state: Tensor, u: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        update, *slopes = self._slopes(state, u)
        d_reset, d_update, d_candidate, d_inner = (grad * slope for slope in slopes)
        through = torch.cat([d_reset, d_update, d_inner], -1)
        return grad * update + through @ self.weights[0], torch.cat([d_reset, d_update, d_candidate, d_inner], -1)

    def leak(self, state: Tensor, u: Tensor) -> Tensor:
        n = state.shape[-1]
        return torch.sigmoid(u[..., n : 2 * n] + F.linear(state, self.weights[0][n : 2 * n]))

    def jacobian(self, state: Tensor, u: Tensor) -> Tensor:
        update, by_reset, by_update, _, by_inner = self._slopes(state, u)
        return chain_weights((by_reset, by_update, by_inner), self.weights[0].chunk(3), update)

    def diagonal(self, state: Tensor, u: Tensor) -> Tensor:
        update, by_reset, by_update, _, by_inner = self._slopes(state, u)
        w_hr, w_hz, w_hn = (weight.diagonal() for weight in self.weights[0].chunk(3))
        return update + by_reset * w_hr + by_update * w_hz + by_inner * w_hn

    def input_grads(self, gate_grads: Tensor) -> Tensor:
        return gate_grads[..., : 3 * self.size]

    def weight_grads(self, previous: Sequence[Tensor], gate_grads: Tensor) -> tuple[Tensor, ...]:
        (h,), n = previous, self.size
        d_gates, d_inner = gate_grads[:, : 2 * n], gate_grads[:, 3 * n :]
        return torch.cat([sum_outer(d_gates, h), sum_outer(d_inner, h)]), d_inner.sum(0)

    def bound(self, initial: Tensor) -> Tensor:
        return unit_box(initial)
