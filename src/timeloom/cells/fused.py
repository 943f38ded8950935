"""A compiled step as a cell: its derivatives follow from its normal form."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from timeloom.cells.base import Cell, jacobian_by_vjp, sum_outer
from timeloom.compile.graph import Place
from timeloom.compile.program import Fused, Program, evaluate, gathered

DENSE_UP_TO = 128
"""Units up to which a GPU computes outer products of all pairs of blocks faster than it reorders them by block."""
ROWS_SUMMED = 1024
"""Rows of each short sum that a block's gradient is made of."""


class FusedCell(Cell):
    """A step in its normal form over the contribution of x, `u` `(N, K)`: the input vectors side by side.

    Weights: the stacks of recurrent matrices, `(count, blocks, out, in)` each, then the per-unit vectors. Gate
    gradients: the vectors that the adjoint program writes out.
    """

    whole_state_out = True

    def __init__(self, fused: Fused, weights: tuple[Tensor, ...]) -> None:
        self.fused = fused
        self.weights = weights
        self.parts = fused.parts
        self.gate_width = fused.gate_width
        self.gated = bool(fused.forward.kept)

    @property
    def matrices(self) -> tuple[Tensor, ...]:
        return self.weights[: len(self.fused.matrices)]

    @property
    def units(self) -> tuple[Tensor, ...]:
        return self.weights[len(self.fused.matrices) :]

    def _run(
        self, program: Program, roots: Sequence[Place], state: Tensor, u: Tensor, grad: Tensor | None = None
    ) -> dict[int, Tensor]:
        leaves = {
            "state": state.split(self.parts, -1),
            "input": u.split(self.fused.inputs, -1),
            "unit": self.units,
            "grad": () if grad is None else grad.split(self.parts, -1),
        }
        return evaluate(program.graph, [place.value for place in roots], leaves, self.matrices)

    def _whole(self, places: Sequence[Place], values: dict[int, Tensor], like: Tensor) -> Tensor:
        parts = like.split(self.parts, -1)
        return torch.cat([gathered(places, number, values, part) for number, part in enumerate(parts)], -1)

    def step(self, state: Tensor, u: Tensor) -> Tensor:
        places = self.fused.forward.next
        return self._whole(places, self._run(self.fused.forward, places, state, u), state)

    def vjp(self, state: Tensor, u: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        program = self.fused.adjoint
        values = self._run(program, (*program.next, *program.written), state, u, grad)
        written = [values[place.value].expand(len(state), place.width) for place in program.written]
        gates = torch.cat(written, -1) if written else state.new_zeros(len(state), 0)
        return self._whole(program.next, values, grad), gates

    def decay(self, state: Tensor, u: Tensor) -> Tensor:
        places = self.fused.forward.kept
        return self._whole(places, self._run(self.fused.forward, places, state, u), state)

    def jacobian(self, state: Tensor, u: Tensor) -> Tensor:
        return jacobian_by_vjp(self, state, u)

    def diagonal(self, state: Tensor, u: Tensor) -> Tensor:
        if not self.fused.matrices and not self._sums:
            return self.decay(state, u)
        return super().diagonal(state, u)

    @property
    def _sums(self) -> bool:
        graph = self.fused.forward.graph
        return any(graph[i].op == "total" for i in graph.needed(self.fused.forward.roots))

    def input_grads(self, gate_grads: Tensor) -> Tensor:
        pieces = [
            gate_grads[..., at : at + width] for at, width in zip(self.fused.input_at, self.fused.inputs, strict=True)
        ]
        ends = [at + width for at, width in zip(self.fused.input_at, self.fused.inputs, strict=True)]
        if not pieces:
            return gate_grads[..., :0]
        if all(end == begin for end, begin in zip(ends, self.fused.input_at[1:], strict=False)):
            return gate_grads[..., self.fused.input_at[0] : ends[-1]]
        return torch.cat(pieces, -1)

    def weight_grads(self, previous: Sequence[Tensor], gate_grads: Tensor) -> tuple[Tensor, ...]:
        fused = self.fused
        by_matrix = [self._matrix_grads(number, previous, gate_grads) for number in range(len(fused.matrices))]
        ends = [at + width for at, width in zip(fused.unit_at, fused.units, strict=True) if at is not None]
        first = min((at for at in fused.unit_at if at is not None), default=0)
        summed = gate_grads[:, first : max(ends, default=first)].sum(0)  # all at once: they lie near each other
        by_unit = [
            torch.zeros_like(unit) if at is None else summed[at - first : at - first + width]
            for unit, at, width in zip(self.units, fused.unit_at, fused.units, strict=True)
        ]
        return (*by_matrix, *by_unit)

    def _matrix_grads(self, number: int, previous: Sequence[Tensor], gate_grads: Tensor) -> Tensor:
        """Gradient of a stack, `(count, blocks, out, in)`; products with adjacent gradients are computed together."""
        matrix, (part, offset) = self.fused.matrices[number], self.fused.operand_at[number]
        source = gate_grads if part is None else previous[part]
        operand = source[:, offset : offset + matrix.blocks * matrix.inputs]
        found = torch.zeros_like(self.weights[number])
        width, at = matrix.blocks * matrix.outputs, self.fused.product_at[number]
        runs = [0, *[i for i, (a, b) in enumerate(pairwise(at), 1) if a is None or b != a + width], len(at)]
        for first, last in pairwise(runs):
            begin = at[first]
            if begin is None:
                continue
            grads = gate_grads[:, begin : begin + (last - first) * width]
            if matrix.blocks == 1 or (grads.is_cuda and operand.shape[1] <= DENSE_UP_TO):
                outer = sum_outer(grads, operand).view(last - first, matrix.blocks, -1, matrix.blocks, matrix.inputs)
                found[first:last] = outer.diagonal(dim1=1, dim2=3).movedim(-1, 1)
                continue
            by_block = grads.unflatten(-1, (last - first, matrix.blocks, -1)).transpose(1, 2).flatten(2)
            outer = _outer_by_block(by_block, operand.unflatten(-1, (matrix.blocks, -1)))
            found[first:last] = outer.unflatten(1, (last - first, -1)).transpose(0, 1)
        return found


def _outer_by_block(grads: Tensor, values: Tensor) -> Tensor:
    """`Σ grads[i, b] ⊗ values[i, b]` for every block b: `(rows, blocks, out)` and `(rows, blocks, in)` to
    `(blocks, out, in)`.

    A sum of short sums, which a GPU computes in parallel: with one product per block it would run only as many products
    as there are blocks, and these are few.
    """
    rows, blocks = grads.shape[:2]
    pieces = max(1, rows // ROWS_SUMMED)
    whole = rows // pieces * pieces
    of_grads, of_values = (
        part[:whole].unflatten(0, (pieces, -1)).transpose(1, 2).flatten(0, 1) for part in (grads, values)
    )
    total: Tensor = torch.bmm(of_grads.transpose(1, 2), of_values).unflatten(0, (pieces, blocks)).sum(0)
    if whole < rows:
        total += torch.bmm(grads[whole:].permute(1, 2, 0), values[whole:].transpose(0, 1))
    return total
