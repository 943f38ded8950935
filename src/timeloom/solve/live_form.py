"""The normal form of a user's cell, computed from the tensors that the cell holds, and their gradients by autograd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from timeloom.cells.fused import FusedCell
from timeloom.compile.fuse import Compiled


class LiveForm(NamedTuple):
    """A compiled step, and a tensor `like` with the dtype of its sweeps."""

    compiled: Compiled
    like: Tensor

    def of(self, x: Tensor, bound: Sequence[Tensor]) -> tuple[FusedCell, Tensor]:
        """The cell in its normal form and its inputs `(T, B, K)`, on autograd's tape.

        x: `(T, B, ...)`. bound: the tensors that the step refers to, in the order of its bindings.
        """
        bindings = self.compiled.bindings
        held = dict(zip(bindings.paths, bound, strict=True)) | bindings.fixed
        weights, u = self.compiled.prepare_from(held, x.flatten(0, 1), self.like)
        return FusedCell(self.compiled.fused, weights), u.view(*x.shape[:2], -1)

    def on_tape(
        self, x: Any, bound: Sequence[Tensor], wanted: Sequence[bool]
    ) -> tuple[FusedCell, Tensor, list[Tensor | None]]:
        """The same on a new tape, and its leaves: x and the bound tensors, None for those that need no gradient.

        wanted: whether x, the initial state and each of the bound tensors need a gradient.
        """
        given = [x.data, *(tensor.data for tensor in bound)]  # without their history on any other tape
        asked = (wanted[0], *wanted[2:])
        with torch.enable_grad():
            leaves = [one.requires_grad_() if ask else None for one, ask in zip(given, asked, strict=True)]
            cell, u = self.of(given[0], given[1:])
        return cell, u, leaves


def through(
    cell: FusedCell, u: Tensor, leaves: Sequence[Tensor | None], at_initial: Tensor, inputs: Tensor,
    by_weight: Sequence[Tensor],
) -> list[Tensor | None]:  # fmt: skip
    """Gradients of x, the initial state and the tensors that the cell holds, from the gradients of its normal form."""
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
