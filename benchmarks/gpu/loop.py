"""A GRU as a plain loop over its cell, to be compiled by torch.compile."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class LoopGRU(nn.Module):
    """torch's parameters by their names, run step by step in Python; inputs are projected by one product.

    Not derived from nn.GRU, which torch.compile refuses to trace.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight_ih_l0 = nn.Parameter(torch.empty(3 * hidden, hidden))
        self.weight_hh_l0 = nn.Parameter(torch.empty(3 * hidden, hidden))
        self.bias_ih_l0 = nn.Parameter(torch.empty(3 * hidden))
        self.bias_hh_l0 = nn.Parameter(torch.empty(3 * hidden))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = x.new_zeros(x.shape[1], self.weight_hh_l0.shape[1])
        states = []
        for u in (x @ self.weight_ih_l0.t() + self.bias_ih_l0).unbind(0):
            reset, update, candidate = u.chunk(3, -1)
            of_reset, of_update, of_candidate = (h @ self.weight_hh_l0.t() + self.bias_hh_l0).chunk(3, -1)
            z = torch.sigmoid(update + of_update)
            n = torch.tanh(candidate + torch.sigmoid(reset + of_reset) * of_candidate)
            h = n + z * (h - n)
            states.append(h)
        return torch.stack(states), h.unsqueeze(0)
