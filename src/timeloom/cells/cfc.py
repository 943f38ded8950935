"""The closed-form continuous-time network."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from timeloom.cells.step import Step


class CfC(Step):
    """Closed-form continuous-time network (Hasani et al., 2022), through a layer of `backbone` units:

    y = 1.7159 tanh(⅔ (B [x, h] + b))
    s = σ(A y + a)    h⁺ = (1 − s) ⊙ tanh(F y + f) + s ⊙ tanh(G y + g)
    """

    def __init__(self, input_size: int, hidden_size: int, backbone: int | None = None) -> None:
        super().__init__(input_size, hidden_size)
        units = hidden_size if backbone is None else backbone
        self.backbone = nn.Linear(input_size + hidden_size, units)
        self.heads = nn.Linear(units, 3 * hidden_size)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        y = 1.7159 * torch.tanh(2 / 3 * self.backbone(torch.cat([x, h], -1)))
        s, f, g = self.heads(y).chunk(3, -1)
        s, f, g = torch.sigmoid(s), torch.tanh(f), torch.tanh(g)
        return f + s * (g - f)
