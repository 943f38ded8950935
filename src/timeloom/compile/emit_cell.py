"""One of torch's cells as CUDA C++, without its matrix products, which the skeletons in kernels/cuda compute.

The rest of a step is pointwise, and so is the rest of its adjoint:

    advance   from the products y, the inputs u and the state to the next state
    pull      from the gradient g of the next state to those of the products, and to the gradient that bypasses them

Here V is one float, and every array holds the values of one unit; macros give their lengths.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from timeloom.compile.builtin import EQUATIONS, builtin
from timeloom.compile.graph import LEAVES, Graph, Place
from timeloom.compile.pointwise import FUNCTIONS
from timeloom.compile.program import Program
from timeloom.compile.sizes import UNITS
from timeloom.compile.tape import with_tape
from timeloom.compile.text import literal

UNBOUNDED = ("rnn_relu",)
"""Cells whose h may leave the box of max(1, |first h|)."""
ADVANCE = "const V *y, const V *u, const V *vectors, const V *state, V *next, V *saved, V *keep"
PULL = """const V *saved, const V *before, const V *after, const V *vectors, const V *g,
                 V *d_products, V *grads, V *through, V *keep"""

Target = tuple[str, int]
"""A variable of the kernel, and the value of the graph that is assigned to it."""
Names = dict[str, Callable[..., str]]
"""The kernel's expressions for values that are given, by op: a function of the value's detail."""


def emit(kind: str, zoned: bool) -> str:
    """The text of a cell.

    zoned: with zoneout, the share that a unit keeps of each part of the state is one more input, behind the others, and
    is saved for the adjoint, too. The mask of h in the products is left to the skeletons.
    """
    cell = _Cell(kind, zoned)
    advance, pull = cell.advance(), cell.pull()
    head = ["// Written by `make kernels`; the equations are in compile/builtin.py.", "#pragma once"]
    head += ['#include "elements.cuh"', *(f"#define {name} {value}" for name, value in cell.counts().items())]
    return "\n".join([*head, "", *advance, "", *pull, ""])


class _Cell:
    def __init__(self, kind: str, zoned: bool) -> None:
        made = builtin(kind, UNITS, None, zoned)
        self.kind, self.zoned, self.fused = kind, zoned, made.fused
        _, self.products, self.turned, self.parts = EQUATIONS[kind]
        self.taped = [place.value for place in made.taped.forward.taped]
        self.adjoint = with_tape(self.fused, self.taped, self.fused.forward.next).adjoint
        self.seen: dict[str, set[int]] = {"before": set(), "after": set()}
        """Parts of the state that `pull` reads, before and after the step."""

    def counts(self) -> dict[str, int]:
        """Sizes of the cell for the skeletons and the host; complete once `pull` has been written."""
        shares = self.parts * self.zoned
        return {
            "ZONED": int(self.zoned),
            "PRODUCTS": self.products,
            "INPUTS": self.products + shares,
            "PARTS": self.parts,
            "SAVED": len(self.taped) + shares,
            "VECTORS": len(self.fused.units),
            "GRADS": len(self.adjoint.written),
            "BEFORE": sum(1 << part for part in self.seen["before"]),
            "AFTER": sum(1 << part for part in self.seen["after"]),
            "BOUNDED": int(self.kind not in UNBOUNDED),
        }

    def advance(self) -> list[str]:
        program = self.fused.forward
        graph = program.graph
        shares = [graph.add("mask", detail=(1 + part,), width=UNITS) for part in range(self.parts * self.zoned)]
        targets = self._by_part("next", program.next, graph)
        targets += [(f"saved[{i}]", value) for i, value in enumerate([*self.taped, *shares])]
        targets += self._by_part("keep", program.kept, graph)
        names: Names = {
            "product": lambda _, at: f"y[{self._gate(at)}]",
            "input": lambda gate: f"u[{gate}]",
            "mask": lambda mask: f"u[{self.products + mask - 1}]",
            "unit": lambda number: f"vectors[{number}]",
            "state": lambda part, _: f"state[{part}]",
        }
        return [f"INLINE void advance({ADVANCE}) {{", *_statements(graph, targets, names, self.taped), "}"]

    def pull(self) -> list[str]:
        program, by_product = _past_products(self.adjoint)
        graph = program.graph
        targets = sorted((f"d_products[{self._gate(at)}]", value) for at, value in enumerate(by_product))
        targets += [(f"grads[{i}]", place.value) for i, place in enumerate(program.written)]
        targets += self._by_part("through", program.next, graph) + self._by_part("keep", program.kept, graph)

        def state(name: str, part: int) -> str:
            self.seen[name].add(part)
            return f"{name}[{part}]"

        names: Names = {
            "tape": lambda offset: f"saved[{offset // UNITS}]",
            "mask": lambda mask: f"saved[{len(self.taped) + mask - 1}]",
            "unit": lambda number: f"vectors[{number}]",
            "grad": lambda part, _: f"g[{part}]",
            "state": lambda part, _: state("before", part),
            "after": lambda part, _: state("after", part),
        }
        return [f"INLINE void pull({PULL}) {{", *_statements(graph, targets, names), "}"]

    def _gate(self, at: int) -> int:
        """The gate, in torch's order, that a product of the stack belongs to."""
        return (at - self.turned) % self.products

    def _by_part(self, name: str, places: Sequence[Place], graph: Graph) -> list[Target]:
        """A target for each part of the state, zero for parts without a place."""
        found = {place.part: place.value for place in places}
        return [(f"{name}[{part}]", found.get(part, graph.number(0))) for part in range(self.parts)]


