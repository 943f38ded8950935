"""report.html: what a training did, drawn and told."""

from __future__ import annotations

import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from timeloom.app.data import Splits
from timeloom.app.train import page
from timeloom.app.train.chart import Line, line_chart
from timeloom.app.train.config import TrainConfig
from timeloom.app.train.metrics import Metrics
from timeloom.app.train.objective import quality_name, quality_text
from timeloom.app.train.summary import Summary

Rows = list[dict[str, Any]]


def write_report(path: Path, config: TrainConfig, splits: Splits, metrics: Metrics, summary: Summary) -> None:
    """Write the page of a run; it needs no other file."""
    steps, validations, by_torch = (metrics.of(kind) for kind in ("step", "validation", "torch"))
    name = Path(splits.source).name
    parts = [
        page.heading(f"{config.model.cell.upper()} on {name}", level=1),
        page.paragraph(
            f"{splits.task}, {len(splits.train)} training, {len(splits.valid)} validation and {len(splits.test)} test "
            f"series of {splits.channels} channels; {summary.device}, {summary.threads} CPU thread(s)",
            soft=True,
        ),
        page.tiles(_numbers(summary)),
        *[page.paragraph(line) for line in summary.lines()],
        page.heading("Learning"),
        page.charts(_learning(steps, validations, splits, summary)),
        page.heading("Solver and time"),
        page.charts(_solving(steps, by_torch, summary)),
    ]
    if validations:
        parts += [
            page.paragraph("What the solver did in the last step:"),
            page.told(validations[-1]["solved"]),
        ]
    if summary.confusion:
        parts += [page.heading("Answers on the test series"), page.counts(splits.classes, summary.confusion)]
    parts += [page.heading("Configuration"), page.table(_settings(config))]
    page.write_page(path, f"timeloom: {name}", *parts)


def _numbers(summary: Summary) -> list[tuple[str, str]]:
    task = summary.task
    numbers = [(quality_text(task, summary.test_quality), f"test {quality_name(task)}")]
    if summary.speedup is not None:
        how = "faster a step than" if summary.speedup >= 1 else "the speed of"
        meaning = f"{how} {summary.beside} (best of {summary.compared_steps})"
        numbers.append((f"{summary.speedup:.1f}x", meaning))
    return [
        *numbers,
        (f"{summary.seconds_a_step:.3f} s", "a training step, median"),
        (f"{summary.steps:,}", "training steps"),
        (str(summary.most_sweeps), "sweeps at most"),
        (str(summary.fallbacks), "fallbacks to sequential"),
        (f"{summary.data_share:.1%}", "of the time spent waiting for data"),
    ]


def _learning(steps: Rows, validations: Rows, splits: Splits, summary: Summary) -> list[str]:
    """Loss and quality over steps and over time; over time also the same losses at torch's pace."""
    name = quality_name(splits.task)
    at_torchs = []
    if summary.torch_seconds_a_step is not None:
        times = [row["step"] * summary.torch_seconds_a_step for row in steps]
        losses = [row["loss"] for row in steps]
        at_torchs.append(Line(f"training at the pace of {summary.beside}", times, losses, dashed=True))
    made = []
    for key, label, title, more in (
        ("step", "training step", "over steps", []),
        ("elapsed", "training time in seconds", "over time", at_torchs),
    ):
        losses = [_line("training", steps, key, "loss"), _line("validation", validations, key, "loss", dots=True)]
        made.append(line_chart([*losses, *more], f"Loss {title}", label, "loss", log_x=bool(more)))
        quality = [_line("validation", validations, key, "quality", dots=True)]
        made.append(line_chart(quality, f"{name.capitalize()} {title}", label, name))
    return made


def _solving(steps: Rows, by_torch: Rows, summary: Summary) -> list[str]:
    sweeps = [
        _line("forward", steps, "step", "sweeps"),
        _line("backward", steps, "step", "backward_sweeps", dashed=True),
    ]
    times = [_line("timeloom", steps, "step", "seconds"), _line(summary.beside, by_torch, "step", "seconds", dots=True)]
    residuals = [_line("residual", steps, "step", "residual")]
    return [
        line_chart(times, "Time of a training step", "training step", "seconds", log_y=True),
        line_chart(sweeps, "Sweeps until converged", "training step", "sweeps"),
        line_chart(residuals, "Largest jump left between chunks", "training step", "relative jump", log_y=True),
    ]


def _line(label: str, rows: Rows, x: str, y: str, dots: bool = False, dashed: bool = False) -> Line:
    return Line(label, [row[x] for row in rows], [row[y] for row in rows], dots, dashed)


def _settings(config: TrainConfig) -> list[tuple[str, str]]:
    values = asdict(config)
    nested = {**values.pop("model"), **values.pop("optim")}
    machine = {"python": platform.python_version(), "torch": torch.__version__, "processor": platform.machine()}
    return [(name.replace("_", " "), str(value)) for name, value in {**values, **nested, **machine}.items()]
