"""One case, side by side in one process: cuDNN, timeloom, and timeloom replayed from a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.cases import Case
from benchmarks.gpu import clock
from benchmarks.gpu.clock import captured, event_seconds, learn, peak_bytes
from benchmarks.gpu.floor import bandwidth, floor_of, step_latency
from benchmarks.layers import LIBRARIES, Problem, TrainingStep, build
from benchmarks.measure import Timing, exact_results, relative_errors, solve_of, time_in_turns
from timeloom.nn.base import Recurrent
from timeloom.report import SolveReport

Row = dict[str, Any]
Call = Callable[[], object]


@dataclass(frozen=True)
class Depth:
    """What is measured in addition to the eager times."""

    forward: bool = True
    """The forward pass alone, without gradients."""
    graph: bool = True
    truth: bool = True
    """Errors against float64."""
    memory: bool = True
    seconds: float = 1.0
    """Seconds that rounds of timing may take."""


FULL = Depth()


def measure(case: Case, dtype_name: str = "float32", depth: Depth = FULL) -> Row:
    """One row of the table."""
    dtype: torch.dtype = getattr(torch, dtype_name)
    problem = Problem.draw(case, clock.DEVICE).to(dtype)
    theirs, ours = (build(case, library).to(clock.DEVICE, dtype) for library in LIBRARIES)
    step, reference = TrainingStep(ours, problem), TrainingStep(theirs, problem)
    steps: dict[str, TrainingStep] = {"timeloom": step}
    row = describe(case, dtype_name)
    try:
        reference()
        steps = {"cudnn": reference, "timeloom": step}
    except RuntimeError as error:
        row["cudnn_refuses"] = first_line(error)
    learn(step)
    if depth.memory:
        row |= {f"{name}_peak_bytes": peak_bytes(each) for name, each in steps.items()}
    calls: dict[str, Call] = {**steps}
    graphed = _capture(ours, problem, row) if depth.graph else None
    if graphed is not None:
        calls["graph"] = graphed[0]
    row |= times(time_in_turns(calls, event_seconds, depth.seconds))
    if graphed is not None:
        row["graph_certified"] = graphed[1].certified
    if depth.forward:
        layers = {name: each.layer for name, each in steps.items()}
        row |= _forward(layers, problem.x, "graph" in calls, depth.seconds / 2)
    if depth.truth:
        row |= _errors(case, steps, problem, theirs)
    else:
        step()  # eager again, for its report
    solve = solve_of(ours)
    row |= asdict(solve) | {"sweeps": [solve.sweeps, solve.backward_sweeps]}
    row |= _floor(case, dtype, row, ours)
    return row | ratios(row)


def describe(case: Case, dtype_name: str = "float32") -> Row:
    """The fields of a row that describe its case."""
    name = case.name + ("" if dtype_name == "float32" else f" {dtype_name}")
    sizes = {"T": case.length, "B": case.batch, "n": case.hidden}
    about = {"cell": case.cell, "regime": case.regime.name, "dtype": dtype_name, "goal": case.goal}
    return {"name": name, "case": name, **sizes, **about}


def first_line(error: BaseException) -> str:
    """An error in one line."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:160] if text else 'no message'}"


def ratios(row: Mapping[str, Any]) -> Row:
    """Speedups over cuDNN's eager step, by the medians, and memory relative to cuDNN's, where both were measured."""
    pairs = {
        "ratio": ("cudnn_ms", "timeloom_ms"),
        "graph_ratio": ("cudnn_ms", "graph_ms"),
        "forward_ratio": ("cudnn_forward_ms", "timeloom_forward_ms"),
        "forward_graph_ratio": ("cudnn_forward_ms", "graph_forward_ms"),
        "memory_ratio": ("timeloom_peak_bytes", "cudnn_peak_bytes"),
    }
    return {name: row[over] / row[under] for name, (over, under) in pairs.items() if over in row and row.get(under)}


def forward_of(layer: nn.Module, x: Tensor) -> Call:
    """The forward pass alone, without gradients."""

    @torch.no_grad()
    def forward() -> object:
        return layer(x)

    return forward


def _capture(ours: nn.Module, problem: Problem, row: Row) -> tuple[Call, SolveReport] | None:
    """A CUDA graph of timeloom's step and its report, if timeloom's own sweeps ran and can be captured."""
    assert isinstance(ours, Recurrent)
    report = ours.reports[0]
    if not report.solver.startswith("shooting") or report.fell_back:
        return None
    try:
        return captured(TrainingStep(ours, problem)), ours.reports[0]
    except RuntimeError as error:
        row["graph_fails"] = first_line(error)
        return None


def _forward(layers: Mapping[str, nn.Module], x: Tensor, graph: bool, seconds: float) -> Row:
    calls = {f"{name}_forward": forward_of(layer, x) for name, layer in layers.items()}
    learn(calls["timeloom_forward"])
    row: Row = {}
    if graph:
        try:
            calls["graph_forward"] = captured(calls["timeloom_forward"])
        except RuntimeError as error:
            row["forward_graph_fails"] = first_line(error)
    return row | times(time_in_turns(calls, event_seconds, seconds))


def _errors(case: Case, steps: Mapping[str, TrainingStep], problem: Problem, theirs: nn.Module) -> Row:
    """Largest error of outputs and gradients against float64 with the same rounded weights."""
    results = {name: step.results() for name, step in steps.items()}
    try:
        exact = exact_results(case, problem, theirs.state_dict())
    except RuntimeError as error:
        return {"truth_fails": first_line(error)}
    return {f"{name}_error": max(relative_errors(found, exact).values()) for name, found in results.items()}


def _floor(case: Case, dtype: torch.dtype, row: Row, ours: nn.Module) -> Row:
    whole = dtype == torch.float32 and str(row["solver"]) != "sequential"
    latency = step_latency(case.cell, case.hidden) if whole else None
    floor = floor_of(case, dtype.itemsize, solve_of(ours), bandwidth(), latency)
    best = float(row["graph_ms" if "graph_ms" in row else "timeloom_ms"])
    facts: Row = {"bandwidth_floor_ms": floor.bandwidth_ms, "latency_floor_ms": floor.latency_ms}
    return facts | {"floor_ms": floor.milliseconds, "over_floor": best / floor.milliseconds}


def times(timings: Mapping[str, Timing]) -> Row:
    """Medians and fastest times, as fields of a row."""
    row: Row = {}
    for name, timing in timings.items():
        row |= {f"{name}_ms": timing.median, f"{name}_min_ms": timing.fastest, f"{name}_samples": timing.samples}
    return row
