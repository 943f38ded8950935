"""Transfers learned from the sweeps themselves: how ends have changed when starts did. It costs no step of the cell."""

from __future__ import annotations

import torch
from torch import Tensor

from timeloom.solve.lowrank import Basis, LowRank

MOST_PAIRS = 8
"""Sweeps that are remembered."""
LARGE = 0.5
"""A change this large beside the state itself tells nothing of small ones: no network is linear so far."""
ROUNDING = 16
"""A change this many roundings large tells its image to a few percent; a smaller one tells noise."""


class Secants:
    """Pairs (change of start, change of end) of every link, newest first, over the last sweeps.

    On the span of the changes the model maps as the link did; across it by the decay. Pairs that foretold the newest
    one worse than the decay alone are of another regime of the network, and are forgotten: link by link. Where the
    corrections made a whole sequence worse, all pairs of it are. Of a linear chain, as gradients are, all pairs are
    true.
    """

    def __init__(self, linear: bool = False) -> None:
        self._linear = linear
        self._pairs: list[tuple[Tensor, Tensor]] = []
        self._last: tuple[Tensor, Tensor] | None = None
        self._model: LowRank | None = None
        self._merit: Tensor | None = None

    def note(self, starts: Tensor, ends: Tensor, decay: Tensor) -> None:
        """Take in a sweep: all starts and ends `(C, B, S)` behind it. Links that it left alone have not changed."""
        if self._last is not None:
            change, image = starts - self._last[0], ends - self._last[1]
            if self._model is not None and not self._linear:
                by_model, by_decay = (_size(image - guess) for guess in (self._model.apply(change), decay * change))
                good = by_model <= by_decay
                self._pairs = [(torch.where(good, s, 0), torch.where(good, e, 0)) for s, e in self._pairs]
            if not self._linear:
                # A secant is off by what the network bends over the move: less known than that is better left to diag.
                moved = _size(change)
                bends = moved.square() / _size(starts).clamp(min=torch.finfo(moved.dtype).tiny)
                telling = (moved <= LARGE * _size(starts)) & (_size(image - decay * change) > bends)
                change, image = torch.where(telling, change, 0), torch.where(telling, image, 0)
            self._pairs = [(change, image), *self._pairs[: MOST_PAIRS - 1]]
        self._last = (starts.clone(), ends.clone())

    def doubt(self, error: Tensor, tolerance: float) -> None:
        """Forget the pairs of sequences whose relative jumps `(C, B)` have grown over a sweep, in the mean of logs."""
        merit = error.clamp(min=tolerance).log().mean(0)
        if self._merit is not None and not self._linear:
            good = (merit <= self._merit)[None, :, None]
            self._pairs = [(torch.where(good, s, 0), torch.where(good, e, 0)) for s, e in self._pairs]
        self._merit = merit

    def model(self, decay: Tensor) -> LowRank:
        """The transfers of all links, over their decay `(C, B, S)`."""
        basis = Basis(decay, len(self._pairs))
        if self._last is not None:
            size = torch.linalg.vector_norm(self._last[1], dim=-1)
            for change, image in self._pairs:
                basis.add(change, image, ROUNDING * torch.finfo(decay.dtype).eps * size)
        self._model = basis.over(decay)
        return self._model


def _size(values: Tensor) -> Tensor:
    size: Tensor = torch.linalg.vector_norm(values, dim=-1, keepdim=True)
    return size
