"""The LSTM of torch.nn.LSTM, with and without a projection of its output."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from timeloom.cells.base import Cell, chain_weights, sum_outer, unit_box
from timeloom.cells.coarse import Coarse, Frozen, Pull, geometric
from timeloom.cells.projection import project


class LSTMCell(Cell):
    """Torch's LSTM over projected inputs; its state is `(h, c)`.

        i = σ(u_i + W_hi h)   f = σ(u_f + W_hf h)   g = tanh(u_g + W_hg h)   o = σ(u_o + W_ho h)
        c⁺ = f ⊙ c + i ⊙ g    h⁺ = o ⊙ tanh(c⁺)     (h⁺ = W_hr (o ⊙ tanh(c⁺)) with a projection)

    Weights: `W_hh (4n, p)` and, with a projection, `W_hr (p, n)`. Gate gradients: those of the arguments of i, f, g, o,
    `(N, 4n)`; with a projection also, behind them, the value that is projected and h⁺'s gradient: `(N, 5n + p)`.
    """

    in_cudnn = True

    def __init__(self, w_hh: Tensor, w_hr: Tensor | None = None) -> None:
        self.weights = (w_hh,) if w_hr is None else (w_hh, w_hr)
        self.parts = (w_hh.shape[1], w_hh.shape[0] // 4)
        self.gate_width = w_hh.shape[0] + (0 if w_hr is None else sum(self.parts))
        self.kernel = "lstm" if w_hr is None else None
        self.has_blocks = w_hr is None

    @staticmethod
    def project(
        x: Tensor,
        w_ih: Tensor,
        w_hh: Tensor,
        b_ih: Tensor | None = None,
        b_hh: Tensor | None = None,
        w_hr: Tensor | None = None,
    ) -> tuple[LSTMCell, Tensor]:
        """The cell and its inputs from torch's parameters: x `(T, B, D)` to u `(T, B, 4n)` by one product."""
        bias = None if b_ih is None or b_hh is None else b_ih + b_hh
        return LSTMCell(w_hh, w_hr), project(x, w_ih, bias)

    def _split(self, state: Tensor) -> tuple[Tensor, Tensor]:
        h, c = state.split(self.parts, -1)
        return h, c

    def _gates(self, h: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        i, f, g, o = (u + F.linear(h, self.weights[0])).chunk(4, -1)
        return torch.sigmoid(i), torch.sigmoid(f), torch.tanh(g), torch.sigmoid(o)

    def _emit(self, value: Tensor) -> Tensor:
        return F.linear(value, self.weights[1]) if len(self.weights) == 2 else value

    def step(self, state: Tensor, u: Tensor) -> Tensor:
        h, c = self._split(state)
        i, f, g, o = self._gates(h, u)
        c = f * c + i * g
        return torch.cat([self._emit(o * torch.tanh(c)), c], -1)

    def vjp(self, state: Tensor, u: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        h, c = self._split(state)
        d_h, d_c = self._split(grad)
        i, f, g, o = self._gates(h, u)
        squashed = torch.tanh(f * c + i * g)
        d_value = d_h @ self.weights[1] if len(self.weights) == 2 else d_h
        d_c = d_c + d_value * o * (1 - squashed * squashed)
        gates = [
            d_c * g * i * (1 - i),
            d_c * c * f * (1 - f),
            d_c * i * (1 - g * g),
            d_value * squashed * o * (1 - o),
        ]
        d_gates = torch.cat(gates, -1)
        d_state = torch.cat([d_gates @ self.weights[0], d_c * f], -1)
        if len(self.weights) == 2:
            d_gates = torch.cat([d_gates, o * squashed, d_h], -1)
        return d_state, d_gates

    def decay(self, state: Tensor, u: Tensor) -> Tensor:
        h, _ = self._split(state)
        n = self.parts[1]
        forget = torch.sigmoid(u[..., n : 2 * n] + F.linear(h, self.weights[0][n : 2 * n]))
        return torch.cat([torch.zeros_like(h), forget], -1)

    def _slopes(self, state: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """f, ∂h⁺/∂c⁺, ∂c⁺ by the arguments of i, f and g, and ∂h⁺ by that of o, `(N, n)` each."""
        h, c = self._split(state)
        i, f, g, o = self._gates(h, u)
        squashed = torch.tanh(f * c + i * g)
        by_cell = o * (1 - squashed * squashed)
        return f, by_cell, g * i * (1 - i), c * f * (1 - f), i * (1 - g * g), squashed * o * (1 - o)

    def blocks(self, state: Tensor, u: Tensor) -> Tensor:
        f, by_cell, by_i, by_f, by_g, by_o = self._slopes(state, u)
        w_i, w_f, w_g, w_o = (weight.diagonal() for weight in self.weights[0].chunk(4))
        c_by_h = by_i * w_i + by_f * w_f + by_g * w_g
        return torch.stack([by_cell * c_by_h + by_o * w_o, by_cell * f, c_by_h, f], 1).view(-1, 2, 2, f.shape[-1])

    def jacobian(self, state: Tensor, u: Tensor) -> Tensor:
        f, by_cell, by_i, by_f, by_g, by_o = self._slopes(state, u)
        w_i, w_f, w_g, w_o = self.weights[0].chunk(4)
        c_by_h = chain_weights((by_i, by_f, by_g), (w_i, w_f, w_g))
        h_by_h = torch.addcmul(chain_weights((by_o,), (w_o,)), by_cell.unsqueeze(-1), c_by_h)
        h_by_c = torch.diag_embed(by_cell * f)
        if len(self.weights) == 2:
            h_by_h, h_by_c = self.weights[1] @ h_by_h, self.weights[1] @ h_by_c
        return torch.cat([torch.cat([h_by_h, h_by_c], -1), torch.cat([c_by_h, torch.diag_embed(f)], -1)], -2)

    def input_grads(self, gate_grads: Tensor) -> Tensor:
        return gate_grads[..., : 4 * self.parts[1]]

    def weight_grads(self, previous: Sequence[Tensor], gate_grads: Tensor) -> tuple[Tensor, ...]:
        n = self.parts[1]
        d_w_hh = sum_outer(gate_grads[:, : 4 * n], previous[0])
        if len(self.weights) == 1:
            return (d_w_hh,)
        return d_w_hh, sum_outer(gate_grads[:, 5 * n :], gate_grads[:, 4 * n : 5 * n])

    def bound(self, initial: Tensor) -> Tensor:
        """h of an unprojected LSTM lies in the unit box; c may grow with time."""
        h, c = self._split(initial)
        free = torch.full_like(c, torch.inf)
        return torch.cat([unit_box(h) if len(self.weights) == 1 else torch.full_like(h, torch.inf), free], -1)

    def coarse(self, kind: str) -> Coarse:
        return super().coarse(kind) if kind == "implicit" else FrozenLSTM(self)


class FrozenLSTM(Frozen):
    """An LSTM over a span of m steps with frozen gates: `c⁺ = f^m c + (1 + f + … + f^(m−1)) i ⊙ g`.

    h⁺ follows from c⁺ as in a step.
    """

    cell: LSTMCell

    def __init__(self, cell: LSTMCell) -> None:
        super().__init__(cell)

    def step(self, state: Tensor, u: Tensor, span: Tensor) -> Tensor:
        h, c = self.cell._split(state)
        i, f, g, o = self.cell._gates(h, u)
        kept = f.pow(span)
        c = kept * c + geometric(f, kept, span) * i * g
        return torch.cat([self.cell._emit(o * torch.tanh(c)), c], -1)

    def linearise(self, state: Tensor, u: Tensor, span: Tensor) -> Pull:
        h, c = self.cell._split(state)
        i, f, g, o = self.cell._gates(h, u)
        kept = f.pow(span)
        total = geometric(f, kept, span)
        squashed = torch.tanh(kept * c + total * i * g)
        by_c = o * (1 - squashed * squashed)
        by_forget = span * kept * (1 - f) * c + i * g * (f * total - span * kept)
        slopes = torch.stack([total * g * i * (1 - i), by_forget, total * i * (1 - g * g)], -2)
        by_output = squashed * o * (1 - o)
        w_hh, *w_hr = self.cell.weights

        def pull(at: slice, grad: Tensor) -> Tensor:
            d_h, d_c = self.cell._split(grad)
            d_value = d_h @ w_hr[0] if w_hr else d_h
            d_c = d_c + d_value * by_c[at]
            d_gates = torch.cat([(d_c.unsqueeze(-2) * slopes[at]).flatten(-2), d_value * by_output[at]], -1)
            return torch.cat([d_gates @ w_hh, d_c * kept[at]], -1)

        return pull
