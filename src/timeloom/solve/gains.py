"""How much links amplify: from one sweep to the next, how far ends have moved beside their starts."""

from __future__ import annotations

import torch
from torch import Tensor

from timeloom.scan import linear_scan

ROUNDING = 16
"""Roundings that a start must have moved for its end to tell a gain."""


class Gains:
    """The gain of every link, `(C, B)`, as its last move showed it: zero where it has not moved yet."""

    def __init__(self, like: Tensor) -> None:
        self.values = like.new_zeros(like.shape[:-1])
        self.images = torch.zeros_like(like)
        """`(C, B, S)`, how far the end of each link moved then."""
        self._last: tuple[Tensor, Tensor] | None = None

    def note(self, starts: Tensor, ends: Tensor, scale: Tensor) -> None:
        """Take in a sweep: all starts and ends behind it, and the scale of the starts, `(C, B, S)` each."""
        if self._last is not None:
            moved = ((starts - self._last[0]).abs() / scale).amax(-1)
            image = ((ends - self._last[1]).abs() / torch.cat([scale[1:], scale[-1:]])).amax(-1)
            told = moved > ROUNDING * torch.finfo(moved.dtype).eps
            self.values = torch.where(told, image / moved.clamp(min=torch.finfo(moved.dtype).tiny), self.values)
            self.images = torch.where(told.unsqueeze(-1), ends - self._last[1], self.images)
        self._last = (starts.clone(), ends.clone())

    def add_up(self, jumps: Tensor) -> Tensor:
        """What relative jumps `(C, B)` add up to where none cancels another: `ε[p] = gain[p−1] ε[p−1] + jump[p]`."""
        before = torch.zeros_like(self.values)
        before[1:] = self.values[:-1]
        return linear_scan(before.unsqueeze(-1), jumps.unsqueeze(-1)).squeeze(-1)
