"""Which input pixels each output pixel of a convolution or pooling layer depends on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Pair = tuple[int, int]


@dataclass(frozen=True)
class Windows:
    """Geometry of a sliding window: sizes in rows and columns of pixels."""

    inputs: Pair
    outputs: Pair
    kernel: Pair
    stride: Pair
    padding: Pair
    dilation: Pair = (1, 1)

    def entries(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """All `(input pixel, output pixel, place in the window)` that lie inside the input, as three flat tensors."""
        axes = [self._axis(axis, device) for axis in (0, 1)]
        (row_in, row_out, row_at), (column_in, column_out, column_at) = axes
        pixel = _outer(row_in * self.inputs[1], column_in)
        out = _outer(row_out * self.outputs[1], column_out)
        place = _outer(row_at * self.kernel[1], column_at)
        return pixel, out, place

    def _axis(self, axis: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """The same along one axis: input, output and place in the window of every such pair."""
        out = torch.arange(self.outputs[axis], device=device).unsqueeze(1)
        place = torch.arange(self.kernel[axis], device=device)
        at = out * self.stride[axis] - self.padding[axis] + place * self.dilation[axis]
        inside = (at >= 0) & (at < self.inputs[axis])
        return at[inside], out.expand_as(at)[inside], place.expand_as(at)[inside]


def _outer(rows: Tensor, columns: Tensor) -> Tensor:
    return (rows.unsqueeze(1) + columns).flatten()


def pair(value: int | Sequence[int]) -> Pair:
    return (value, value) if isinstance(value, int) else (value[0], value[1])
