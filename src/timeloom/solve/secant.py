"""Transfers learned from the sweeps themselves, by how ends changed with their starts; costs no extra steps."""

from __future__ import annotations

import torch
from torch import Tensor

from timeloom.solve.lowrank import Basis, LowRank

MOST_PAIRS = 8
"""Number of last sweeps whose pairs are kept."""
LARGE = 0.5
"""Relative size of a change beyond which it says nothing about small ones: no network is linear that far."""
ROUNDING = 16
"""Multiple of eps from which a change determines its image to a few percent; the image of a smaller one is noise."""


class Secants:
    """Pairs (change of start, change of end) of every link, newest first, over the last sweeps.

    On the span of the changes the model maps as the link did, across it by the decay. Pairs that predicted the newest
    one worse than the decay alone come from another regime of the network and are dropped, link by link. If corrections
    made a whole sequence worse, all of its pairs are dropped. In a linear chain, as of gradients, all pairs stay valid.
    """

    def __init__(self, linear: bool = False) -> None:
        self._linear = linear
        self._pairs: list[tuple[Tensor, Tensor]] = []
        self._last: tuple[Tensor, Tensor] | None = None
        self._model: LowRank | None = None
        self._merit: Tensor | None = None

    def note(self, starts: Tensor, ends: Tensor, decay: Tensor) -> None:
        """Update from a sweep: all starts and ends `(C, B, S)` after it; links that were not swept have not changed."""
        if self._last is not None:
            change, image = starts - self._last[0], ends - self._last[1]
            if self._model is not None and not self._linear:
                by_model, by_decay = (_size(image - guess) for guess in (self._model.apply(change), decay * change))
                good = by_model <= by_decay
                self._pairs = [(torch.where(good, s, 0), torch.where(good, e, 0)) for s, e in self._pairs]
            if not self._linear:
                # Curvature puts a secant off by about `bends`: if the decay predicts the image to that, it is enough.
                moved = _size(change)
                bends = moved.square() / _size(starts).clamp(min=torch.finfo(moved.dtype).tiny)
                telling = (moved <= LARGE * _size(starts)) & (_size(image - decay * change) > bends)
                change, image = torch.where(telling, change, 0), torch.where(telling, image, 0)
            self._pairs = [(change, image), *self._pairs[: MOST_PAIRS - 1]]
        self._last = (starts.clone(), ends.clone())

    def doubt(self, error: Tensor, tolerance: float) -> None:
        """Drop the pairs of sequences whose relative jumps `(C, B)` grew over a sweep, in the mean of logarithms."""
        merit = error.clamp(min=tolerance).log().mean(0)
        if self._merit is not None and not self._linear:
            good = (merit <= self._merit)[None, :, None]
            self._pairs = [(torch.where(good, s, 0), torch.where(good, e, 0)) for s, e in self._pairs]
        self._merit = merit

    def model(self, decay: Tensor) -> LowRank:
        """The transfers of all links: secants on top of the decay `(C, B, S)`."""
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
