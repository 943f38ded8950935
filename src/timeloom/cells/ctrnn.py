"""The rate network of neuroscience."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from timeloom.cells.step import Step


class CTRNN(Step):
    """A continuous-time network, one Euler step of `τ dh/dt = −h + W tanh(h) + V x + b`:

        h⁺ = h + a ⊙ (W tanh(h) + V x + b − h)    a = σ(r)

    with a learned rate `a = Δt / τ` for each unit, `rate` at the start.
    """

    def __init__(self, input_size: int, hidden_size: int, rate: float = 0.2) -> None:
        super().__init__(input_size, hidden_size)
        if not 0 < rate < 1:
            raise ValueError(f"rate must lie between 0 and 1, got {rate!r}")
        self.input = nn.Linear(input_size, hidden_size)
        self.recurrent = nn.Linear(hidden_size, hidden_size, bias=False)
        self.rate = nn.Parameter(torch.logit(torch.full((hidden_size,), float(rate))))

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        drive: Tensor = self.recurrent(torch.tanh(h)) + self.input(x)
        return h + torch.sigmoid(self.rate) * (drive - h)
