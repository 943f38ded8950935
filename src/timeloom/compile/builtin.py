"""GRU, LSTM and RNN for the compiler: their equations as graphs of vectors, of any size.

The equations are those of `timeloom.cells`, with masks of a dropout inside the recurrence (`timeloom.cells.masked`);
only what a step saves for its adjoint is decided here. Each has two forms:

    over u   the contribution of x is given, a vector `(n,)` for each gate
    over x   x `(depth,)` is projected within the step, and gradients of W_ih and of the biases are summed, too
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from timeloom.compile.derive import Formula, kept
from timeloom.compile.graph import Graph, Matrix, Place
from timeloom.compile.program import Fused, complete
from timeloom.compile.sums import Sums, sums_of
from timeloom.compile.tape import Taped, with_tape


@dataclass(frozen=True, eq=False)
class Builtin:
    """The compiled step of one of torch's cells.

    Weights, in the order of the normal form: `W_hh (gates, 1, n, n)`, its gates rotated by `turned` places; over x
    `W_ih (gates, 1, n, depth)` and the bias of every gate; then the cell's own vector
    (`timeloom.kernels.reference.units_of`).
    """

    fused: Fused
    taped: Taped
    sums: Sums
    turned: int


@dataclass(frozen=True)
class _Found:
    """The results of a cell's equations.

    next: the parts of the next state. tape: values saved for the adjoint; if none, the next state itself is enough.
    keeps: the decay of the last part, if that is not the derivative past all products.
    """

    next: tuple[Formula, ...]
    tape: tuple[Formula, ...]
    keeps: Formula | None = None


class _Terms:
    """The building blocks of a cell's equations."""

    def __init__(self, gates: int, turned: int, parts: int, n: int, depth: int | None, masked: bool) -> None:
        self.graph, self.n, self.masked = Graph(), n, masked
        self.state = [self._leaf("state", part, 0) for part in range(parts)]
        self.units = gates if depth else 0
        shown = self.state[0] * self._leaf("mask", 0) if masked else self.state[0]
        self._through_h = {(at - turned) % gates: self._product(shown, 0, at) for at in range(gates)}
        self._x = None if depth is None else Formula(self.graph, self.graph.add("input", detail=(0,), width=depth))

    def _leaf(self, op: str, *detail: int) -> Formula:
        return Formula(self.graph, self.graph.add(op, detail=detail, width=self.n))

    def _product(self, of: Formula, stack: int, at: int) -> Formula:
        return Formula(self.graph, self.graph.add("product", (of.index,), (stack, at), self.n))

    def from_h(self, gate: int) -> Formula:
        """The product `W_h h` of a gate."""
        return self._through_h[gate]

    def from_x(self, gate: int) -> Formula:
        """The contribution of x to a gate, including biases, except for the cell's own vector."""
        if self._x is None:
            return self._leaf("input", gate)
        return self._product(self._x, 1, gate) + self._leaf("unit", gate)

    def argument(self, gate: int) -> Formula:
        return self.from_x(gate) + self.from_h(gate)

    def own(self) -> Formula:
        """The cell's own per-unit vector, beside its weights."""
        self.units += 1
        return self._leaf("unit", self.units - 1)

    def zoned(self, part: int, following: Formula) -> Formula:
        """A part of the next state with zoneout: each unit keeps a share of its old value."""
        if not self.masked:
            return following
        return following + self._leaf("mask", 1 + part) * (self.state[part] - following)


def _gru(terms: _Terms) -> _Found:
    (h,) = terms.state
    reset, update = terms.argument(0).call("sigmoid"), terms.argument(1).call("sigmoid")
    inner = terms.from_h(2) + terms.own()
    candidate = (terms.from_x(2) + reset * inner).call("tanh")
    following = candidate + update * (h - candidate)
    return _Found((terms.zoned(0, following),), (reset, update, inner, candidate))


def _lstm(terms: _Terms) -> _Found:
    i, f, o = (terms.argument(gate).call("sigmoid") for gate in (0, 1, 3))
    g = terms.argument(2).call("tanh")
    c = f * terms.state[1] + i * g
    return _Found((terms.zoned(0, o * c.call("tanh")), terms.zoned(1, c)), (i, f, g, o))


def _rnn(terms: _Terms, nonlinearity: str) -> _Found:
    """An RNN, whose decay is the diagonal of its Jacobian: no gate carries a unit."""
    value, own = terms.argument(0).call(nonlinearity), terms.own()
    keeps = own * (1.0 - value * value) if nonlinearity == "tanh" else value.call("le", 0.0).call("select", 0.0, own)
    if not terms.masked:
        return _Found((value,), (), keeps)
    share = terms._leaf("mask", 1)
    return _Found((terms.zoned(0, value),), (value,), keeps + share * (1.0 - keeps))


EQUATIONS: dict[str, tuple[Callable[[_Terms], _Found], int, int, int]] = {
    "gru": (_gru, 3, 1, 1),
    "lstm": (_lstm, 4, 0, 2),
    "rnn_tanh": (lambda terms: _rnn(terms, "tanh"), 1, 0, 1),
    "rnn_relu": (lambda terms: _rnn(terms, "relu"), 1, 0, 1),
}
"""For each kind its equations, number of gates, rotation of the gates in the stack of W_hh, and parts of the state. The
GRU's candidate comes first: over x, the gradients d_M, d_r, d_z of one stack and d_r, d_z, d_n of the other are then
overlapping stretches of one vector."""


@lru_cache(maxsize=256)
def builtin(kind: str, n: int, depth: int | None, masked: bool) -> Builtin:
    """A cell of n units over x of width `depth`, or over u if that is None; with or without masks."""
    equations, gates, turned, parts = EQUATIONS[kind]
    terms = _Terms(gates, turned, parts, n, depth, masked)
    found, graph = equations(terms), terms.graph
    outputs = [Place(part, 0, n, value.index) for part, value in enumerate(found.next)]
    if found.keeps is None:
        shares = [place for place in kept(graph, outputs) if place.part == parts - 1]
    else:
        shares = [Place(parts - 1, 0, n, found.keeps.index)]
    recurrent = Matrix(gates, 1, n, n)
    matrices = [recurrent] if depth is None else [recurrent, Matrix(gates, 1, n, depth)]
    inputs = [n] * gates if depth is None else [depth]
    fused = complete((n,) * parts, graph, outputs, matrices, inputs, [n] * terms.units, shares, sums=depth is not None)
    tape = with_tape(fused, [value.index for value in found.tape], () if found.tape else outputs)
    return Builtin(fused, tape, sums_of(fused), turned)
