"""How much links amplify: how far their ends move from one sweep to the next, relative to their starts."""

from __future__ import annotations

import torch
from torch import Tensor

from timeloom.scan import linear_scan

ROUNDING = 16
"""Multiple of eps that a start must have moved for the move of the end to show a gain."""


class Gains:
    """The gain of every link, `(C, B)`, from its last move: zero if it has not moved yet."""

    def __init__(self, like: Tensor) -> None:
        self.values = like.new_zeros(like.shape[:-1])
        self.images = torch.zeros_like(like)
        """`(C, B, S)`, the move of each link's end in that last move."""
        self._last: tuple[Tensor, Tensor] | None = None

    def note(self, starts: Tensor, ends: Tensor, scale: Tensor) -> None:
        """Update from a sweep: all starts and ends after it, and the scale of the starts, `(C, B, S)` each."""
        if self._last is not None:
            moved = ((starts - self._last[0]).abs() / scale).amax(-1)
            image = ((ends - self._last[1]).abs() / torch.cat([scale[1:], scale[-1:]])).amax(-1)
            told = moved > ROUNDING * torch.finfo(moved.dtype).eps
            self.values = torch.where(told, image / moved.clamp(min=torch.finfo(moved.dtype).tiny), self.values)
            self.images = torch.where(told.unsqueeze(-1), ends - self._last[1], self.images)
        self._last = (starts.clone(), ends.clone())

    def add_up(self, jumps: Tensor) -> Tensor:
        """The accumulated relative jumps `(C, B)`, if none cancels another: `ε[p] = gain[p−1] ε[p−1] + jump[p]`."""
        before = torch.zeros_like(self.values)
        before[1:] = self.values[:-1]
        return linear_scan(before.unsqueeze(-1), jumps.unsqueeze(-1)).squeeze(-1)
