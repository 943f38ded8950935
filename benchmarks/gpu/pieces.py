"""The pieces of the GPU benchmark: what each measures, and how its table looks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from benchmarks.cases import NEVER_SLOWER, Case
from benchmarks.gpu import clock, compare, contenders, lists, race, whole_runs
from benchmarks.gpu.compare import FULL, Depth, Row
from benchmarks.gpu.contenders import Contender
from benchmarks.gpu.layouts import (
    COLUMNS,
    CONTENDER_COLUMNS,
    CONTENDER_NOTE,
    FORWARD_COLUMNS,
    GRID_COLUMNS,
    NOTE,
    RUN_COLUMNS,
    RUN_NOTE,
)
from benchmarks.gpu.table import Column
from benchmarks.gpu.worker import NO_ANSWER, Worker

SHARE_WITH_ERRORS = 3
"""Every n-th point of the grid is compared with float64."""
LONGEST = {"compile": 200.0, "jax": 120.0}
"""Seconds that a contender may take for one case, by its group."""
LONGEST_OTHERS = 90.0


@dataclass(frozen=True)
class Job:
    """One row to be measured."""

    name: str
    measure: Callable[[float], Row]
    """Takes the seconds that are left."""
    warms: tuple[Case, str] | None = None
    """The case and dtype whose kernels can be compiled beforehand."""


@dataclass(frozen=True)
class Piece:
    """A few minutes of measurements, and their table."""

    name: str
    title: str
    note: str
    columns: Sequence[Column]
    jobs: Sequence[Job]
    more: Mapping[str, Sequence[Column]] = field(default_factory=dict)
    """Further tables of the same rows, by their headings."""
    left_out: dict[str, str] = field(default_factory=dict)
    verdict: Callable[[Sequence[Row]], list[str]] = lambda rows: []
    finish: Callable[[], None] = lambda: None
    """What to do when all is measured, or the run is stopped."""


def _compared(cases: Sequence[tuple[Case, str]], depth: Depth = FULL) -> list[Job]:
    def job(case: Case, dtype: str) -> Job:
        name = str(compare.describe(case, dtype)["name"])
        return Job(name, lambda left: compare.measure(case, dtype, depth), (case, dtype))

    return [job(case, dtype) for case, dtype in cases]


def goals_met(rows: Sequence[Row]) -> list[str]:
    """How many goals are met, ignoring graphs that are not certified, and how many errors are within twice cuDNN's."""
    measured = [row for row in rows if "cudnn_ms" in row]
    in_graphs = [row.get("graph_ratio", 0.0) if row.get("graph_certified", True) else 0.0 for row in measured]
    best = [max(row["ratio"], ratio) >= row["goal"] for row, ratio in zip(measured, in_graphs, strict=True)]
    errors = [row["timeloom_error"] <= 2 * row["cudnn_error"] for row in measured if "cudnn_error" in row]
    met = f"{sum(best)} of {len(best)} goals met, in a graph or outside"
    return ["", f"{met}; error within twice cuDNN's own in {sum(errors)} of {len(errors)}."]


def lowest(rows: Sequence[Row]) -> list[str]:
    """The lowest ratio of the grid, and every point below 0.95."""
    measured = sorted((row for row in rows if "ratio" in row), key=lambda row: float(row["ratio"]))
    if not measured:
        return []
    below = [row for row in measured if row["ratio"] < NEVER_SLOWER]
    refused = [row["case"] for row in rows if "cudnn_refuses" in row]
    lines = ["", f"Lowest ratio: {measured[0]['ratio']:.3f} ({measured[0]['case']}), of {len(measured)} points."]
    listed = "; ".join(f"{row['case']} {row['ratio']:.3f}" for row in below)
    lines += ["", f"Below {NEVER_SLOWER}: {listed or 'none'}."]
    return lines + (["", f"cuDNN refuses: {'; '.join(refused)}."] if refused else [])


