"""A graph makes values as simple as they can be, and what it makes of them is what was asked for."""

from __future__ import annotations

import torch
from torch import Tensor

from timeloom.compile.derive import Formula
from timeloom.compile.graph import Graph
from timeloom.compile.program import evaluate

UNITS = 4


def leaves(graph: Graph) -> tuple[Formula, Formula]:
    """Two vectors."""
    return Formula(graph, graph.add("input", detail=(0,), width=UNITS)), Formula(
        graph, graph.add("input", detail=(1,), width=UNITS)
    )


def value_of(formula: Formula, a: Tensor, b: Tensor) -> Tensor:
    return evaluate(formula.graph, [formula.index], {"state": [a], "input": [a, b]}, ())[formula.index]


def test_a_negative_is_subtracted() -> None:
    a, b = leaves(Graph())
    assert (a + -b).index == (a - b).index == (-b + a).index
    assert (a - -b).index == (a + b).index


def test_what_a_gate_leaves_of_a_number_has_all_its_digits() -> None:
    """`d − z d` near z = 1: rounding z d would leave few of them."""
    a, d = leaves(Graph())
    z = a.call("sigmoid")
    for left in (d - z * d, d - d * z, d + -(z * d)):
        assert a.graph[left.index].op == "mul"
        given, gradient = torch.full((1, UNITS), 9.0), torch.rand(1, UNITS) + 1
        found = value_of(left, given, gradient)
        exact = gradient.double() * (1 - torch.sigmoid(given).double())
        torch.testing.assert_close(found.double(), exact, rtol=1e-7, atol=0)


def test_what_two_shares_keep_is_made_of_what_the_gate_lacks() -> None:
    a, share = leaves(Graph())
    z = a.call("sigmoid")
    one = share + z * (1.0 - share)
    assert one.index == (z * (1.0 - share) + share).index == (z + share * (1.0 - z)).index
    given, kept = torch.randn(2, 3, UNITS, dtype=torch.float64)
    gate = torch.sigmoid(given)
    torch.testing.assert_close(value_of(one, given, kept), kept + gate * (1 - kept))


def test_two_gates_lack_something_each() -> None:
    a, b = leaves(Graph())
    y, z = a.call("sigmoid"), b.call("sigmoid")
    first, second = torch.randn(2, 3, UNITS, dtype=torch.float64)
    one, other = torch.sigmoid(first), torch.sigmoid(second)
    torch.testing.assert_close(value_of(y + z * (1.0 - y), first, second), one + other * (1 - one))
