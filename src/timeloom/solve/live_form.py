"""The normal form of a user's cell, computed from what the cell holds, and gradients back to that by autograd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from timeloom.cells.fused import FusedCell
from timeloom.compile.fuse import Compiled


class LiveForm(NamedTuple):
    """A compiled step. `like` has the precision of its sweeps."""

    compiled: Compiled
    like: Tensor

    def of(self, x: Tensor, bound: Sequence[Tensor]) -> tuple[FusedCell, Tensor]:
        """The cell in its normal form and its inputs `(T, B, K)`, on autograd's tape, from x `(T, B, ...)` and from the
        tensors that the step refers to, in the order of its bindings.
        """
        bindings = self.compiled.bindings
        held = dict(zip(bindings.paths, bound, strict=True)) | bindings.fixed
        weights, u = self.compiled.prepare_from(held, x.flatten(0, 1), self.like)
        return FusedCell(self.compiled.fused, weights), u.view(*x.shape[:2], -1)

    def on_tape(
        self, x: Any, bound: Sequence[Tensor], wanted: Sequence[bool]
    ) -> tuple[FusedCell, Tensor, list[Tensor | None]]:
        """The same on a tape of its own, and what is to be differentiated by: x and what the cell holds, None where it
        is not. `wanted` is of x, the initial state and what the cell holds.
        """
        given = [x.data, *(tensor.data for tensor in bound)]  # apart from all that came before
        asked = (wanted[0], *wanted[2:])
        with torch.enable_grad():
            leaves = [one.requires_grad_() if ask else None for one, ask in zip(given, asked, strict=True)]
            cell, u = self.of(given[0], given[1:])
        return cell, u, leaves


def through(
    cell: FusedCell, u: Tensor, leaves: Sequence[Tensor | None], at_initial: Tensor, inputs: Tensor,
    by_weight: Sequence[Tensor],
) -> list[Tensor | None]:  # fmt: skip
    """Gradients of x, of the initial state and of what the cell holds, from those of its normal form."""
    pairs = zip((u, *cell.weights), (inputs, *by_weight), strict=True)
    live = [(value, grad) for value, grad in pairs if value.requires_grad]
    asked = [leaf for leaf in leaves if leaf is not None]
    found: Sequence[Tensor | None] = [None] * len(asked)
    if live and asked:
        values, grads = zip(*live, strict=True)
        found = torch.autograd.grad(values, asked, grads, allow_unused=True)
    each = iter(found)
    at_x, *others = [None if leaf is None else next(each) for leaf in leaves]
    return [at_x, at_initial, *others]
