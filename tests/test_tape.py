"""What compiled steps keep for their adjoint: the cheapest cut, and adjoints that read a tape beside those without."""

from __future__ import annotations

import math

import pytest
import torch
from cell_equations import OPTIONS

from timeloom import cells
from timeloom.compile.cut import SINK, SOURCE, Network
from timeloom.compile.fuse import compile_step
from timeloom.compile.program import evaluate
from timeloom.compile.tape import taped

UNITS = 12


def severed(edges: dict[tuple[str, str], float]) -> tuple[set[tuple[str, str]], float]:
    """The edges of the cheapest cut, and what they cost."""
    network = Network()
    for (begin, end), capacity in edges.items():
        network.connect(begin, end, capacity)
    near = network.source_side()
    cut = {edge for edge in edges if edge[0] in near and edge[1] not in near}
    return cut, sum(edges[edge] for edge in cut)


def test_the_cheapest_cut_is_found() -> None:
    s, t = str(SOURCE), str(SINK)
    edges = {(s, "a"): 3.0, (s, "b"): 2.0, ("a", "b"): 5.0, ("a", t): 2.0, ("b", t): 2.0}
    assert severed(edges) == ({("a", t), ("b", t)}, 4.0)
    edges = {(s, "a"): math.inf, ("a", "b"): 1.0, ("b", t): math.inf, (s, "b"): 0.5}
    assert severed(edges) == ({("a", "b"), (s, "b")}, 1.5)


def test_the_cheapest_of_all_cuts_of_random_networks() -> None:
    generator = torch.Generator().manual_seed(0)
    names = [str(SOURCE), "a", "b", "c", "d", str(SINK)]
    for _ in range(50):
        capacity = torch.rand(6, 6, generator=generator) * (torch.rand(6, 6, generator=generator) < 0.6)
        pairs = [(i, j) for i in range(5) for j in range(1, 6) if i != j and capacity[i, j] > 0]
        edges = {(names[i], names[j]): float(capacity[i, j]) for i, j in pairs}
        sides = [{0} | {k + 1 for k in range(4) if mask >> k & 1} for mask in range(16)]
        least = min(sum(float(capacity[i, j]) for i, j in pairs if i in side and j not in side) for side in sides)
        assert severed(edges)[1] == pytest.approx(least, abs=1e-6)


def test_a_path_that_cannot_be_severed_is_told() -> None:
    network = Network()
    network.connect(SOURCE, SINK, math.inf)
    with pytest.raises(ValueError, match="infinite"):
        network.source_side()


@pytest.mark.parametrize("name", OPTIONS)
def test_an_adjoint_that_reads_a_tape_is_the_adjoint(name: str) -> None:
    torch.manual_seed(0)
    cell = getattr(cells, name)(3, UNITS, **OPTIONS[name]).double()
    state = tuple(0.5 * torch.randn(5, UNITS, dtype=torch.float64).abs() + k for k in range(cell.parts))
    x = torch.randn(5, 3, dtype=torch.float64)
    compiled = compile_step(cell, state, cell.parts > 1, x)
    fused, kept = compiled.fused, taped(compiled.fused)
    assert kept is not None
    with torch.no_grad():
        weights, u = compiled.prepare(cell, x, state[0])
        matrices = weights[: len(fused.matrices)]
        leaves = {
            "state": state, "grad": [torch.randn_like(part) for part in state], "input": u.split(fused.inputs, -1),
            "unit": weights[len(matrices) :],
        }  # fmt: skip
        left = evaluate(kept.forward.graph, [place.value for place in kept.forward.taped], leaves, matrices)
        tape = torch.cat([left[place.value].expand(5, place.width) for place in kept.forward.taped], -1)
        given = evaluate(kept.adjoint.graph, kept.adjoint.roots, leaves | {"tape": [tape]}, matrices)
        wanted = evaluate(fused.adjoint.graph, fused.adjoint.roots, leaves, matrices)
    assert tape.shape == (5, kept.width)
    for one, other in zip(kept.adjoint.roots, fused.adjoint.roots, strict=True):
        torch.testing.assert_close(given[one], wanted[other], rtol=1e-12, atol=1e-12)
    assert not any(value.op == "product" for value in kept.adjoint.graph.values)  # none is computed twice
    assert kept.width <= 4 * UNITS + 3  # as small as that of a kernel by hand
