"""Derivatives of a step, by reverse mode on its graph: the adjoint step, and the decay of each unit."""

from __future__ import annotations

import math
from collections.abc import Callable

from timeloom.compile.graph import Graph, Place


class Formula:
    """A value of a graph, with operators to write formulas."""

    def __init__(self, graph: Graph, index: int) -> None:
        self.graph, self.index = graph, index

    def _of(self, op: str, *others: Formula | float) -> Formula:
        args = [o.index if isinstance(o, Formula) else self.graph.number(o) for o in others]
        return Formula(self.graph, self.graph.apply(op, *args))

    def __add__(self, other: Formula | float) -> Formula:
        return self._of("add", self, other)

    def __sub__(self, other: Formula | float) -> Formula:
        return self._of("sub", self, other)

    def __rsub__(self, other: float) -> Formula:
        return self._of("sub", other, self)

    def __mul__(self, other: Formula | float) -> Formula:
        return self._of("mul", self, other)

    __rmul__ = __mul__

    def __truediv__(self, other: Formula | float) -> Formula:
        return self._of("div", self, other)

    def __neg__(self) -> Formula:
        return self._of("neg", self)

    def call(self, op: str, *others: Formula | float) -> Formula:
        return self._of(op, self, *others)


Slopes = Callable[[list[Formula], Formula, Formula], list[Formula | None]]
"""From arguments a, result y and its gradient d to the gradients of the arguments."""


def _share(a: Formula, b: Formula, d: Formula, more: str) -> Formula:
    """The gradient of argument a of a maximum (or minimum): all of d, half where a and b are equal, or none."""
    return d * a.call(more, b).call("select", 1.0, 0.5 * a.call("eq", b))


_SLOPES: dict[str, Slopes] = {
    "add": lambda a, y, d: [d, d],
    "sub": lambda a, y, d: [d, -d],
    "mul": lambda a, y, d: [d * a[1], d * a[0]],
    "div": lambda a, y, d: [d / a[1], -(d / a[1] * y)],
    "neg": lambda a, y, d: [-d],
    "max": lambda a, y, d: [_share(a[0], a[1], d, "gt"), _share(a[1], a[0], d, "gt")],
    "min": lambda a, y, d: [_share(a[0], a[1], d, "lt"), _share(a[1], a[0], d, "lt")],
    "pow": lambda a, y, d: [d * (a[1] * a[0].call("pow", a[1] - 1.0)), None],
    "select": lambda a, y, d: [None, a[0].call("select", d, 0.0), a[0].call("select", 0.0, d)],
    "relu": lambda a, y, d: [y.call("le", 0.0).call("select", 0.0, d)],
    "abs": lambda a, y, d: [d * a[0].call("sign")],
    "exp": lambda a, y, d: [d * y],
    "expm1": lambda a, y, d: [d * (y + 1.0)],
    "log": lambda a, y, d: [d / a[0]],
    "log1p": lambda a, y, d: [d / (a[0] + 1.0)],
    "sqrt": lambda a, y, d: [0.5 * d / y],
    "rsqrt": lambda a, y, d: [-0.5 * d * (y * y * y)],
    "reciprocal": lambda a, y, d: [-(d * (y * y))],
    "sigmoid": lambda a, y, d: [d * (y * (1.0 - y))],
    "softplus": lambda a, y, d: [d * a[0].call("sigmoid")],
    "tanh": lambda a, y, d: [d * (1.0 - y * y)],
    "sin": lambda a, y, d: [d * a[0].call("cos")],
    "cos": lambda a, y, d: [-(d * a[0].call("sin"))],
    "atan": lambda a, y, d: [d / (a[0] * a[0] + 1.0)],
    "erf": lambda a, y, d: [d * (2 / math.sqrt(math.pi) * (-(a[0] * a[0])).call("exp"))],
}
"""Functions that are missing have no gradient: comparisons, sign, floor."""


class _Reverse:
    """Gradients with respect to the values of a graph, from the last to the first."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.last = len(graph.values) - 1
        self.of: dict[int, int] = {}

    def add(self, index: int, grad: int, width: int) -> None:
        """Add a gradient that comes from a value of this width."""
        value = self.graph[index]
        if value.op == "number":
            return
        if value.width == 0 and width:  # one number was used by all units
            grad = self.graph.total(grad, width)
        self.of[index] = self.graph.apply("add", self.of[index], grad) if index in self.of else grad

    def through(self, index: int) -> None:
        """Propagate the gradient of a pointwise value to its arguments."""
        value, graph = self.graph[index], self.graph
        if index not in self.of or value.op not in _SLOPES:
            return
        args = [Formula(graph, arg) for arg in value.args]
        slopes = _SLOPES[value.op](args, Formula(graph, index), Formula(graph, self.of[index]))
        for arg, slope in zip(value.args, slopes, strict=True):
            if slope is not None:
                self.add(arg, slope.index, value.width)


class Adjoint:
    """A step's vjp, as values of the same graph.

    by_state: gradients of all stretches of the state before the step that the step reads.
    by_input, by_unit: gradients of the inputs and of the per-unit vectors.
    by_product: gradients of the products, by (matrix, index).
    """

    def __init__(self, graph: Graph, outputs: list[Place]) -> None:
        back = _Reverse(graph)
        consumers: dict[int, dict[int, dict[int, int]]] = {}
        self.by_state: list[Place] = []
        self.by_input: dict[int, int] = {}
        self.by_unit: dict[int, int] = {}
        self.by_product: dict[tuple[int, int], int] = {}
        for place in outputs:
            grad = graph.add("grad", detail=(place.part, place.offset), width=place.width)
            back.add(place.value, grad, place.width)
        for index in range(back.last, -1, -1):
            value = graph[index]
            for matrix, grads in consumers.pop(index, {}).items():
                count = max(grads) + 1
                args = tuple(grads.get(i, graph.number(0)) for i in range(count))
                back.add(index, graph.add("pull", args, (matrix,), value.width), value.width)
            if index not in back.of:
                continue
            grad = back.of[index]
            if value.op == "state":
                part, offset = map(int, value.detail)
                self.by_state.append(Place(part, offset, value.width, grad))
            elif value.op == "input":
                self.by_input[int(value.detail[0])] = grad
            elif value.op == "unit":
                self.by_unit[int(value.detail[0])] = grad
            elif value.op == "product":
                matrix, number = map(int, value.detail)
                self.by_product[matrix, number] = grad
                consumers.setdefault(value.args[0], {}).setdefault(matrix, {})[number] = grad
            elif value.op == "total":
                back.add(value.args[0], grad, graph[value.args[0]].width)
            else:
                back.through(index)


def kept(graph: Graph, outputs: list[Place]) -> list[Place]:
    """The decay of each unit over a step: the derivative of its next state by its state, past all products and sums.

    Parts in which no unit keeps anything have no place.
    """
    shares = []
    for place in outputs:
        back = _Reverse(graph)
        own = graph.add("state", detail=(place.part, place.offset), width=place.width)
        back.add(place.value, graph.number(1), place.width)
        for index in range(back.last, -1, -1):
            if graph[index].op not in ("product", "pull", "total"):
                back.through(index)
        shares.append(back.of.get(own, graph.number(0)))
    keeping = {place.part for place, share in zip(outputs, shares, strict=True) if share != graph.number(0)}
    return [
        Place(place.part, place.offset, place.width, share)
        for place, share in zip(outputs, shares, strict=True)
        if place.part in keeping
    ]
