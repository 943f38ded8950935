"""`timeloom compare`: several runs side by side, as a table and as a page of overlaid curves."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.table import Table

from timeloom.app.cli.display import CONSOLE
from timeloom.app.errors import InputError
from timeloom.app.files import need_folder
from timeloom.app.train import config_file, metrics_file, page
from timeloom.app.train.chart import Line, line_chart
from timeloom.app.train.objective import quality_name, quality_text
from timeloom.app.train.run_files import SUMMARY, folds_of
from timeloom.app.train.summary import Summary


@dataclass(frozen=True)
class Options:
    """Options of `timeloom compare`."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Folders of runs, two or more."""
    out: Path = Path("compare.html")
    """Page to write."""


@dataclass(frozen=True)
class Run:
    """A finished run."""

    name: str
    summary: Summary
    rows: list[dict[str, Any]]
    settings: dict[str, str]

    def line(self, kind: str, x: str, y: str, dots: bool = False) -> Line:
        rows = [row for row in self.rows if row["kind"] == kind and row[y] is not None]
        return Line(self.name, [row[x] for row in rows], [row[y] for row in rows], dots)


def main(arguments: Sequence[str]) -> int:
    options = tyro.cli(
        Options, args=list(arguments), prog="timeloom compare", description="Shows several finished runs side by side."
    )
    if len(options.runs) < 2:
        raise InputError(f"give two runs or more, got {len(options.runs)}")
    need_folder(options.out)
    runs = [_read(path, name) for path, name in zip(options.runs, _names(options.runs), strict=True)]
    if len({run.summary.task for run in runs}) > 1:
        tasks = ", ".join(sorted({run.summary.task for run in runs}))
        raise InputError(f"the runs have different tasks ({tasks}); compare those of one task")
    header, rows = _table(runs)
    shown = Table(*header)
    for row in rows:
        shown.add_row(*row)
    CONSOLE.print(shown)
    page.write_page(options.out, "timeloom: runs compared", *_parts(runs, header, rows))
    CONSOLE.print(f"Page: {options.out}", markup=False)
    return 0


def _names(paths: Sequence[Path]) -> list[str]:
    """The last part of each path, or all of it where that is not enough to tell them apart."""
    short = [path.resolve().name for path in paths]
    return short if len(set(short)) == len(short) else [str(path) for path in paths]


def _read(path: Path, name: str) -> Run:
    if folds := folds_of(path):
        raise InputError(
            f"{path} holds {len(folds)} folds, each a run of its own; compare those: timeloom compare "
            f"{shlex.join(map(str, folds))}"
        )
    try:
        values = json.loads((path / SUMMARY).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: no {SUMMARY}; give the folder of a run that has ended") from None
    except (OSError, json.JSONDecodeError) as error:
        raise InputError(f"{path / SUMMARY}: cannot be read ({error})") from None
    needed = [field.name for field in fields(Summary) if field.default is MISSING and field.default_factory is MISSING]
    missing = [name for name in needed if name not in values]
    if missing:
        raise InputError(f"{path}: a run of another version of timeloom (no {missing[0]!r}); train it again")
    numbers: dict[str, Any] = {
        key: float("nan") if value is None and key == "test_quality" else value for key, value in values.items()
    }
    config = config_file.read_config(path / config_file.NAME)
    given = {**config.to_dict(), **config.to_dict()["model"], **config.to_dict()["optim"]}
    settings = {key: str(value) for key, value in given.items() if key not in ("model", "optim", "out")}
    return Run(name, Summary(**numbers), metrics_file.read(path / metrics_file.NAME), settings)


def _table(runs: Sequence[Run]) -> tuple[list[str], list[list[str]]]:
    task = runs[0].summary.task
    rows = [
        [f"test {quality_name(task)}", *(quality_text(task, run.summary.test_quality) for run in runs)],
        ["test loss", *(f"{run.summary.test_loss:.4f}" for run in runs)],
        ["best epoch", *(str(run.summary.best_epoch) for run in runs)],
        ["steps", *(f"{run.summary.steps:,}" for run in runs)],
        ["seconds a step", *(f"{run.summary.seconds_a_step:.3f}" for run in runs)],
        ["pace", *(run.summary.pace() for run in runs)],
        ["ran", *(_ran(run.summary) for run in runs)],
        ["other programs", *(_others(run.summary) for run in runs)],
    ]
    differing = [key for key in runs[0].settings if len({run.settings.get(key) for run in runs}) > 1]
    rows += [[key.replace("_", " "), *(run.settings.get(key, "–") for run in runs)] for key in differing]
    return ["", *(run.name for run in runs)], rows


def _ran(summary: Summary) -> str:
    return f"in parallel over {summary.most_chunks:,} chunks" if summary.parallel_share else "one chunk"


def _others(summary: Summary) -> str:
    others = summary.load["others"]
    return "not known" if others is None else f"{others:.1f} of {summary.load['cores']} cores"


def _parts(runs: Sequence[Run], header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    name = quality_name(runs[0].summary.task)
    charts = [
        line_chart([run.line("step", "step", "loss") for run in runs], "Training loss", "training step", "loss"),
        line_chart(
            [run.line("validation", "step", "loss", True) for run in runs], "Validation loss", "training step", "loss"
        ),
        line_chart(
            [run.line("validation", "step", "quality", True) for run in runs], name.capitalize(), "training step", name
        ),
        line_chart(
            [run.line("validation", "elapsed", "quality", True) for run in runs], f"{name.capitalize()} over time",
            "training time in seconds", name,
        ),
        line_chart([run.line("step", "step", "seconds") for run in runs], "Time of a training step", "training step",
                   "seconds", log_y=True),
        line_chart([run.line("step", "step", "lr") for run in runs], "Learning rate", "training step", "rate"),
    ]  # fmt: skip
    return [
        page.heading(f"{len(runs)} runs side by side", level=1),
        page.paragraph("Settings that all of them share are left out.", soft=True),
        page.table(rows, header, numbers=True),
        page.charts(charts),
    ]
