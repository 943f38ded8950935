"""DEER's multi-head GRU: every head is a small GRU that takes steps of its own size through the sequence."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import timeloom as tl


def strided(layer: nn.Module, x: Tensor, stride: int) -> Tensor:
    """A recurrent layer whose state comes from `stride` steps before: `(T, B, n)` as `stride` interleaved sequences."""
    steps, batch, width = x.shape
    padded = F.pad(x, (0, 0, 0, 0, 0, -steps % stride))
    rows = padded.view(-1, stride * batch, width)  # (T / stride, stride · B, n)
    return layer(rows)[0].reshape(-1, batch, width)[:steps]


class MultiHead(nn.Module):
    """Heads side by side, head k with stride `2^(k mod strides)`, then a gated linear unit; x is added on top."""

    def __init__(self, channels: int, heads: int, strides: int, solver: str | None) -> None:
        super().__init__()
        width = channels // heads
        self.norm = nn.LayerNorm(channels)
        self.heads = nn.ModuleList(
            nn.GRU(width, width) if solver is None else tl.GRU(width, width, solver=solver) for _ in range(heads)
        )
        self.strides = [2 ** (k % strides) for k in range(heads)]
        self.mix = nn.Linear(channels, 2 * channels)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.norm(x).chunk(len(self.heads), -1)
        told = [
            strided(*one) for one in zip(self.heads, (part.contiguous() for part in parts), self.strides, strict=True)
        ]
        return x + F.glu(self.mix(torch.cat(told, -1)))


class Classifier(nn.Module):
    """Pixels `(1024, B, 3)` one after the other to the class; the mean over all steps decides."""

    def __init__(self, channels: int, heads: int, layers: int, strides: int, solver: str | None) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, channels), nn.Linear(channels, 10)
        self.layers = nn.Sequential(*(MultiHead(channels, heads, strides, solver) for _ in range(layers)))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layers(self.first(x)).mean(0))
