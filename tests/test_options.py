"""Options of every solver: what cannot be meant is refused by name, and what is meant may be written as one likes."""

from __future__ import annotations

import copy
import pickle
from dataclasses import fields, replace

import pytest

from timeloom import SolveReport, solvers
from timeloom.solvers import MGRIT, Solver

KINDS = [getattr(solvers, name) for name in solvers.__all__ if name != "Solver"]
RUBBISH = ["nonsense", "", -1, float("nan"), [None], {}, object()]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_rubbish_is_refused_by_name(kind: type[Solver]) -> None:
    for field in fields(kind):
        for value in RUBBISH:
            with pytest.raises(ValueError, match=f"{field.name}.* must "):
                kind(**{field.name: value})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tol": float("inf")}, "tol must be a positive number or None, got inf"),
        ({"tol": True}, "tol must be a positive number or None, got True"),
        ({"adjoint": "scan", "adjoint_levels": -1}, "adjoint_levels must be a whole number ≥ 0 or None, got -1"),
        ({"weight": "a"}, "weight must be a number between 0 and 2, got 'a'"),
        ({"weight": None}, "weight must be a number between 0 and 2, got None"),
        ({"skip_down": 1}, "skip_down must be True or False, got 1"),
        ({"check_gradient_every": 1, "gradient_tolerance": 0}, "gradient_tolerance must be a positive number or None"),
    ],
)
def test_messages_say_what_is_expected(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MGRIT(**options)


def test_a_report_counts_in_words() -> None:
    one = SolveReport("shooting[none]", 8, 1, (0.0,), 1e-6, True, False, None, 0.0)
    assert "1 sweep: converged" in str(one)
    assert "2 sweeps: converged" in str(replace(one, iterations=2))


def test_lists_do_as_well_as_tuples() -> None:
    listed, tupled = (MGRIT(coarsening=kind((4, 3)), relaxation=kind(("F", "FCF"))) for kind in (list, tuple))
    assert listed == tupled
    assert hash(listed) == hash(tupled)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_solvers_are_values(kind: type[Solver]) -> None:
    solver = kind(tol=1e-4)
    for twin in (pickle.loads(pickle.dumps(solver)), copy.deepcopy(solver), eval(repr(solver), vars(solvers))):
        assert twin == solver
        assert hash(twin) == hash(solver)
