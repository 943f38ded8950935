"""`inspect`: how solvers converge on a given module and input, side by side, as a table and as a picture."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from timeloom.nn.base import Recurrent
from timeloom.report import SolveReport
from timeloom.solvers.base import Solver
from timeloom.solvers.mgrit import MGRIT
from timeloom.solvers.planning import names


@dataclass(frozen=True)
class Inspection:
    """What every solver did on the same problem."""

    reports: dict[str, list[SolveReport]]
    """By the solver's name: one report for each layer and direction, each with its backward report."""

    def __str__(self) -> str:
        lines = []
        for name, reports in self.reports.items():
            for index, report in enumerate(reports):
                label = name if len(reports) == 1 else f"{name} [{index}]"
                for way, one in (("forward", report), ("backward", report.backward)):
                    if one is not None:
                        lines.append(f"{label:<24} {way:<8} {_outcome(one)}")
        return "\n".join(lines)

    def plot(self, path: str | Path, layer: int = 0) -> None:
        """Draw one layer (and direction): residuals by sweep or cycle, and level by level where there are levels.

        The kind of picture is the path's ending: .png, .svg, .pdf.
        """
        from matplotlib.figure import Figure  # drawn without a display; imported only where it is used
        from matplotlib.ticker import MaxNLocator

        levelled = {name: reports[layer] for name, reports in self.reports.items() if _has_levels(reports[layer])}
        columns = 1 + len(levelled)
        figure = Figure(figsize=(4.2 * columns, 6.4), layout="constrained")
        axes = figure.subplots(2, columns, squeeze=False, sharey="row")
        for row, way in enumerate(("forward", "backward")):
            _draw_solvers(
                axes[row][0], way, {name: _way(reports[layer], way) for name, reports in self.reports.items()}
            )
            for column, (name, report) in enumerate(levelled.items(), start=1):
                _draw_levels(axes[row][column], f"{name}, {way}", _way(report, way))
        for axis in axes.flat:
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        figure.savefig(path, dpi=120)


def inspect(module: Recurrent, x: Any, hx: Any = None, solvers: Mapping[str, str | Solver] | None = None) -> Inspection:
    """Run a module's forward and backward pass with each of several solvers, on copies: the module is left as it is.

    solvers: by the name to show; by default every named one that iterates, multigrid with many levels, and the
        multigrid paper's setting. The loss is the sum of all outputs.
    """
    if not isinstance(module, Recurrent):
        raise TypeError(f"module must be one of timeloom's recurrent modules, got {type(module).__name__}")
    reports = {}
    for name, solver in (solvers or _usual(module)).items():
        twin = copy.deepcopy(module)
        twin.solver = solver
        with torch.enable_grad():
            output, _ = twin(x, hx)
            _data(output).sum().backward()
        reports[name] = twin.reports
    return Inspection(reports)


def _usual(module: Recurrent) -> dict[str, str | Solver]:
    named: dict[str, str | Solver] = {name: name for name in names() if name not in ("auto", "sequential")}
    paper = MGRIT.paper() if module.mode == "GRU" else MGRIT.paper(coarse="frozen")
    return {**named, "mgrit, 4 a level": MGRIT(coarsening=4), "mgrit as published": paper}


def _data(output: Any) -> Tensor:
    data: Tensor = output if isinstance(output, Tensor) else output.data
    return data


def _way(report: SolveReport, way: str) -> SolveReport | None:
    return report if way == "forward" else report.backward


def _has_levels(report: SolveReport) -> bool:
    return any(len(levels) > 1 for levels in report.levels)


def _outcome(report: SolveReport) -> str:
    residuals = " ".join(f"{value:.0e}" for value in report.residuals) or "exact, one step after the other"
    state = " (fell back)" if report.fell_back else "" if report.converged else " (inexact)"
    return f"{report.iterations:>3} {report.unit}{state}: {residuals}"


def _draw_solvers(axis: Any, way: str, reports: Mapping[str, SolveReport | None]) -> None:
    tolerance = 0.0
    for name, report in reports.items():
        if report is not None and report.residuals:
            values = [max(value, 1e-17) for value in report.residuals]
            marker = "x" if report.fell_back else "o"
            axis.semilogy(range(1, len(values) + 1), values, marker=marker, label=name)
            tolerance = max(tolerance, report.tolerance)
    if tolerance:
        axis.axhline(tolerance, color="grey", linestyle=":", label="tolerance")
    axis.set_title(f"{way} (×: fell back)")
    axis.set_xlabel("sweep or cycle")
    axis.set_ylabel("relative residual")
    axis.legend(fontsize="small")


def _draw_levels(axis: Any, title: str, report: SolveReport | None) -> None:
    levels = () if report is None else report.levels
    for level in range(max((len(cycle) for cycle in levels), default=0)):
        points = [(cycle, values[level]) for cycle, values in enumerate(levels, start=1) if len(values) > level]
        axis.semilogy([p[0] for p in points], [max(p[1], 1e-17) for p in points], marker="o", label=f"level {level}")
    axis.set_title(title, fontsize="medium")
    axis.set_xlabel("cycle")
    if levels:
        axis.legend(fontsize="small")
