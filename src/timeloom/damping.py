"""How much to damp the corrections: the rule of Levenberg and Marquardt, for every sequence by itself."""

from __future__ import annotations

import torch
from torch import Tensor

LEAST = 1e-3
"""Damping below this is none."""
FIRST = 1.0
"""Damping after the first step that did not help."""
MORE, LESS = 4.0, 0.25
"""Factors after a step that did not help, and after one that did."""


class Damping:
    """λ `(B,)` and the sum of squared residuals that the last accepted step had reached, `(B,)`."""

    def __init__(self, like: Tensor) -> None:
        self.strength = torch.zeros(like.shape[1], dtype=torch.float64, device=like.device)
        self._merit = torch.full_like(self.strength, torch.inf)

    def judge(self, error: Tensor) -> Tensor:
        """Take in the residuals `(C, B)` after a step; True where it must be taken back and tried with more damping."""
        merit = error.double().square().sum(0)
        worse = ~(merit < self._merit)
        self._merit = torch.where(worse, self._merit, merit)
        more = (self.strength * MORE).clamp(min=FIRST)
        less = self.strength * LESS
        self.strength = torch.where(worse, more, torch.where(less < LEAST, 0, less))
        return worse
