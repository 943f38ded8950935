"""The linear recurrence one step at a time: the truth."""

from __future__ import annotations

import torch
from torch import Tensor

from timeloom.scan.elements import Structure, apply


def scan(a: Tensor, b: Tensor, h0: Tensor, structure: Structure) -> Tensor:
    """`h[t] = a[t] h[t-1] + b[t]` from `h0`: shapes as in `timeloom.scan.elements`, with time as the first dim."""
    states, h = [], h0
    for transfer, source in zip(a.unbind(0), b.unbind(0), strict=True):
        h = apply(transfer, h, structure) + source
        states.append(h)
    return torch.stack(states) if states else b
