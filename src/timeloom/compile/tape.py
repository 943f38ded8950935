"""What a forward step leaves for the adjoint one, so that this need not compute it again.

Sums of rows and products with the state are never computed twice. All else is kept, or computed again from what is kept
and read anyway, whichever costs less: the cheapest cut between the leaves of the forward program and what the adjoint
needs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from timeloom.compile.cut import SINK, SOURCE, Network
from timeloom.compile.graph import LEAVES, Graph, Place, Value
from timeloom.compile.program import Fused, Program

KEPT = 3.0
"""What a number on the tape costs: written to memory that is new, and read. In readings of memory, as all of these."""
NUMBER_KEPT = 8.0
"""The same of one number a row."""
READ = {"input": 1.0, "state": 0.5, "unit": 0.1}
"""What it costs to read a number of a leaf; states are fetched for many cells anyway."""
DEAR = {
    "exp", "expm1", "log", "log1p", "sqrt", "rsqrt", "sigmoid", "softplus", "tanh", "sin", "cos", "atan", "erf", "pow",
}  # fmt: skip
COMPUTED = (0.05, 0.6)
"""What it costs to compute a number again, by a cheap function and by a dear one."""
MULTIPLIED = 0.05
"""The same of a term of a product with x, which is read anyway."""


@dataclass(frozen=True, eq=False)
class Taped:
    """A step that keeps a tape.

    forward: with `taped`, where the values go. adjoint: reads them as leaves, `tape (offset,)`.
    width: numbers that a row keeps of a step.
    """

    forward: Program
    adjoint: Program
    width: int


def taped(fused: Fused) -> Taped | None:
    """The step with a tape; None where there are no products or sums that the adjoint would compute again."""
    graph = fused.adjoint.graph
    values = _kept(fused)
    if not any(graph[i].op in ("product", "total") for i in graph.needed(values)):
        return None
    return with_tape(fused, sorted(values, key=lambda i: -graph[i].width))  # wide ones begin at a vector's bounds


def with_tape(fused: Fused, values: Sequence[int], after: Sequence[Place] = ()) -> Taped:
    """The step with these values on its tape, in this order. Those of `after`, which are whole parts of the next state,
    its adjoint reads from the states that are stored.
    """
    graph, places, offset = fused.adjoint.graph, [], 0
    leaves = {p.value: Value("after", (), (p.part, p.offset), p.width) for p in after}
    for index in values:
        width = graph[index].width or 1
        places.append(Place(0, offset, width, index))
        leaves[index] = Value("tape", (), (offset,), graph[index].width)
        offset += width
    return Taped(replace(fused.forward, taped=tuple(places)), _with_leaves(fused.adjoint, leaves), offset)


def _kept(fused: Fused) -> list[int]:
    """The values of the forward program to keep for the adjoint one. Of a value, `("made", i)` is on the sink's side
    where it is computed again, `("there", i)` where the adjoint has it one way or the other.
    """
    graph, network = fused.adjoint.graph, Network()
    forward = set(graph.needed([place.value for place in fused.forward.next]))
    adjoint = graph.needed(fused.adjoint.roots)
    for index in adjoint:
        value = graph[index]
        if index not in forward:
            for arg in value.args:
                if arg in forward:
                    network.connect(("there", arg), SINK, math.inf)
            continue
        if index in fused.adjoint.roots:
            network.connect(("there", index), SINK, math.inf)
        if value.op in LEAVES:
            network.connect(SOURCE, ("there", index), READ.get(value.op, 0.0) * (value.width or 1))
            continue
        network.connect(SOURCE, ("made", index), _again(graph, index))
        network.connect(("made", index), ("there", index), KEPT * value.width if value.width else NUMBER_KEPT)
        for arg in value.args:
            network.connect(("there", arg), ("made", index), math.inf)
    reached = network.source_side()
    return [i for i in adjoint if ("made", i) in reached and ("there", i) not in reached]


def _again(graph: Graph, index: int) -> float:
    """What it costs to compute a value again."""
    value = graph[index]
    if value.op == "product" and graph[value.args[0]].op == "input":
        return MULTIPLIED * graph[value.args[0]].width * value.width
    if value.op in ("product", "total"):
        return math.inf
    return COMPUTED[value.op in DEAR] * (value.width or NUMBER_KEPT)


def _with_leaves(program: Program, given: dict[int, Value]) -> Program:
    """The program with leaves in place of what is given."""
    found = Graph()
    new: dict[int, int] = {}

    def wanted(roots: list[int]) -> list[int]:
        reached, pending = set(), list(roots)
        while pending:
            index = pending.pop()
            if index not in reached:
                reached.add(index)
                pending.extend(() if index in given else program.graph[index].args)
        return sorted(reached)

    for index in wanted(program.roots):
        value = given.get(index, program.graph[index])
        new[index] = found.add(value.op, tuple(new[arg] for arg in value.args), value.detail, value.width)

    def moved(places: tuple[Place, ...]) -> tuple[Place, ...]:
        return tuple(replace(place, value=new[place.value]) for place in places)

    return replace(
        program, graph=found, next=moved(program.next), written=moved(program.written), kept=moved(program.kept)
    )
