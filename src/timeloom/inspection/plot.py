"""Draws how solvers converged: residuals by sweep or cycle, and level by level where there are levels."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from timeloom.report import SolveReport


def plot(solved: Mapping[str, SolveReport], path: str | Path) -> None:
    """Draw one layer's reports, by the solver's name. The kind of picture is the path's ending: .png, .svg, .pdf."""
    from matplotlib.figure import Figure  # drawn without a display; imported only where it is used
    from matplotlib.ticker import MaxNLocator

    levelled = {name: report for name, report in solved.items() if _has_levels(report)}
    columns = 1 + len(levelled)
    figure = Figure(figsize=(4.2 * columns, 6.4), layout="constrained")
    axes = figure.subplots(2, columns, squeeze=False, sharey="row")
    for row, way in enumerate(("forward", "backward")):
        _draw_solvers(axes[row][0], way, {name: _way(report, way) for name, report in solved.items()})
        for column, (name, report) in enumerate(levelled.items(), start=1):
            _draw_levels(axes[row][column], f"{name}, {way}", _way(report, way))
    for axis in axes.flat:
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.savefig(path, dpi=120)


def _way(report: SolveReport, way: str) -> SolveReport | None:
    return report if way == "forward" else report.backward


def _has_levels(report: SolveReport) -> bool:
    return any(len(levels) > 1 for levels in report.levels)


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
