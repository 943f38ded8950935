"""A network's layer in torch and in timeloom, and episodes that begin inside a batch."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import timeloom as tl
from benchmarks.fuzz.networks import LayerNormGRU, LiGRU

MOST_KNOWN = 8
"""Number of batches whose episodes are remembered."""
OWN_CELLS: dict[str, type[nn.Module]] = {"LayerNormGRU": LayerNormGRU, "LiGRU": LiGRU}
"""Cells for which torch has no layer."""


class Unrolled(nn.Module):
    """A user's cell over a sequence: by `timeloom.unroll`, or by a plain loop over its steps."""

    def __init__(self, cell: nn.Module, units: int, solver: Any = "auto", loop: bool = False) -> None:
        super().__init__()
        self.cell, self.units, self.solver, self.loop = cell, units, solver, loop
        self.reports: list[tl.SolveReport] = []

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """x `(T, B, D)` to states `(T, B, n)`."""
        h = x.new_zeros(x.shape[1], self.units)
        if self.loop:
            states = []
            for step in x.unbind(0):
                h = self.cell(h, step)
                states.append(h)
            return torch.stack(states), None
        y, report = tl.unroll(self.cell, h, x, self.solver)
        self.reports = [report]
        return y, None  # type: ignore[return-value]


def own_layer(layer: str, inputs: int, units: int, solver: Any = "auto") -> nn.Module:
    """The layer as timeloom runs it."""
    if layer in OWN_CELLS:
        return Unrolled(OWN_CELLS[layer](inputs, units), units, solver)
    made: nn.Module = getattr(tl, layer)(inputs, units, solver=solver)
    return made


def torch_layer(layer: str, inputs: int, units: int) -> nn.Module:
    """Torch's own layer, or the plain loop if there is none."""
    if layer in OWN_CELLS:
        return Unrolled(OWN_CELLS[layer](inputs, units), units, loop=True)
    made: nn.Module = getattr(nn, layer)(inputs, units)
    return made


def outputs(module: nn.Module, x: Tensor, resets: Tensor | None = None) -> Tensor:
    """A layer's outputs `(T, B, n)` for x `(T, B, D)`. Torch's layers have no resets: episodes are packed for them."""
    if resets is None:
        y: Tensor = module(x)[0]
    elif isinstance(module, tl.GRU | tl.LSTM | tl.RNN):
        y = module(x, resets=resets)[0]
    else:
        y = Episodes.of(resets)(module, x)
    return y


class Episodes:
    """Episodes inside a batch as a packed batch: the fast way for a layer without resets."""

    _known: ClassVar[list[tuple[Tensor, Episodes]]] = []
    """Episodes of the last resets, enough for all batches of a training."""

    def __init__(self, resets: Tensor) -> None:
        steps, batch = resets.shape
        begins = resets.t().cpu().clone()
        begins[:, 0] = True
        at = begins.flatten().nonzero().flatten()
        lengths = torch.diff(at, append=torch.tensor([steps * batch]))
        places = torch.arange(steps * batch).view(batch, steps)  # of time step t of sequence b in (T, B): t B + b
        places = (places % steps) * batch + places // steps
        packed = pack_sequence(list(places.flatten().split(lengths.tolist())), enforce_sorted=False)
        self._index, self._sizes = packed.data.to(resets.device), packed.batch_sizes
        self._orders = tuple(None if order is None else order.to(resets.device) for order in packed[2:])

    @classmethod
    def of(cls, resets: Tensor) -> Episodes:
        """The episodes of these resets, cached so that finding them is not part of a timed call."""
        found = next((episodes for known, episodes in cls._known if known is resets), None)
        if found is None:
            found = cls(resets)
            cls._known = [*cls._known[-MOST_KNOWN:], (resets, found)]
        return found

    def __call__(self, module: nn.Module, x: Tensor) -> Tensor:
        """`module` over x `(T, B, D)`: `(T, B, n)`."""
        packed = PackedSequence(x.flatten(0, 1)[self._index], self._sizes, *self._orders)
        found: Tensor = module(packed)[0].data
        return torch.empty_like(found).index_copy(0, self._index, found).view(*x.shape[:2], -1)
