"""The modified Blelloch scan over a gradient and transposed Jacobians."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from torch import Tensor

from timeloom.bppsa.matrices import Matrix, apply, apply_flops, compose, compose_flops
from timeloom.bppsa.ranks import Each, Value, alone

Phase = Literal["up", "middle", "down"]


@dataclass(frozen=True)
class Operation:
    """One product of the scan; products of one phase and level are independent, except in the middle."""

    phase: Phase
    level: int
    kind: Literal["matvec", "matmul"]
    flops: float
    """Floating-point operations per sample, on average."""


@dataclass
class ScanTrace:
    """All products that a scan computed, and those of plain back-propagation."""

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
    gradient: Tensor, jacobians: Sequence[Matrix], levels: int | None = None, each: Each = alone
) -> tuple[list[Tensor], ScanTrace]:
    """`[g, J₁g, J₂J₁g, …]` for the transposed Jacobians J₁, J₂, …, from the loss to the input; g is `(B, n)`.

    An exclusive scan over `g, J₁, J₂, …` with the product from the right, `a ⊙ b = b a`, in three parts.

    Up: neighbours are multiplied, `levels` times over. Middle: the roots are multiplied one by one; with all levels
    there is one root and nothing to do. Down: each node passes its prefix to its left child, and its prefix times the
    left child's product to the right one; compared with a scan of sums, the operands are thus swapped. Every prefix
    begins with g, so this part multiplies matrices with vectors only. The first node has no prefix: there is no
    identity to multiply with. Products that are never used are not computed.

    each: runs the products of a level, which do not depend on each other.
    """
    trace = ScanTrace(serial=[apply_flops(jacobian) for jacobian in jacobians])

    def times(matrix: Value, value: Value, phase: Phase, level: int) -> Callable[[], Value]:
        assert not isinstance(matrix, Tensor)
        if isinstance(value, Tensor):
            trace.operations.append(Operation(phase, level, "matvec", apply_flops(matrix)))
            return partial(apply, matrix, value)
        trace.operations.append(Operation(phase, level, "matmul", compose_flops(matrix, value)))
        return partial(compose, matrix, value)

    # Each level lists all its nodes but the last, whose product would never be used.
    tree: list[list[Value]] = [[gradient, *jacobians]]
    while tree[-1] and (levels is None or len(tree) <= levels):
        below, level = tree[-1], len(tree)
        tree.append(each([times(below[i + 1], below[i], "up", level) for i in range(0, len(below) - 1, 2)]))
    before: list[Value | None] = [None]
    for root in tree[-1]:
        before.append(root if before[-1] is None else times(root, before[-1], "middle", len(tree) - 1)())
    for level, below in reversed(list(enumerate(tree[:-1], start=1))):
        parents = [(below[2 * i], known) for i, known in enumerate(before) if 2 * i < len(below)]
        made = iter(each([times(left, known, "down", level) for left, known in parents if known is not None]))
        rights = iter([left if known is None else next(made) for left, known in parents])
        before = [child for i, known in enumerate(before) for child in _children(known, rights, 2 * i < len(below))]
    return [value for value in before if isinstance(value, Tensor)], trace


def _children(known: Value | None, rights: Iterator[Value], two: bool) -> list[Value | None]:
    """The prefix of the left child and, if there is one, of the right child."""
    return [known, next(rights)] if two else [known]