def _headline() -> Piece:
    jobs = _compared([(case, "float32") for case in lists.headline()])
    more = {"Forward alone, without gradients:": FORWARD_COLUMNS}
    return Piece("headline", "Forward + backward on a GPU", NOTE, COLUMNS, jobs, more, verdict=goals_met)


def _regimes() -> Piece:
    jobs = _compared([(case, "float32") for case in lists.regimes()], replace(FULL, forward=False))
    note = f"{NOTE} `trained`: after 60 steps of Adam on a memory task (`benchmarks/trained.py`)."
    return Piece("regimes", "Long memory, trained and strong weights on a GPU", note, COLUMNS, jobs, verdict=goals_met)


def _half() -> Piece:
    jobs = _compared(lists.half(), replace(FULL, forward=False))
    note = f"{NOTE} In half precision the floor is that of the bandwidth alone."
    return Piece("half", "Half precision on a GPU", note, COLUMNS, jobs, verdict=goals_met)


def _grid() -> Piece:
    cases, left_out = lists.grid()
    eager = Depth(forward=False, graph=False, truth=False, memory=False, seconds=0.5)
    jobs = []
    for index, case in enumerate(cases):
        depth = replace(eager, truth=index % SHARE_WITH_ERRORS == 0)
        jobs += _compared([(case, "float32")], depth)
    note = f"{NOTE} Eager on both sides; errors on every third point."
    return Piece("grid", "All sizes on a GPU", note, GRID_COLUMNS, jobs, left_out=left_out, verdict=lowest)


def _raced(pairs: Sequence[tuple[Contender, Case]]) -> tuple[list[Job], dict[str, str], Callable[[], None]]:
    workers = {contender.group: Worker() for contender, _ in pairs}
    silent: dict[str, str] = {}
    """Contenders that gave no answer in time, with the case: later cases are larger, and would not do better."""

    def measure(contender: Contender, case: Case, left: float) -> Row:
        if contender.name in silent:
            return race.begin(contender, case) | {"error": f"not tried after no answer on {silent[contender.name]}"}
        longest = LONGEST.get(contender.group, LONGEST_OTHERS)
        row = workers[contender.group].measure(contender, case, min(left, longest))
        if left > longest and str(row.get("error", "")).startswith(NO_ANSWER):
            silent[contender.name] = case.name
        return row

    jobs, absent = [], {}
    for contender, case in pairs:
        name = race.name_of(contender, case)
        if contender.absent:
            absent[name] = f"no {contender.needs} here"
            continue
        jobs.append(Job(name, partial(measure, contender, case)))

    def finish() -> None:
        for worker in workers.values():
            worker.close()

    return jobs, absent, finish


def _solvers() -> Piece:
    pairs = [(contender, case) for case in lists.solvers() for contender in contenders.SOLVERS]
    jobs, absent, finish = _raced(pairs)
    layout = (CONTENDER_NOTE, CONTENDER_COLUMNS, jobs)
    return Piece("solvers", "timeloom's solvers on a GPU", *layout, left_out=absent, finish=finish)


def _rivals() -> Piece:
    pairs = [(contender, case) for contender in contenders.RIVALS for case in contenders.rival_cases(contender)]
    jobs, absent, finish = _raced(pairs)
    note = f"{CONTENDER_NOTE} A loop under torch.compile is unrolled, so it is measured at the lengths it compiles for."
    layout = (note, CONTENDER_COLUMNS, jobs)
    return Piece("rivals", "timeloom and others on a GPU", *layout, left_out=absent, finish=finish)


def _runs() -> Piece:
    jobs = [Job(run.name, partial(whole_runs.measure, run, clock.DEVICE)) for run in whole_runs.RUNS]
    return Piece("runs", "Whole training runs on a GPU", RUN_NOTE, RUN_COLUMNS, jobs)


PIECES: dict[str, Callable[[], Piece]] = {
    "headline": _headline,
    "regimes": _regimes,
    "half": _half,
    "grid": _grid,
    "solvers": _solvers,
    "rivals": _rivals,
    "runs": _runs,
}
