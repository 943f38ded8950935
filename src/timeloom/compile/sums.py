"""Gradients of a compiled step's weights: sums over all rows and steps that an adjoint sweep can accumulate."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from timeloom.compile.program import Fused


@dataclass(frozen=True)
class Sum:
    """One sum over rows and steps, `(depth, width)`: of the outer products of an operand with columns of what the
    adjoint writes, or, without an operand, of the columns alone; depth is then 1.

    operand: part and offset of the state before the step, or None and an offset in what is written.
    column, width: the columns. at: offset of this sum among all sums.
    """

    operand: tuple[int | None, int] | None
    depth: int
    column: int
    width: int
    at: int


@dataclass(frozen=True)
class Sums:
    """All sums of a step: for each stack of matrices, and for the per-unit vectors.

    Those of a stack are tuples (first, last, block, sum), for one block of the matrices `first … last − 1`.
    """

    of_stacks: tuple[tuple[tuple[int, int, int, Sum], ...], ...]
    of_units: tuple[Sum, ...]
    size: int

    @property
    def all(self) -> list[Sum]:
        return [*[found for stack in self.of_stacks for *_, found in stack], *self.of_units]


def sums_of(fused: Fused) -> Sums:
    """The sums of a step. Products whose gradients lie side by side are summed together, and so are vectors."""
    size = 0

    def add(operand: tuple[int | None, int] | None, depth: int, column: int, width: int) -> Sum:
        nonlocal size
        found = Sum(operand, depth, column, width, size)
        size += depth * width
        return found

    stacks = []
    for matrix, offsets, (part, offset) in zip(fused.matrices, fused.product_at, fused.operand_at, strict=True):
        found = []
        width = matrix.outputs * matrix.blocks
        apart = matrix.blocks > 1
        edges = [
            0, *[i for i, (a, b) in enumerate(pairwise(offsets), 1) if apart or a is None or b != a + width],
            len(offsets),
        ]  # fmt: skip
        for first, last in pairwise(edges):
            column = offsets[first]
            if column is None:
                continue
            for block in range(matrix.blocks):
                operand = (part, offset + block * matrix.inputs)
                columns = (last - first) * matrix.outputs
                found.append(
                    (first, last, block, add(operand, matrix.inputs, column + block * matrix.outputs, columns))
                )
        stacks.append(tuple(found))
    stretches: list[tuple[int, int]] = []
    places = zip(fused.unit_at, fused.units, strict=True)
    for begin, end in sorted({(at, at + width) for at, width in places if at is not None}):
        if stretches and begin <= stretches[-1][1]:
            stretches[-1] = (stretches[-1][0], max(end, stretches[-1][1]))
        else:
            stretches.append((begin, end))
    units = tuple(add(None, 1, begin, end - begin) for begin, end in stretches)
    return Sums(tuple(stacks), units, size)


def weight_grads(fused: Fused, sums: Sums, found: Tensor) -> tuple[Tensor, ...]:
    """Gradients of the stacks of matrices, then of the per-unit vectors, from the sums `(size,)` of `sums`."""
    matrices = [grad.contiguous() for grad in matrix_grads(fused, sums, found)]
    return (*matrices, *[grad.clone() for grad in unit_grads(fused, sums, found)])


def matrix_grads(fused: Fused, sums: Sums, found: Tensor) -> list[Tensor]:
    """Gradients of the stacks, `(count, blocks, out, in)` each; views of the sums, if a stack is one of them."""
    grads = []
    for matrix, stack in zip(fused.matrices, sums.of_stacks, strict=True):
        pieces = [
            found[one.at : one.at + one.depth * one.width]
            .view(one.depth, last - first, matrix.outputs)
            .permute(1, 2, 0)
            for first, last, _, one in stack
        ]
        if len(pieces) == 1 and len(pieces[0]) == matrix.count:
            grads.append(pieces[0].unsqueeze(1))
            continue
        grad = found.new_zeros(matrix.shape)
        for (first, last, block, _), piece in zip(stack, pieces, strict=True):
            grad[first:last, block] = piece
        grads.append(grad)
    return grads


def unit_grads(fused: Fused, sums: Sums, found: Tensor) -> list[Tensor]:
    """Gradients of the per-unit vectors; views of the sums, which may be the same for several."""
    grads = []
    for at, width in zip(fused.unit_at, fused.units, strict=True):
        if at is None:
            grads.append(found.new_zeros(width))
            continue
        one = next(s for s in sums.of_units if s.column <= at < s.column + s.width)
        begin = one.at + at - one.column
        grads.append(found[begin : begin + width])
    return grads
