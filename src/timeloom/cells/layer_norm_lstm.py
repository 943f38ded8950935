"""An LSTM with layer normalisation."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from timeloom.cells.step import Step

Pair = tuple[Tensor, Tensor]


class LayerNormLSTM(Step):
    """The LSTM of Layer Normalization (Ba et al., 2016); its state is `(h, c)`:

    i, f, g, o = LN(W x) + LN(U h)
    c⁺ = σ(f) ⊙ c + σ(i) ⊙ tanh(g)    h⁺ = σ(o) ⊙ tanh(LN(c⁺))
    """

    parts = 2

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__(input_size, hidden_size)
        self.input = nn.Linear(input_size, 4 * hidden_size, bias=False)
        self.recurrent = nn.Linear(hidden_size, 4 * hidden_size, bias=False)
        self.input_norm, self.recurrent_norm = nn.LayerNorm(4 * hidden_size), nn.LayerNorm(4 * hidden_size)
        self.cell_norm = nn.LayerNorm(hidden_size)

    def forward(self, state: Pair, x: Tensor) -> Pair:
        h, c = state
        i, f, g, o = (self.input_norm(self.input(x)) + self.recurrent_norm(self.recurrent(h))).chunk(4, -1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(self.cell_norm(c)), c
