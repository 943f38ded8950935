"""report.html: what a training did, drawn and told; what matters most stands first."""

from __future__ import annotations

import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from timeloom.app.data import Splits
from timeloom.app.data.records import NUMERIC
from timeloom.app.machine import NOTICEABLE
from timeloom.app.train import page
from timeloom.app.train.chart import Line, line_chart, scatter_chart
from timeloom.app.train.config import TrainConfig
from timeloom.app.train.metrics_file import Metrics
from timeloom.app.train.objective import quality_name, quality_text
from timeloom.app.train.summary import Summary

Rows = list[dict[str, Any]]
NARROW = 46
"""Letters that the head of a matrix may have beside another table."""


def write_report(path: Path, config: TrainConfig, splits: Splits, metrics: Metrics, summary: Summary) -> None:
    """Write the page of a run; it needs no other file."""
    steps, validations, by_torch = (metrics.of(kind) for kind in ("step", "validation", "torch"))
    name = Path(splits.source).name
    parts = [
        page.heading(f"{config.model.cell.upper()} on {name}", level=1),
        page.paragraph(
            f"{splits.task}, {len(splits.train)} training, {len(splits.valid)} validation and {len(splits.test)} test "
            f"series of {splits.channels} channel{'' if splits.channels == 1 else 's'}",
            soft=True,
        ),
        page.paragraph(f"{summary.made}, timeloom {summary.version}, {summary.device}", soft=True),
        page.code(summary.command),
        page.tiles(headline(summary)),
        *([page.notice(warning)] if (warning := summary.warning()) is not None else []),
        *([page.notice(summary.load_words())] if (summary.load["others"] or 0.0) >= NOTICEABLE else []),
        page.paragraph(summary.time_words()),
        page.paragraph(summary.parallel_words()),
        page.paragraph(summary.ending),
        page.heading("Learning"),
        page.charts(_learning(steps, validations, splits, summary)),
        *_answers(splits, summary),
        page.heading("Time and chunks"),
        page.tiles(_details(summary)),
        page.charts(_solving(steps, by_torch, summary)),
    ]
    if validations:
        parts += [page.paragraph("What the solver did in the last step:"), page.told(validations[-1]["solved"])]
    parts += [page.folded("All settings", page.table(_settings(config)))]
    page.write_page(path, f"timeloom: {name}", *parts)


def headline(summary: Summary) -> list[page.Tile]:
    """How good, how fast, and whether it ran in parallel."""
    task = summary.task
    guess = "always the mean" if task in NUMERIC else "always the most frequent class"
    found = [
        page.Tile(
            quality_text(task, summary.test_quality), f"test {quality_name(task)}",
            f"{guess}: {quality_text(task, summary.baseline)}",
        )
    ]  # fmt: skip
    if summary.speedup is not None and summary.speedup_range is not None:
        how = "faster a step than" if summary.speedup >= 1 else "the speed of"
        low, high = summary.speedup_range
        spread = f"from {low:.1f}x to {high:.1f}x over {summary.compared_steps} steps" if low < high else "one step"
        found.append(page.Tile(f"{summary.speedup:.1f}x", f"{how} {summary.beside}", spread))
    else:
        found.append(page.Tile(f"{summary.seconds_a_step:.3f} s", "a training step", f"{summary.beside} was not timed"))
    if summary.parallel_share:
        value, more = f"{summary.most_chunks:,} chunks", f"{summary.parallel_share:.0%} of the steps"
        return [*found, page.Tile(value, "of time ran in parallel", more)]
    return [*found, page.Tile("one chunk", "not cut in time", "short series are fastest so")]


def _details(summary: Summary) -> list[page.Tile]:
    tiles = [
        page.Tile(f"{summary.seconds_a_step:.3f} s", "a training step, median"),
        page.Tile(f"{summary.steps:,}", "training steps"),
        page.Tile(f"{summary.data_share:.1%}", "of the time spent waiting for data"),
    ]
    if summary.parallel_share:
        tiles.append(page.Tile(str(summary.most_sweeps), "sweeps at most"))
        tiles.append(page.Tile(str(summary.fallbacks), "solves finished in one chunk"))
    return tiles


