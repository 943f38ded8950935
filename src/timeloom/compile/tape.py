"""What a forward step saves for the adjoint step, so that this need not recompute it.

Sums over rows and products with the state are never recomputed. All else is saved, or recomputed from what is saved and
read anyway, whichever costs less: a minimum cut between the leaves of the forward program and what the adjoint needs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from timeloom.compile.cut import SINK, SOURCE, Network
from timeloom.compile.graph import LEAVES, Graph, Place, Value
from timeloom.compile.program import Fused, Program

KEPT = 3.0
"""Cost of a number on the tape, written to new memory and read; in units of one memory read, like all these costs."""
NUMBER_KEPT = 8.0
"""The same for one number per row."""
READ = {"input": 1.0, "state": 0.5, "unit": 0.1}
"""Cost of reading a number of a leaf; states are read for many cells anyway."""
DEAR = {
    "exp", "expm1", "log", "log1p", "sqrt", "rsqrt", "sigmoid", "softplus", "tanh", "sin", "cos", "atan", "erf", "pow",
}  # fmt: skip
COMPUTED = (0.05, 0.6)
"""Cost of recomputing a number, by a cheap function and by an expensive one."""
MULTIPLIED = 0.05
"""Cost of recomputing a term of a product with x, which is read anyway."""


@dataclass(frozen=True, eq=False)
class Taped:
    """A step with a tape.

    forward: with `taped`, the places of the saved values. adjoint: reads them as leaves, `tape (offset,)`.
    width: numbers saved per row and step.
    """

    forward: Program
    adjoint: Program
    width: int


def taped(fused: Fused) -> Taped | None:
    """The step with a tape; None if there are no products or sums that the adjoint would have to recompute."""
    graph = fused.adjoint.graph
    values = _kept(fused)
    if not any(graph[i].op in ("product", "total") for i in graph.needed(values)):
        return None
    return with_tape(fused, sorted(values, key=lambda i: -graph[i].width))  # wide ones first: aligned to vectors


def with_tape(fused: Fused, values: Sequence[int], after: Sequence[Place] = ()) -> Taped:
    """The step with these values on its tape, in this order.

    after: whole parts of the next state, which the adjoint reads from the stored states.
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
    """The values of the forward program to save for the adjoint one.

    In the network, `("made", i)` is on the sink's side of the cut if value i is recomputed, `("there", i)` if the
    adjoint has it one way or the other.
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
    """The cost of recomputing a value."""
    value = graph[index]
    if value.op == "product" and graph[value.args[0]].op == "input":
        return MULTIPLIED * graph[value.args[0]].width * value.width
    if value.op in ("product", "total"):
        return math.inf
    return COMPUTED[value.op in DEAR] * (value.width or NUMBER_KEPT)


def _with_leaves(program: Program, given: dict[int, Value]) -> Program:
    """The program with the given leaves in place of values."""
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
