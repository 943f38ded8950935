"""A GRU of one gate."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from timeloom.cells.step import Step


class MinimalGRU(Step):
    """Minimal gated unit (Zhou et al., 2016): one gate resets and updates:

    f = σ(W_f x + b_f + U_f h)    c = tanh(W_c x + b_c + U_c (f ⊙ h))    h⁺ = h + f ⊙ (c − h)
    """

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__(input_size, hidden_size)
        self.input = nn.Linear(input_size, 2 * hidden_size)
        self.gate = nn.Linear(hidden_size, hidden_size, bias=False)
        self.candidate = nn.Linear(hidden_size, hidden_size, bias=False)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        x_f, x_c = self.input(x).chunk(2, -1)
        f = torch.sigmoid(x_f + self.gate(h))
        return h + f * (torch.tanh(x_c + self.candidate(f * h)) - h)
