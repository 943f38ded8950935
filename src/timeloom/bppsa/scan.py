"""The modified Blelloch scan over a gradient and transposed Jacobians."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from timeloom.bppsa.matrices import Matrix, apply, apply_flops, compose, compose_flops

Phase = Literal["up", "middle", "down"]
Value = Tensor | Matrix


@dataclass(frozen=True)
class Operation:
    """One product of the scan. Those of one phase and level do not depend on each other, except in the middle."""

    phase: Phase
    level: int
    kind: Literal["matvec", "matmul"]
    flops: float
    """For one of the batch, on average."""


@dataclass
class ScanTrace:
    """All products that a scan made, and those that plain back-propagation would have made."""

    operations: list[Operation] = field(default_factory=list)
    serial: list[float] = field(default_factory=list)
    """Floating-point operations of each matrix-vector product of back-propagation over the same Jacobians."""

    @property
    def total_flops(self) -> float:
        return sum(operation.flops for operation in self.operations)

    @property
    def serial_flops(self) -> float:
        return sum(self.serial)

    def steps(self) -> list[tuple[Phase, int, float]]:
        """The critical path: `(phase, level, flops)` of the largest product of each level, one by one in the middle."""
        path: list[tuple[Phase, int, float]] = []
        for operation in self.operations:
            here = operation.phase, operation.level
            if operation.phase != "middle" and path and path[-1][:2] == here:
                path[-1] = (*here, max(path[-1][2], operation.flops))
            else:
                path.append((*here, operation.flops))
        return path

    @property
    def critical_flops(self) -> float:
        return sum(flops for _, _, flops in self.steps())


def scan_backward(
    gradient: Tensor, jacobians: Sequence[Matrix], levels: int | None = None
) -> tuple[list[Tensor], ScanTrace]:
    """`[g, J₁g, J₂J₁g, …]` for the transposed Jacobians J₁, J₂, …, from the loss to the input; g is `(B, n)`.

    An exclusive scan over `g, J₁, J₂, …` with the product from the right, `a ⊙ b = b a`, in three parts.

    Up: neighbours are multiplied, `levels` times over. Middle: the roots are carried on one by one; with all levels
    there is one root and nothing to do. Down: each node hands what comes before it to its left child, and that times
    the left child's product to the right one; the operands are thus swapped against a sum's scan. All that comes
    before a node begins with g, so this part multiplies matrices with vectors only. Nothing comes before the
    first node: there is no identity to multiply with. Products that nobody will ask for are not made.
    """
    trace = ScanTrace(serial=[apply_flops(jacobian) for jacobian in jacobians])

    def times(matrix: Value, value: Value, phase: Phase, level: int) -> Value:
        assert not isinstance(matrix, Tensor)
        if isinstance(value, Tensor):
            trace.operations.append(Operation(phase, level, "matvec", apply_flops(matrix)))
            return apply(matrix, value)
        trace.operations.append(Operation(phase, level, "matmul", compose_flops(matrix, value)))
        return compose(matrix, value)

    # Each level lists all its nodes but the last, of which the product would never be used.
    tree: list[list[Value]] = [[gradient, *jacobians]]
    while tree[-1] and (levels is None or len(tree) <= levels):
        below = tree[-1]
        tree.append([times(below[i + 1], below[i], "up", len(tree)) for i in range(0, len(below) - 1, 2)])
    before: list[Value | None] = [None]
    for root in tree[-1]:
        before.append(root if before[-1] is None else times(root, before[-1], "middle", len(tree) - 1))
    for level, below in reversed(list(enumerate(tree[:-1], start=1))):
        children: list[Value | None] = []
        for parent, known in enumerate(before):
            children.append(known)
            if 2 * parent < len(below):
                left = below[2 * parent]
                children.append(left if known is None else times(left, known, "down", level))
        before = children
    return [value for value in before if isinstance(value, Tensor)], trace
