"""A solver is one class: what a newcomer writes, in one file, runs everywhere that a solver of ours does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import timeloom as tl
from timeloom.auto.experience import Experience
from timeloom.problem import Recurrence
from timeloom.solve.chain import Chain
from timeloom.solve.driver import march
from timeloom.solve.plan import Plan
from timeloom.solvers import Solver, base

MARCHES: list[int] = []


def watched(chain: Chain, plan: Plan) -> Any:
    """A loop of one's own."""
    MARCHES.append(chain.links)
    return march(chain, plan)


@dataclass(frozen=True)
class Halves(Solver):
    """Time in two chunks."""

    name: ClassVar[str] = "halves"

    def _plan_states(self, problem: Recurrence, experience: Experience) -> Plan:
        return self._plan(Plan, problem, -(-problem.steps // 2), driver=watched, reason="two halves")


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_NAMED", dict(base._NAMED))
    MARCHES.clear()
    base.register(Halves)


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("solver", ["halves", Halves()])
def test_a_solver_of_ones_own(solver: Any) -> None:
    torch.manual_seed(0)
    theirs = nn.GRU(3, 5).double()
    ours = tl.GRU(3, 5, solver=solver).double()
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(31, 2, 3, dtype=torch.float64)
    for layer in (theirs, ours):
        layer(x)[0].square().sum().backward()
    torch.testing.assert_close(ours(x)[0], theirs(x)[0], rtol=0.0, atol=1e-12)
    for given, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(given.grad, expected.grad, rtol=0.0, atol=1e-10)
    assert MARCHES[:2] == [2, 2], "forward and backward, unless the adjoint is planned otherwise"
    assert ours.reports[0].reason.startswith("two halves")
    states, report = tl.unroll(lambda h, x: torch.tanh(0.5 * h + x), torch.zeros(2, 3), torch.randn(9, 2, 3), solver)
    assert (states.shape, report.chunk, report.converged) == ((9, 2, 3), 5, True)


def test_an_unknown_name_tells_the_known_ones() -> None:
    with pytest.raises(ValueError, match="solver must be one of 'auto', 'sequential', 'shooting', 'mgrit', 'deer'"):
        tl.GRU(2, 2, solver="halves")


def test_a_solver_that_does_not_say_how_it_runs_over_ranks_says_what_does() -> None:
    with pytest.raises(NotImplementedError, match="Halves does not run over many ranks: use 'auto'"):
        Halves().plan_over_ranks(Recurrence(None, torch.zeros(4, 1, 1), torch.zeros(1, 1)), Experience(), (4, 4))  # type: ignore[arg-type]
