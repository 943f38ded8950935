"""A step as a graph of vectors: traces are lowered to it, derivatives are taken on it, and kernels are made from it.

A value is one vector for each row, `width` units wide; width 0 is one number per row, which broadcasts. Leaves:

    state    (part, offset)  a stretch of a part of the state before the step
    grad     (part, offset)  the same of the gradient that an adjoint step receives
    input    (index,)        the contribution of x to the step, computed for all of time beforehand
    mask     (index,)        a dropout's factors, which come with x and have no gradient
    unit     (index,)        one number for each unit, the same for all rows and steps: a bias, a norm's scale
    tape     (offset,)       what the forward step has saved for the adjoint one (see `timeloom.compile.tape`)
    after    (part, offset)  a stretch of the state after the step, which an adjoint step reads where it is stored
    number   (value,)        a constant

Other values: pointwise functions (`timeloom.compile.pointwise`) of values of one width; `product (matrix, index)`,
which multiplies its argument by matrix `index` of a stack of matrices that share it; `pull (matrix,)`, the sum over a
stack of its transposed matrices times one argument each; and `total (width,)`, the sum of a row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import permutations

from timeloom.compile.pointwise import FUNCTIONS

LEAVES = ("state", "grad", "input", "mask", "unit", "tape", "after", "number")


@dataclass(frozen=True)
class Value:
    """One vector for each row: `op` of `args`, which are indices into the graph's values."""

    op: str
    args: tuple[int, ...] = ()
    detail: tuple[float | int, ...] = ()
    width: int = 0


@dataclass(frozen=True)
class Matrix:
    """A stack of `count` matrices `(blocks, out, in)` that multiply one vector: a tensor `(count, blocks, out, in)`.

    With several blocks, block b of the result depends only on block b of the argument.
    """

    count: int
    blocks: int
    outputs: int
    inputs: int

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.count, self.blocks, self.outputs, self.inputs

    @property
    def transposed(self) -> Matrix:
        return Matrix(self.count, self.blocks, self.inputs, self.outputs)


@dataclass(frozen=True)
class Place:
    """Where a value goes: units `offset … offset + width` of a part of the state, or of its gradient."""

    part: int
    offset: int
    width: int
    value: int


@dataclass
class Graph:
    """Values in topological order; equal values are stored once."""

    values: list[Value] = field(default_factory=list)
    _known: dict[Value, int] = field(default_factory=dict)

    def __getitem__(self, index: int) -> Value:
        return self.values[index]

    def add(self, op: str, args: tuple[int, ...] = (), detail: tuple[float | int, ...] = (), width: int = 0) -> int:
        """Add a value without simplifying it; returns its index."""
        value = Value(op, args, detail, width)
        if value not in self._known:
            self._known[value] = len(self.values)
            self.values.append(value)
        return self._known[value]

    def number(self, value: float) -> int:
        return self.add("number", detail=(float(value) + 0.0,))  # −0 becomes 0: they are equal, and would be merged

    def total(self, value: int, width: int) -> int:
        """The sum of a row of this width, one number per row."""
        if self[value].width == 0:
            return self.apply("mul", value, self.number(width))
        return self.add("total", (value,), (width,))

    def apply(self, op: str, *args: int) -> int:
        """A pointwise function of values of one width, simplified as far as that does not change its value."""
        folded = self._fold(op, args)
        if folded is not None:
            return folded
        widths = {self[arg].width for arg in args} - {0}
        if len(widths) > 1:
            raise ValueError(f"{op} of vectors of {sorted(widths)} units")
        return self.add(op, args, width=widths.pop() if widths else 0)

    def _number(self, index: int) -> float | None:
        value = self[index]
        return float(value.detail[0]) if value.op == "number" else None

    def _fold(self, op: str, args: tuple[int, ...]) -> int | None:
        """A result that needs no computation: constants, additions of 0, products with 1.

        A product with 0 counts as 0, which only occurs in derivatives.
        """
        known = [self._number(arg) for arg in args]
        if all(number is not None for number in known):
            return self.number(FUNCTIONS[op].of(*known))
        if op == "select" and known[0] is not None:
            return args[1] if known[0] else args[2]
        if op == "select" and args[1] == args[2]:
            return args[1]
        if op in ("add", "sub", "mul", "div"):
            folded = self._fold_arithmetic(op, args, known)
            if folded is None and op in ("add", "sub"):
                folded = self._by_complement(op, *args)
            if folded is None and op in ("add", "mul") and args[0] > args[1]:  # one order, so that equal values merge
                folded = self.add(op, args[::-1], width=max(self[arg].width for arg in args))
            return folded
        if op == "neg" and self[args[0]].op == "neg":
            return self[args[0]].args[0]
        return None

    def _fold_arithmetic(self, op: str, args: tuple[int, ...], known: list[float | None]) -> int | None:
        (left, right), (a, b) = args, known
        if op in ("add", "sub") and b == 0:
            return left
        if op == "add" and a == 0:
            return right
        if op == "sub" and a == 0:
            return self.apply("neg", right)
        if (op == "mul" and (a == 0 or b == 0)) or (op == "div" and a == 0):
            return self.number(0)
        if op in ("mul", "div") and b == 1:
            return left
        one, other = self[left], self[right]
        if op in ("add", "sub") and other.op == "neg":
            return self.apply("sub" if op == "add" else "add", left, other.args[0])
        if op == "add" and one.op == "neg":
            return self.apply("sub", right, one.args[0])
        if op == "add" and one.op == other.op == "total" and self[one.args[0]].width == self[other.args[0]].width:
            return self.total(self.apply("add", one.args[0], other.args[0]), int(one.detail[0]))  # one sum, not two
        if op == "mul" and a == 1:
            return right
        if op == "mul" and (a == -1 or b == -1):
            return self.apply("neg", right if a == -1 else left)
        return None

    def _by_complement(self, op: str, left: int, right: int) -> int | None:
        """Sums written with the complement 1 − z of a gate z, which keeps its digits where z is near one.

        The derivative of z uses it anyway.

            d − z d = d (1 − z)        a + z (1 − a) = z + a (1 − z)
        """
        for whole, product in permutations((left, right)) if op == "add" else [(left, right)]:
            for gate, other in permutations(self[product].args if self[product].op == "mul" else (), 2):
                if self[gate].op != "sigmoid":
                    continue
                if op == "sub" and other == whole:
                    return self.apply("mul", whole, self._complement(gate))
                complement = self[other].op == "sub" and self._number(self[other].args[0]) == 1
                if op == "add" and complement and self[other].args[1] == whole and self[whole].op != "sigmoid":
                    return self.apply("add", gate, self.apply("mul", whole, self._complement(gate)))
        return None

    def _complement(self, index: int) -> int:
        return self.apply("sub", self.number(1), index)

    def needed(self, roots: list[int]) -> list[int]:
        """Indices of all values that the roots depend on, in order."""
        wanted, stack = set(), list(roots)
        while stack:
            index = stack.pop()
            if index not in wanted:
                wanted.add(index)
                stack.extend(self[index].args)
        return sorted(wanted)
