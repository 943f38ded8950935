"""The GRU of torch.nn.GRU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F

from timeloom.cells.base import Cell, chain_weights, sum_outer, unit_box
from timeloom.cells.coarse import Coarse, March, Pull
from timeloom.cells.projection import project


class GRUCell(Cell):
    """Torch's GRU over projected inputs.

        r = σ(u_r + W_hr h)      z = σ(u_z + W_hz h)      M = W_hn h + b_hn
        n = tanh(u_n + r ⊙ M)    h⁺ = n + z ⊙ (h − n)

    with `u = W_i x + b_i` and the biases b_hr and b_hz added to it. Weights: `W_hh (3n, n)` and `b_hn (n,)`.
    Gate gradients: those of the arguments of σ, σ, tanh, and of M: `(N, 4n)`.
    """

    kernel: str | None = "gru"
    in_cudnn = True
    gamma = 1.0
    """Step size of the implicit Euler step, in implicit variants."""

    def __init__(self, w_hh: Tensor, b_hn: Tensor) -> None:
        self.weights = (w_hh, b_hn)
        self.parts = (w_hh.shape[1],)
        self.gate_width = 4 * w_hh.shape[1]

    @classmethod
    def of(cls, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None) -> Self:
        """The cell of torch's parameters."""
        n = w_hh.shape[1]
        return cls(w_hh, w_hh.new_zeros(n) if b_hh is None else b_hh[2 * n :])

    @classmethod
    def project(
        cls, x: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
    ) -> tuple[Self, Tensor]:
        """The cell and its inputs from torch's parameters: x `(T, B, D)` to u `(T, B, 3n)` by one product."""
        n = w_hh.shape[1]
        bias = None if b_ih is None or b_hh is None else b_ih + F.pad(b_hh[: 2 * n], (0, n))
        return cls.of(w_ih, w_hh, b_ih, b_hh), project(x, w_ih, bias)

    def _gates(self, h: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        w_hh, b_hn = self.weights
        u_r, u_z, u_n = u.chunk(3, -1)
        g_r, g_z, g_n = F.linear(h, w_hh).chunk(3, -1)
        reset, update, inner = torch.sigmoid(u_r + g_r), torch.sigmoid(u_z + g_z), g_n + b_hn
        return reset, update, inner, torch.tanh(u_n + reset * inner)

    def _keep(self, update: Tensor) -> Tensor:
        """The share of h that a step keeps, from z."""
        return update

    def _taken(self, update: Tensor) -> Tensor:
        """The share of the candidate, from z."""
        return 1 - update

    def _keep_slope(self, update: Tensor) -> Tensor:
        """Derivative of the kept share by the update gate's argument."""
        return update * (1 - update)

    def step(self, state: Tensor, u: Tensor) -> Tensor:
        _, update, _, candidate = self._gates(state, u)
        return torch.lerp(candidate, state, self._keep(update))

    def _slopes(self, h: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The kept share of h, and ∂h⁺ by the arguments of reset gate, update gate and candidate, and by M."""
        gates = self._gates(h, u)
        laws = self._keep(gates[1]), self._taken(gates[1]), self._keep_slope(gates[1])
        return self._slopes_of(h, gates, *laws)

    @staticmethod
    def _slopes_of(
        h: Tensor, gates: tuple[Tensor, Tensor, Tensor, Tensor], keep: Tensor, taken: Tensor, slope: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The same for a given kept share and its slope."""
        reset, _, inner, candidate = gates
        by_candidate = taken * (1 - candidate * candidate)
        by_reset = by_candidate * inner * reset * (1 - reset)
        by_update = (h - candidate) * slope
        return keep, by_reset, by_update, by_candidate, by_candidate * reset

    def vjp(self, state: Tensor, u: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        keep, *slopes = self._slopes(state, u)
        d_reset, d_update, d_candidate, d_inner = (grad * slope for slope in slopes)
        through = torch.cat([d_reset, d_update, d_inner], -1)
        return grad * keep + through @ self.weights[0], torch.cat([d_reset, d_update, d_candidate, d_inner], -1)

    def decay(self, state: Tensor, u: Tensor) -> Tensor:
        n = state.shape[-1]
        return torch.sigmoid(u[..., n : 2 * n] + F.linear(state, self.weights[0][n : 2 * n]))

    def jacobian(self, state: Tensor, u: Tensor) -> Tensor:
        keep, by_reset, by_update, _, by_inner = self._slopes(state, u)
        return chain_weights((by_reset, by_update, by_inner), self.weights[0].chunk(3), keep)

    def diagonal(self, state: Tensor, u: Tensor) -> Tensor:
        keep, by_reset, by_update, _, by_inner = self._slopes(state, u)
        w_hr, w_hz, w_hn = (weight.diagonal() for weight in self.weights[0].chunk(3))
        return keep + by_reset * w_hr + by_update * w_hz + by_inner * w_hn

    def input_grads(self, gate_grads: Tensor) -> Tensor:
        return gate_grads[..., : 3 * self.size]

    def weight_grads(self, previous: Sequence[Tensor], gate_grads: Tensor) -> tuple[Tensor, ...]:
        (h,), n = previous, self.size
        d_gates, d_inner = gate_grads[:, : 2 * n], gate_grads[:, 3 * n :]
        return torch.cat([sum_outer(d_gates, h), sum_outer(d_inner, h)]), d_inner.sum(0)

    def bound(self, initial: Tensor) -> Tensor:
        return unit_box(initial)

    def coarse(self, kind: str) -> Coarse:
        return GRUCoarse(self, kind)


class GRUCoarse(Coarse):
    """A GRU over a span of m steps, with the share k of h that m steps keep: `h⁺ = n + k ⊙ (h − n)`.

    `frozen`: gates and candidate are frozen, so k is the share of one step to the power m; `implicit`: one implicit
    Euler step of size γ m, `k = 1 / (1 + γ m (1 − z))`.
    """

    def __init__(self, cell: GRUCell, kind: str) -> None:
        self.cell = cell
        self.kind = kind

    def _keep(self, update: Tensor, span: Tensor) -> Tensor:
        if self.kind == "implicit":
            return implicit_keep(update, self.cell.gamma * span)
        return self.cell._keep(update).pow(span)

    def _keep_slope(self, update: Tensor, span: Tensor) -> Tensor:
        if self.kind == "implicit":
            return implicit_keep_slope(update, self.cell.gamma * span)
        return span * self.cell._keep(update).pow(span - 1) * self.cell._keep_slope(update)

    def step(self, state: Tensor, u: Tensor, span: Tensor) -> Tensor:
        _, update, _, candidate = self.cell._gates(state, u)
        return torch.lerp(candidate, state, self._keep(update, span))

    def linearise(self, state: Tensor, u: Tensor, span: Tensor) -> Pull:
        keep, *by_gate = self._slopes(state, u, span)
        slopes, w_hh = torch.stack(by_gate, -2), self.cell.weights[0]

        def pull(at: slice, grad: Tensor) -> Tensor:
            return grad * keep[at] + (grad.unsqueeze(-2) * slopes[at]).flatten(-2) @ w_hh

        return pull

    def _slopes(self, state: Tensor, u: Tensor, span: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The kept share of h, and ∂h⁺ by the recurrent products of the reset gate, the update gate and M."""
        gates = self.cell._gates(state, u)
        kept = self._keep(gates[1], span)
        laws = kept, 1 - kept, self._keep_slope(gates[1], span)
        keep, by_reset, by_update, _, by_inner = self.cell._slopes_of(state, gates, *laws)
        return keep, by_reset, by_update, by_inner

    def marching(self, u: Tensor, span: Tensor, added: Tensor) -> March | None:
        if self.kind != "implicit" and not bool((span >= 1).all()):
            return None
        return partial(GRUCoarse._marched, self), torch.cat([u, span.expand_as(added), added], -1)

    def _marched(self, state: Tensor, x: Tensor) -> Tensor:
        """`step` plus an addend, from x `(N, 5 n)`: inputs, the span for each unit, the addend."""
        n = state.shape[-1]
        _, update, _, candidate = self.cell._gates(state, x[..., : 3 * n])
        span, added = x[..., 3 * n : 4 * n], x[..., 4 * n :]
        if self.kind == "implicit":
            keep = implicit_keep(update, self.cell.gamma * span)
        else:
            keep = torch.exp(span * torch.log(self.cell._keep(update)))  # kernels have no such power
        return torch.lerp(candidate, state, keep) + added

    def marching_back(self, state: Tensor, u: Tensor, span: Tensor, added: Tensor) -> March | None:
        return partial(GRUCoarse._marched_back, self), torch.cat([*self._slopes(state, u, span), added], -1)

    def _marched_back(self, grad: Tensor, x: Tensor) -> Tensor:
        """A vjp plus an addend, from x `(N, 5 n)`: the kept share, three slopes, the addend."""
        n = grad.shape[-1]
        through = torch.cat([grad * x[..., n : 2 * n], grad * x[..., 2 * n : 3 * n], grad * x[..., 3 * n : 4 * n]], -1)
        return grad * x[..., :n] + through @ self.cell.weights[0] + x[..., 4 * n :]


def implicit_keep(update: Tensor, gamma: Tensor | float) -> Tensor:
    """`k = 1 / (1 + γ (1 − z))` from z: the share that an implicit Euler step of size γ keeps."""
    return 1 / (1 + gamma * (1 - update))


def implicit_keep_slope(update: Tensor, gamma: Tensor | float) -> Tensor:
    """The derivative of `implicit_keep` by the update gate's argument."""
    return gamma * implicit_keep(update, gamma).square() * update * (1 - update)
