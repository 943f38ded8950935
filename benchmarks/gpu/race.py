"""One contender on one case: both directions, a CUDA graph where it can be, the error against float64."""

from __future__ import annotations

from torch import Tensor

from benchmarks.cases import Case
from benchmarks.gpu import clock
from benchmarks.gpu.clock import learn
from benchmarks.gpu.compare import Row, describe, first_line, times
from benchmarks.gpu.contenders import Contender
from benchmarks.layers import Problem
from benchmarks.measure import exact_results, relative_errors, time_in_turns

PATIENCE = 10.0
"""Seconds of a first step from which on it is not repeated more than must be."""


def name_of(contender: Contender, case: Case) -> str:
    return f"{case.name} · {contender.name}"


def begin(contender: Contender, case: Case) -> Row:
    """What is known of a row before anything is measured."""
    return describe(case) | {"name": name_of(contender, case), "contender": contender.name, "note": contender.note}


def measure(contender: Contender, case: Case) -> Row:
    """One row. A graph comes last: a capture that fails may leave a process in a state not to go on with."""
    runner = contender.make(case)
    row = begin(contender, case)
    row["first_call_s"] = runner.clock(runner.step)
    if row["first_call_s"] < PATIENCE:
        learn(runner.step)
    row |= times(time_in_turns({"both": runner.step, "forward": runner.forward}, runner.clock))
    results, peak, facts = runner.results(), runner.peak(), runner.facts()
    row |= facts | {"note": "; ".join(note for note in (contender.note, facts.get("note", "")) if note)}
    row["peak_mib"] = None if peak is None else peak / 2**20
    if results is not None:
        row |= _error(case, results)
    if contender.in_a_graph:
        try:
            row |= times(time_in_turns({"graph": runner.graph()}, runner.clock)) | runner.facts()
        except RuntimeError as error:
            row |= {"graph_fails": first_line(error), "broken": True}
    return row


def _error(case: Case, results: dict[str, Tensor]) -> Row:
    try:
        exact = exact_results(case, Problem.draw(case, clock.DEVICE))
    except RuntimeError as error:
        return {"truth_fails": first_line(error)}
    on_device = {name: value.to(clock.DEVICE) for name, value in results.items()}
    return {"error_to_float64": max(relative_errors(on_device, exact).values())}
