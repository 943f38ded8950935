"""From lanes to the graph of vectors: start at the next state, and add what it depends on, as wide as needed."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from timeloom.compile.graph import Graph, Matrix, Place
from timeloom.compile.lanes import Lanes, is_small
from timeloom.compile.refusal import NotFused
from timeloom.compile.sources import ZERO, Source

MOST_RUNS = 4
"""Most stretches of the state that a vector is joined from; for more, the state is multiplied by a selection matrix."""


@dataclass(frozen=True)
class Hoisted:
    """An input or a per-unit vector: lanes of x or of constants `(width,)`, or their product with weights
    `(width, in)`.
    """

    lanes: Tensor
    weights: Tensor | None = None

    @property
    def width(self) -> int:
        return len(self.lanes if self.weights is None else self.weights)


@dataclass
class Lowering:
    """A step's graph under construction."""

    lanes: Lanes
    parts: tuple[int, ...]
    graph: Graph = field(default_factory=Graph)
    inputs: list[Hoisted] = field(default_factory=list)
    units: list[Hoisted] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    """Lanes of each product's weights, `(blocks, out, in)`."""

    edges: dict[int, set[int]] = field(default_factory=dict)
    """For each product, the bounds of the stretches of it that are used: longer stretches are cut there."""

    def __post_init__(self) -> None:
        self.demanded: dict[int, set[int]] = {}
        self._made: dict[bytes, int] = {}
        self._leaves: dict[tuple[str, bytes, bytes], int] = {}

    def outputs(self, parts: list[Tensor]) -> list[Place]:
        """Places of the next state, part by part."""
        return [
            Place(part, offset, len(piece), self.value(piece))
            for part, lanes in enumerate(parts)
            for offset, piece in self._pieces(lanes)
        ]

    def value(self, lanes: Tensor) -> int:
        """The vector of these lanes, all of one source."""
        key = lanes.numpy().tobytes()
        if key not in self._made:
            self._made[key] = self._make(lanes)
        return self._made[key]

    def _make(self, lanes: Tensor) -> int:
        source = self.lanes.source_of(int(lanes[0]))
        at = lanes - source.base
        if source.kind == "number":
            return self.graph.number(source.detail)
        if source.kind == "const":
            return self._leaf("unit", Hoisted(lanes))
        if source.kind == "x":
            return self._leaf("input", Hoisted(lanes))
        if source.kind == "state":
            return self._state(source, at)
        if source.kind == "product":
            return self._product(source, at)
        if source.kind == "total":
            return self._total(source, at)
        return self.graph.apply(source.kind, *(self.value(operand[at]) for operand in source.operands))

    def _leaf(self, kind: str, hoisted: Hoisted) -> int:
        listed = self.inputs if kind == "input" else self.units
        weights = b"" if hoisted.weights is None else hoisted.weights.numpy().tobytes()
        index = self._leaves.setdefault((kind, hoisted.lanes.numpy().tobytes(), weights), len(listed))
        if index == len(listed):
            listed.append(hoisted)
        return self.graph.add(kind, detail=(index,), width=hoisted.width)

    def _state(self, source: Source, at: Tensor) -> int:
        first = int(at[0])
        if torch.equal(at, torch.arange(first, first + len(at))):
            return self.graph.add("state", detail=(source.detail, first), width=len(at))
        one = self.lanes.number(1.0)
        picks = torch.where(at[:, None] == torch.arange(source.width), one, ZERO)
        return self._times(picks.unsqueeze(0), self.value(source.base + torch.arange(source.width)))

    # ---- where a vector has to be cut --------------------------------------------------------------------------------

    def _pieces(self, lanes: Tensor) -> list[tuple[int, Tensor]]:
        """A vector cut where its sources change: offsets and lanes of the pieces."""
        edges = [0, *sorted(self._cuts(lanes)), len(lanes)]
        return [(begin, lanes[begin:end]) for begin, end in pairwise(edges)]

    def _cuts(self, lanes: Tensor) -> set[int]:
        numbers = self.lanes.source_numbers(lanes)
        cuts = {int(at) + 1 for at in (numbers[1:] != numbers[:-1]).nonzero().flatten()}
        edges = [0, *sorted(cuts), len(lanes)]
        for begin, end in pairwise(edges):
            source = self.lanes.sources[int(numbers[begin])]
            at = lanes[begin:end] - source.base
            if source.kind == "state":
                jumps = (at[1:] != at[:-1] + 1).nonzero().flatten() + 1
                if len(jumps) < MOST_RUNS:
                    cuts |= {begin + int(jump) for jump in jumps}
            elif source.kind == "product":
                if len(at) > 1 and bool((at[1:] == at[:-1] + 1).all()):
                    cuts |= {begin + e - int(at[0]) for e in self.edges.get(source.base, ()) if at[0] < e <= at[-1]}
            elif source.kind not in ("number", "const", "x", "total"):
                for operand in source.operands:
                    cuts |= {begin + cut for cut in self._cuts(operand[at])}
        return cuts

    # ---- products and sums -------------------------------------------------------------------------------------------

    def _product(self, source: Source, at: Tensor) -> int:
        (operand,), weights = source.operands, source.detail
        blocks, outputs, inputs = weights.shape
        block, row = at // outputs, at % outputs
        if len(at) > 1 and bool((at[1:] == at[:-1] + 1).all()):
            self.demanded.setdefault(source.base, set()).update((int(at[0]), int(at[-1]) + 1))
        if blocks > 1:
            used, counts = torch.unique_consecutive(block, return_counts=True)
            even = len(torch.unique(used)) == len(used) and bool((counts == counts[0]).all())
            flat = operand[used].flatten()
            if even and len(used) > 1 and len(self._pieces(flat)) == 1 and not self._known(flat):
                rows = row.view(len(used), -1)
                return self._times(weights[used].gather(1, rows.unsqueeze(-1).expand(-1, -1, inputs)), self.value(flat))
        dense = torch.full((len(at), blocks, inputs), ZERO)
        dense[torch.arange(len(at)), block] = weights[block, row]
        lit = torch.unique(block)
        return self._dense(operand[lit].flatten(), dense[:, lit].flatten(1))

    def _dense(self, operand: Tensor, weights: Tensor) -> int:
        """`weights @ operand` with weights `(out, in)`, summed over the pieces of the operand."""
        terms = []
        for offset, piece in self._pieces(operand):
            columns = weights[:, offset : offset + len(piece)]
            source = self.lanes.source_of(int(piece[0]))
            if source.kind == "x" and self.lanes.folds and is_small(len(piece), len(weights)):
                terms.append(self._times(columns.unsqueeze(0), self.value(piece)))
            elif source.kind in ("const", "number", "x"):
                terms.append(
                    self._leaf("input" if source.kind == "x" else "unit", Hoisted(piece, columns.contiguous()))
                )
            elif source.kind == "state" and len(torch.unique(piece)) == len(piece):
                first, last = int(piece.min()), int(piece.max())
                ordered = torch.full((len(weights), last - first + 1), ZERO)
                ordered[:, piece - first] = columns
                terms.append(self._times(ordered.unsqueeze(0), self.value(torch.arange(first, last + 1))))
            else:
                terms.append(self._times(columns.unsqueeze(0), self.value(piece)))
        found = terms[0]
        for term in terms[1:]:
            found = self.graph.apply("add", found, term)
        return found

    def _known(self, lanes: Tensor) -> bool:
        return self.lanes.source_of(int(lanes[0])).kind in ("const", "number", "x")

    def _times(self, weights: Tensor, operand: int) -> int:
        """A product with weights `(blocks, out, in)`."""
        blocks, outputs, _ = weights.shape
        if self.graph[operand].width == 0:  # one number for all units: its weights would be summed
            raise NotFused("a product with a vector whose units are all the same number")
        weights = weights.contiguous()
        for index, known in enumerate(self.weights):
            if known.shape == weights.shape and torch.equal(known, weights):
                return self.graph.add("product", (operand,), (index, 0), blocks * outputs)
        self.weights.append(weights)
        return self.graph.add("product", (operand,), (len(self.weights) - 1, 0), blocks * outputs)

    def _total(self, source: Source, at: Tensor) -> int:
        (terms,) = source.operands
        width = terms.shape[1]
        if bool((at == at[0]).all()):
            found = self.graph.number(0)
            for _, piece in self._pieces(terms[at[0]]):
                found = self.graph.apply("add", found, self.graph.total(self.value(piece), len(piece)))
            return found
        groups = torch.unique_consecutive(at)  # several sums at once: a product with ones
        if len(torch.unique(groups)) != len(groups):
            groups = torch.unique(at)
        rows = (at[:, None] == groups).repeat_interleave(width, 1)
        return self._dense(terms[groups].flatten(), torch.where(rows, self.lanes.number(1.0), ZERO))


