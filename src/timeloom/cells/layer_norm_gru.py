"""A GRU with layer normalisation."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from timeloom.cells.step import Step


class LayerNormGRU(Step):
    """The GRU of Layer Normalization (Ba et al., 2016):

    a = LN(W x)    b = LN(U h)
    r = σ(a_r + b_r)    z = σ(a_z + b_z)    n = tanh(a_n + r ⊙ b_n)    h⁺ = n + z ⊙ (h − n)
    """

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__(input_size, hidden_size)
        self.input = nn.Linear(input_size, 3 * hidden_size, bias=False)
        self.recurrent = nn.Linear(hidden_size, 3 * hidden_size, bias=False)
        self.input_norm, self.recurrent_norm = nn.LayerNorm(3 * hidden_size), nn.LayerNorm(3 * hidden_size)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        a_r, a_z, a_n = self.input_norm(self.input(x)).chunk(3, -1)
        b_r, b_z, b_n = self.recurrent_norm(self.recurrent(h)).chunk(3, -1)
        n = torch.tanh(a_n + torch.sigmoid(a_r + b_r) * b_n)
        return n + torch.sigmoid(a_z + b_z) * (h - n)
