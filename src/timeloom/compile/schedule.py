"""The schedule of a program: loops over units, each of which needs complete vectors from earlier loops.

A loop runs over the units of one width. For each unit it takes products with complete vectors, runs a pointwise
program, and leaves results: in the next state, in what is written out, in a *slot* of the row (a vector that a later
loop or product needs), or added to a sum over the row.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from timeloom.compile.graph import LEAVES, Graph
from timeloom.compile.pointwise import FUNCTIONS
from timeloom.compile.program import Program

Item = tuple[str, int, int]
"""What a loop reads or leaves for a unit: kind, number, offset. Kinds: state, grad, after, next, decay (part, offset);
input, written (0, offset); mask, unit (index, 0); tape (width, offset), width 0 being one number a row; slot, total,
product (value, 0).
"""

READY = ("state", "grad", "input")
"""Leaves that products can read as operands in place."""


@dataclass
class Loop:
    """One loop over units.

    stacks: the products it needs, as pairs of a stack of matrices and the value of the vector it multiplies.
    pulls: values that are sums of transposed products.
    reads, leaves: what the pointwise text finds in `in[]` and puts into `out[]`; those of `leaves` from index `decays`
    on only if the decay is wanted.
    """

    width: int
    stacks: list[tuple[int, int]] = field(default_factory=list)
    pulls: list[int] = field(default_factory=list)
    values: list[int] = field(default_factory=list)
    for_decay: list[int] = field(default_factory=list)
    reads: list[Item] = field(default_factory=list)
    leaves: list[tuple[Item, int]] = field(default_factory=list)
    """Items, each with its value."""
    decays: int = 0


@dataclass
class Schedule:
    """The loops of a program, in order; `slots`: widths, by value, of the vectors that rows keep between loops."""

    graph: Graph
    loops: list[Loop]
    slots: dict[int, int]
    totals: list[int]


def schedule(program: Program, input_offsets: tuple[int, ...], late: bool = False) -> Schedule:
    """Put every value into the first loop that can compute it.

    late: values computed from inputs alone go into the first loop that needs them, so that they need no slot.
    """
    graph = program.graph
    main = set(graph.needed([place.value for place in (*program.next, *program.written)]))
    every = graph.needed(program.roots)
    main |= set(graph.needed([i for i in every if graph[i].op in ("product", "pull", "total")]))
    level = _levels(graph, every)
    if late:
        _delay(graph, every, level, {*program.roots, *[place.value for place in program.taped]})
    loops: dict[tuple[int, int], Loop] = {}

    def loop_of(index: int, width: int) -> Loop:
        return loops.setdefault((max(level[index], 0), width), Loop(width))

    left: dict[int, list[tuple[Item, int]]] = defaultdict(list)  # by id of the loop
    slots: dict[int, int] = {}
    home: dict[int, Loop] = {}
    for index in every:
        value = graph[index]
        if value.op in LEAVES or value.op == "total" or value.width == 0:
            continue
        loop = home[index] = loop_of(index, value.width)
        if value.op == "product":
            stack = (int(value.detail[0]), value.args[0])
            if stack not in loop.stacks:
                loop.stacks.append(stack)
        elif value.op == "pull":
            loop.pulls.append(index)
        elif index in main:
            loop.values.append(index)
        else:
            loop.for_decay.append(index)
    for index in every:
        value = graph[index]
        if value.op in ("product", "pull"):
            for arg in value.args:
                if graph[arg].op not in READY and not _is_zero(graph, arg):
                    slots[arg] = max(_argument_width(graph, index, program), slots.get(arg, 0))
        elif value.op not in LEAVES and value.op != "total" and value.width:
            for arg in _inputs_of(graph, value.args):
                if arg in home and home[arg] is not home[index]:
                    slots[arg] = graph[arg].width
    places = [*[("next", p) for p in program.next], *[("written", p) for p in program.written]]
    for index in every:
        if graph[index].op == "total":
            (arg,) = graph[index].args
            left[id(loop_of(arg, graph[arg].width))].append((("total", index, 0), arg))
    for kind, place in places:
        loop = loop_of(place.value, place.width)
        left[id(loop)].append(((kind, place.part, place.offset), place.value))
    for place in program.taped:
        width = graph[place.value].width
        if width:
            loop = loop_of(place.value, width)
        else:  # one number per row: any loop after it is computed
            loop = loops[min(key for key in loops if key[0] >= level[place.value])]
        left[id(loop)].append((("tape", width, place.offset), place.value))
    for value_index, width in slots.items():
        loop = home.get(value_index) or loop_of(value_index, width)
        left[id(loop)].append((("slot", value_index, 0), value_index))
    decays: dict[int, list[tuple[Item, int]]] = defaultdict(list)
    for place in program.kept:
        decays[id(loop_of(place.value, place.width))].append((("decay", place.part, place.offset), place.value))
    ordered = [loops[key] for key in sorted(loops)]
    for loop in ordered:
        sure = [(item, v) for item, v in left[id(loop)] if v not in set(loop.for_decay)]
        perhaps = [(item, v) for item, v in left[id(loop)] if v in set(loop.for_decay)] + decays[id(loop)]
        loop.leaves, loop.decays = sure + perhaps, len(sure)
        loop.reads = _reads(graph, loop, home, input_offsets)
    return Schedule(graph, ordered, slots, [i for i in every if graph[i].op == "total"])


def _is_zero(graph: Graph, index: int) -> bool:
    return graph[index].op == "number" and graph[index].detail[0] == 0


def _argument_width(graph: Graph, index: int, program: Program) -> int:
    """Width of the operand of a product (or a transposed one); one number per row has no width of its own."""
    value = graph[index]
    widths = {graph[arg].width for arg in value.args} - {0}
    return widths.pop() if widths else program.pull_width(int(value.detail[0]))


def _levels(graph: Graph, every: list[int]) -> dict[int, int]:
    """Number of the first loop in which each value is available; −1 for those available from the start."""
    level: dict[int, int] = {}
    for index in every:
        value = graph[index]
        args = [level[arg] for arg in value.args]
        if value.op in LEAVES:
            level[index] = -1
        elif value.op == "total":
            level[index] = max(args[0], 0) + 1
        elif value.op in ("product", "pull"):
            ready = [-1 if graph[a].op in READY or _is_zero(graph, a) else max(level[a], 0) for a in value.args]
            level[index] = max(ready) + 1
        else:
            level[index] = max(args)
    return level


def _delay(graph: Graph, every: list[int], level: dict[int, int], roots: set[int]) -> None:
    """Raise the levels of products with inputs, and of values that depend on these alone, to those of their users."""
    of_inputs: set[int] = set()
    users: dict[int, set[int]] = defaultdict(set)
    for index in every:
        value = graph[index]
        made = [arg for arg in value.args if graph[arg].op not in ("unit", "number", "mask")]
        multiplied = value.op == "product" and graph[value.args[0]].op == "input"
        if multiplied or (value.op in FUNCTIONS and made and of_inputs.issuperset(made)):
            of_inputs.add(index)
        for arg in value.args:
            users[arg].add(index)
    for index in reversed(every):
        if index in of_inputs - roots and all(graph[user].op in FUNCTIONS for user in users[index]):
            level[index] = min(level[user] for user in users[index])


def _inputs_of(graph: Graph, args: tuple[int, ...]) -> list[int]:
    """Vectors that arguments depend on, looking through numbers per row, which every loop computes for itself."""
    found, stack = [], list(args)
    while stack:
        index = stack.pop()
        value = graph[index]
        if value.width == 0 and value.op not in LEAVES and value.op != "total":
            stack.extend(value.args)
        else:
            found.append(index)
    return found


def _reads(graph: Graph, loop: Loop, home: dict[int, Loop], input_offsets: tuple[int, ...]) -> list[Item]:
    """What the loop's pointwise text needs from outside."""
    wanted: dict[Item, None] = {}
    for index in [*loop.values, *loop.for_decay, *[value for _, value in loop.leaves]]:
        own = index in home and home[index] is loop
        pointwise = own and graph[index].op not in ("product", "pull")
        for arg in _inputs_of(graph, graph[index].args if pointwise else (index,)):
            value = graph[arg]
            if value.op == "number" or (arg in home and home[arg] is loop and value.op not in ("product", "pull")):
                continue
            if value.op in ("state", "grad", "after"):
                wanted[value.op, int(value.detail[0]), int(value.detail[1])] = None
            elif value.op == "input":
                wanted["input", 0, input_offsets[int(value.detail[0])]] = None
            elif value.op in ("unit", "mask"):
                wanted[value.op, int(value.detail[0]), 0] = None
            elif value.op == "tape":
                wanted["tape", value.width, int(value.detail[0])] = None
            elif value.op == "total":
                wanted["total", arg, 0] = None
            else:
                wanted["product" if home[arg] is loop else "slot", arg, 0] = None
    return list(wanted)