def _past_products(program: Program) -> tuple[Program, list[int]]:
    """An adjoint program without the gradient that comes back through its products, and the products' gradients."""
    graph, by_product, new = Graph(), list[int](), dict[int, int]()
    for index in program.graph.needed(program.roots):
        value = program.graph[index]
        args = [new[arg] for arg in value.args]
        if value.op == "pull":
            by_product += args
            new[index] = graph.number(0)
        elif value.op in LEAVES:
            new[index] = graph.add(value.op, (), value.detail, value.width)
        else:
            new[index] = graph.apply(value.op, *args)

    def moved(places: Sequence[Place]) -> tuple[Place, ...]:
        return tuple(Place(place.part, place.offset, place.width, new[place.value]) for place in places)

    return Program(graph, moved(program.next), moved(program.written), moved(program.kept)), by_product


def _statements(graph: Graph, targets: list[Target], names: Names, first: Sequence[int] = ()) -> list[str]:
    """Statements that assign values to their targets, computed in the order of the graph, those of `first` first."""
    uses, known, lines = _uses(graph, [value for _, value in targets], names), dict[int, str](), list[str]()
    forms = {index: _form(graph, index, uses) for index in uses if graph[index].op in FUNCTIONS}
    read = {arg for _, args in forms.values() for arg in args} | {value for _, value in targets}
    ordered = [index for value in first for index in graph.needed([value]) if index in read]
    for index in dict.fromkeys([*ordered, *sorted(read)]):
        value = graph[index]
        if value.op == "number":
            known[index] = literal(float(value.detail[0]))
        elif index not in forms:
            known[index] = names[value.op](*map(int, value.detail))
        else:
            text, args = forms[index]
            known[index] = f"v{index}"
            lines.append(f"  const V v{index} = {text.format(*(known[arg] for arg in args))};")
    return lines + [f"  {target} = {known[value]};" for target, value in targets]


def _uses(graph: Graph, roots: list[int], names: Names) -> Counter[int]:
    """How often each value on the way to the roots is used; values in `names` are given."""
    uses, pending = Counter[int](), list(roots)
    while pending:
        index = pending.pop()
        if index not in uses and graph[index].op not in names:
            pending += graph[index].args
        uses[index] += 1
    return uses


def _form(graph: Graph, index: int, uses: Counter[int]) -> tuple[str, tuple[int, ...]]:
    """The C expression of a value, and its arguments.

    A product that only one sum uses is fused with it, which a compiler does only inside of a block. A product that
    would wait in a register for another factor is multiplied factor by factor instead.
    """
    value = graph[index]
    inner = [place for place, arg in enumerate(value.args) if graph[arg].op == "mul" and uses[arg] == 1]
    if value.op in ("add", "sub") and inner:
        factors, other = graph[value.args[inner[0]]].args, value.args[1 - inner[0]]
        factor, addend = ("", "") if value.op == "add" else ("-", "") if inner[0] else ("", "-")
        return f"v_fma({factor}{{0}}, {{1}}, {addend}{{2}})", (*factors, other)
    if value.op == "mul" and 0 in inner:
        return "{0} * {1} * {2}", (value.args[1], *graph[value.args[0]].args)
    return FUNCTIONS[value.op].c, value.args