def _learning(steps: Rows, validations: Rows, splits: Splits, summary: Summary) -> list[str]:
    """Loss, quality and learning rate over steps; loss over time, with the same losses at torch's pace."""
    name = quality_name(splits.task)
    losses = [_line("training", steps, "step", "loss"), _line("validation", validations, "step", "loss", dots=True)]
    quality = [_line("validation", validations, "step", "quality", dots=True)]
    over_time = [_line("training", steps, "elapsed", "loss")]
    if summary.torch_seconds_a_step is not None:
        times = [row["step"] * summary.torch_seconds_a_step for row in steps]
        over_time.append(Line(f"at the pace of {summary.beside}", times, [row["loss"] for row in steps], dashed=True))
    pace, rate = len(over_time) > 1, [_line("learning rate", steps, "step", "lr")]
    return [
        line_chart(losses, "Loss", "training step", "loss"),
        line_chart(quality, name.capitalize(), "training step", name),
        line_chart(over_time, "Loss over time", "training time in seconds", "loss", log_x=pace),
        line_chart(rate, "Learning rate", "training step", "rate"),
    ]


def _answers(splits: Splits, summary: Summary) -> list[str]:
    """The test series: each class by itself, or predicted numbers beside the true ones."""
    parts = [page.heading("Answers on the test series")]
    if summary.answers:
        pairs = [(true, answer) for true, answer in summary.answers]
        parts.append(page.paragraph(f"Mean absolute error {summary.mean_error:.4g}."))
        return [*parts, page.charts([scatter_chart(pairs, "Predicted against true", "true", "predicted")])]
    if not summary.confusion:
        return []
    rows = [
        (name, str(sum(row)), _share(found), _share(right))
        for name, row, found, right in zip(
            splits.classes, summary.confusion, summary.recalls, summary.precisions, strict=True
        )
    ]
    header = ("class", "true ones", "found", "right when answered")
    made = [page.table(rows, header, numbers=True), page.counts(splits.classes, summary.confusion)]
    narrow = sum(map(len, splits.classes)) + 3 * len(splits.classes) <= NARROW
    return [*parts, page.side_by_side(made)] if narrow else [*parts, *made]


def _share(value: float) -> str:
    return "–" if value != value else f"{value:.0%}"


def _solving(steps: Rows, by_torch: Rows, summary: Summary) -> list[str]:
    times = [_line("timeloom", steps, "step", "seconds"), _line(summary.beside, by_torch, "step", "seconds", dots=True)]
    made = [line_chart(times, "Time of a training step", "training step", "seconds", log_y=True)]
    if not summary.parallel_share:
        return made
    sweeps = [
        _line("forward", steps, "step", "sweeps"),
        _line("backward", steps, "step", "backward_sweeps", dashed=True),
    ]
    residuals = [_line("jump", steps, "step", "residual")]
    made.append(line_chart(sweeps, "Sweeps until converged", "training step", "sweeps"))
    if any(row["residual"] > 0 for row in steps):
        made.append(line_chart(residuals, "Largest jump left", "training step", "relative jump", log_y=True))
    return made


def _line(label: str, rows: Rows, x: str, y: str, dots: bool = False, dashed: bool = False) -> Line:
    rows = [row for row in rows if row[x] is not None and row[y] is not None]
    return Line(label, [row[x] for row in rows], [row[y] for row in rows], dots, dashed)


def _settings(config: TrainConfig) -> list[tuple[str, str]]:
    values = asdict(config)
    nested = {**values.pop("model"), **values.pop("optim")}
    machine = {"python": platform.python_version(), "torch": torch.__version__, "processor": platform.machine()}
    return [(name.replace("_", " "), str(value)) for name, value in {**values, **nested, **machine}.items()]
