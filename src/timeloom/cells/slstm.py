"""xLSTM's sLSTM: exponential gates, a normaliser, and a stabiliser that keeps both finite."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from timeloom.cells.step import Step, by_blocks, check_blocks, uniform

Four = tuple[Tensor, Tensor, Tensor, Tensor]


class SLSTM(Step):
    """sLSTM (Beck et al., 2024); its state is `(h, c, n, m)`, and heads do not see each other's h:

    z, i, f, o = W x + b + R h                       R block-diagonal, one block for each head
    m⁺ = max(log σ(f) + m, i)    i' = exp(i − m⁺)    f' = exp(log σ(f) + m − m⁺)
    c⁺ = f' ⊙ c + i' ⊙ tanh(z)    n⁺ = f' ⊙ n + i'    h⁺ = σ(o) ⊙ c⁺ / n⁺
    """

    parts = 4

    def __init__(self, input_size: int, hidden_size: int, heads: int = 1) -> None:
        super().__init__(input_size, hidden_size)
        width = hidden_size // check_blocks("heads", heads, hidden_size)
        self.input = nn.Linear(input_size, 4 * hidden_size)
        self.recurrent = uniform(4, heads, width, width, units=width)

    def forward(self, state: Four, x: Tensor) -> Four:
        h, c, n, m = state
        given = self.input(x).chunk(4, -1)
        z, i, f, o = (a + by_blocks(weight, h) for a, weight in zip(given, self.recurrent, strict=True))
        kept = F.logsigmoid(f) + m
        m = torch.maximum(kept, i)
        i, f = torch.exp(i - m), torch.exp(kept - m)
        c, n = f * c + i * torch.tanh(z), f * n + i
        return torch.sigmoid(o) * c / n, c, n, m
