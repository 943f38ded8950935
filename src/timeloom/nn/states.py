"""All parts of the state at every step, for `return_states=True`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from timeloom.nn.sequence import mask_padding, reverse, reverse_resets
from timeloom.scan import linear_scan


@dataclass
class AllStates:
    """The states after every step, collected from the layers and directions of one call, one after the other."""

    lengths: Tensor | None
    resets: Tensor | None
    parts: list[tuple[Tensor, ...]] = field(default_factory=list)
    """The parts of each layer and direction, `(T, B, part)` in time order."""

    def to(self, dtypes: Sequence[torch.dtype]) -> None:
        """Convert to the dtypes in which final states are returned, one for each part."""
        self.parts = [tuple(part.to(dtype) for part, dtype in zip(parts, dtypes, strict=True)) for parts in self.parts]

    def add(
        self, x: Tensor, h: Tensor, initial: tuple[Tensor, ...], weights: tuple[Tensor | None, ...], back: bool
    ) -> None:
        """Add one layer in one direction, given its input x, its output h and its initial state."""
        if len(initial) == 1:
            self.parts.append((h,))
            return
        resets = self.resets
        if back:
            x, h = reverse(x, self.lengths), reverse(h, self.lengths)
            resets = None if resets is None else reverse_resets(resets, self.lengths)
        h0, c0 = (part.to(h.dtype) for part in initial)
        c = cell_states(x, h, h0, c0, weights, resets)
        if self.lengths is not None:
            c = mask_padding(c, self.lengths)
        self.parts.append(tuple(reverse(part, self.lengths) if back else part for part in (h, c)))

    def stacked(self, batch_first: bool, batched: bool) -> tuple[Tensor, ...]:
        """Each part as `(layers · directions, T, B, part)`, in the user's order of dimensions."""
        found = tuple(torch.stack(part) for part in zip(*self.parts, strict=True))
        if not batched:
            return tuple(part.squeeze(2) for part in found)
        return tuple(part.transpose(1, 2) for part in found) if batch_first else found


def cell_states(
    x: Tensor, h: Tensor, h0: Tensor, c0: Tensor, weights: tuple[Tensor | None, ...], resets: Tensor | None
) -> Tensor:
    """An LSTM's c after every step `(T, B, n)`, from its inputs and outputs.

    With known outputs, `c[t] = f[t] c[t-1] + i[t] g[t]` is a linear recurrence.
    """
    w_ih, w_hh, b_ih, b_hh = (None if weight is None else weight.to(h.dtype) for weight in weights[:4])
    assert w_ih is not None
    assert w_hh is not None
    before = torch.cat([h0.unsqueeze(0), h[:-1]])
    if resets is not None:
        before = torch.where(resets.unsqueeze(-1), h0, before)
    i, f, g, _ = (F.linear(x.to(h.dtype), w_ih, b_ih) + F.linear(before, w_hh, b_hh)).chunk(4, -1)
    keep, add = torch.sigmoid(f), torch.sigmoid(i) * torch.tanh(g)
    if resets is not None:
        marked = resets.unsqueeze(-1)
        keep, add = torch.where(marked, 0, keep), torch.where(marked, add + keep * c0, add)
    return linear_scan(keep, add, c0)
