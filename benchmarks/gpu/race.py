"""One contender on one case: both directions, a CUDA graph if possible, the error against float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from benchmarks.cases import Case
from benchmarks.gpu import clock
from benchmarks.gpu.clock import learn
from benchmarks.gpu.compare import Row, describe, first_line, times
from benchmarks.gpu.contenders import Contender
from benchmarks.layers import Problem
from benchmarks.measure import Clock, Timing, exact_results, relative_errors, time_in_turns

PATIENCE = 4.0
"""Seconds of a call above which only one of each is timed."""


def name_of(contender: Contender, case: Case) -> str:
    return f"{case.name} · {contender.name}"


def begin(contender: Contender, case: Case) -> Row:
    """What is known of a row before anything is measured."""
    return describe(case) | {"name": name_of(contender, case), "contender": contender.name, "note": contender.note}


def measure(contender: Contender, case: Case) -> Row:
    """One row. The graph comes last, as a failed capture may leave the process unusable."""
    runner = contender.make(case)
    row = begin(contender, case)
    first = runner.clock(runner.step)  # includes compilation, as does the first forward pass
    learn(runner.step)
    runner.forward()
    calls: dict[str, Callable[[], object]] = {"both": runner.step, "forward": runner.forward}
    row |= {"first_call_s": first, **times(_time(calls, runner.clock))}
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


def _time(calls: Mapping[str, Callable[[], object]], seconds_of: Clock) -> dict[str, Timing]:
    once = {name: seconds_of(call) for name, call in calls.items()}
    if max(once.values()) < PATIENCE:
        return time_in_turns(calls, seconds_of)
    return {name: Timing(1e3 * seconds, 1e3 * seconds, 1) for name, seconds in once.items()}


def _error(case: Case, results: dict[str, Tensor]) -> Row:
    try:
        exact = exact_results(case, Problem.draw(case, clock.DEVICE))
    except RuntimeError as error:
        return {"truth_fails": first_line(error)}
    on_device = {name: value.to(clock.DEVICE) for name, value in results.items()}
    return {"error_to_float64": max(relative_errors(on_device, exact).values())}
