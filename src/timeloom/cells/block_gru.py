"""Dreamer's GRU: block-diagonal recurrent weights, and a norm."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from timeloom.cells.step import Step, by_blocks, check_blocks, uniform


class BlockGRU(Step):
    """The recurrent core of DreamerV3 (Hafner et al., 2023): a block of units sees x and its own
    block of h:

    r, c, u = LN(W x + R h)              R block-diagonal
    n = tanh(σ(r) ⊙ c)    z = σ(u − 1)    h⁺ = h + z ⊙ (n − h)
    """

    def __init__(self, input_size: int, hidden_size: int, blocks: int = 8) -> None:
        super().__init__(input_size, hidden_size)
        width = hidden_size // check_blocks("blocks", blocks, hidden_size)
        self.input = nn.Linear(input_size, 3 * hidden_size, bias=False)
        self.recurrent = uniform(3, blocks, width, width, units=width)
        self.norm = nn.LayerNorm(3 * hidden_size)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        recurrent = torch.cat([by_blocks(weight, h) for weight in self.recurrent], -1)
        r, c, u = self.norm(self.input(x) + recurrent).chunk(3, -1)
        return h + torch.sigmoid(u - 1) * (torch.tanh(torch.sigmoid(r) * c) - h)
