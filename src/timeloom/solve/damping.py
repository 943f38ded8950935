"""How much to damp the corrections, adapted after every sweep for each sequence by itself."""

from __future__ import annotations

import torch
from torch import Tensor

FIRST, MOST, LEAST = 0.1, 1e6, 1e-3
"""Damping after the first sweep that did not help; its maximum; the value below which it is set to zero."""
MORE, LESS = 10.0, 0.1
"""Factors of the damping after a sweep that did not help, and after one that did."""


class Damping:
    """The damping λ `(B,)`: zero until a sweep does not help, then more after each such sweep, less after the others.

    A sweep has helped if the mean of the residuals' logarithms fell. This mean reflects the progress of all states,
    whereas a sum of squares would only reflect the few that are still far off.
    """

    def __init__(self, batch: int, device: torch.device) -> None:
        self.strength = torch.zeros(batch, dtype=torch.float64, device=device)
        self._merit = torch.full_like(self.strength, torch.inf)

    def adapt(self, error: Tensor, tolerance: float) -> None:
        """Update the damping from the residuals `(C, B)` after a sweep."""
        merit = error.double().clamp(min=0.1 * tolerance).log().mean(0)
        helped = merit <= self._merit
        less = self.strength * LESS
        self.strength = torch.where(
            helped,
            torch.where(less < LEAST, 0, less),
            (self.strength * MORE).clamp(FIRST, MOST),
        )
        self._merit = merit
