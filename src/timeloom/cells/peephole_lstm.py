"""An LSTM whose gates see its cell state."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from timeloom.cells.step import Step, uniform

Pair = tuple[Tensor, Tensor]


class PeepholeLSTM(Step):
    """Peephole connections (Gers, Schmidhuber, 2000); its state is `(h, c)`:

    i, f, g, o = W x + b + U h
    c⁺ = σ(f + p_f ⊙ c) ⊙ c + σ(i + p_i ⊙ c) ⊙ tanh(g)    h⁺ = σ(o + p_o ⊙ c⁺) ⊙ tanh(c⁺)
    """

    parts = 2

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__(input_size, hidden_size)
        self.input = nn.Linear(input_size, 4 * hidden_size)
        self.recurrent = nn.Linear(hidden_size, 4 * hidden_size, bias=False)
        self.peepholes = uniform(3, hidden_size, units=hidden_size)

    def forward(self, state: Pair, x: Tensor) -> Pair:
        h, c = state
        i, f, g, o = (self.input(x) + self.recurrent(h)).chunk(4, -1)
        p_i, p_f, p_o = self.peepholes
        c = torch.sigmoid(f + p_f * c) * c + torch.sigmoid(i + p_i * c) * torch.tanh(g)
        return torch.sigmoid(o + p_o * c) * torch.tanh(c), c
