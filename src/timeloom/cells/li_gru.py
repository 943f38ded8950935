"""The light GRU of speech recognition."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from timeloom.cells.step import Step


class LiGRU(Step):
    """Light GRU (Ravanelli et al., 2018): no reset gate, relu, and a norm on the contribution of x:

        a = N(W x)    z = σ(a_z + U_z h)    c = relu(a_c + U_c h)    h⁺ = c + z ⊙ (h − c)

    N is a layer norm: the paper's batch norm would mix rows.
    """

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__(input_size, hidden_size)
        self.input = nn.Linear(input_size, 2 * hidden_size, bias=False)
        self.norm = nn.LayerNorm(2 * hidden_size)
        self.recurrent = nn.Linear(hidden_size, 2 * hidden_size, bias=False)
        nn.init.orthogonal_(self.recurrent.weight)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        z, c = (self.norm(self.input(x)) + self.recurrent(h)).chunk(2, -1)
        c = torch.relu(c)
        return c + torch.sigmoid(z) * (h - c)