def stack(lowering: Lowering, roots: list[int]) -> tuple[Graph, list[Matrix], list[Tensor], list[int], list[Hoisted]]:
    """The graph with products of one vector combined into stacks.

    Also returns the matrices, the lanes of their weights `(count, blocks, out, in)`, the indices of the roots, and the
    inputs, all in the order of their lanes in the user's tensors, so that these need not be copied.
    """
    graph, weights = lowering.graph, lowering.weights
    needed = graph.needed(roots)
    stacks: dict[tuple[int, ...], list[int]] = {}
    for index in needed:
        value = graph[index]
        if value.op == "product":
            members = stacks.setdefault((value.args[0], *weights[int(value.detail[0])].shape), [])
            if value.detail[0] not in members:
                members.append(int(value.detail[0]))
    matrices, lanes = [], []
    place: dict[tuple[int, int], tuple[int, int]] = {}
    for number, ((operand, *shape), members) in enumerate(stacks.items()):
        members.sort(key=lambda member: int(weights[member].flatten()[0]))
        matrices.append(Matrix(len(members), *shape))
        lanes.append(torch.stack([weights[member] for member in members]))
        place |= {(operand, member): (number, at) for at, member in enumerate(members)}
    used = sorted({int(graph[i].detail[0]) for i in needed if graph[i].op == "input"},
                  key=lambda i: int(lowering.inputs[i].lanes[0]))  # fmt: skip
    found = Graph()
    new: dict[int, int] = {}
    for index in needed:
        value, detail = graph[index], graph[index].detail
        if value.op == "product":
            detail = place[value.args[0], int(detail[0])]
        elif value.op == "input":
            detail = (used.index(int(detail[0])),)
        new[index] = found.add(value.op, tuple(new[arg] for arg in value.args), detail, value.width)
    return found, matrices, lanes, [new[root] for root in roots], [lowering.inputs[i] for i in used]
