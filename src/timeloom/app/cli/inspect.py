"""`timeloom inspect`: which solver takes how many sweeps on a trained model, and what auto does and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import tyro
from rich.table import Table
from torch.nn.utils.rnn import pad_sequence

from timeloom.app.cli.display import CONSOLE
from timeloom.app.device import device_of
from timeloom.app.files import need_folder
from timeloom.app.train import checkpoint, page
from timeloom.app.train.chart import Line, bar_chart, line_chart
from timeloom.app.train.config import at_least
from timeloom.app.train.inference import data_of, restore
from timeloom.app.train.timeline import timeline
from timeloom.inspection.outcome import Inspection
from timeloom.inspection.trials import inspect
from timeloom.report import SolveReport

SECONDS = 2.0
"""Time that one method over single steps may take, about."""


@dataclass(frozen=True)
class Options:
    """Options of `timeloom inspect`."""

    run: Annotated[Path, tyro.conf.Positional]
    """Folder of a run, or a checkpoint in it."""
    data: str = ""
    """Series to look at; by default the run's own."""
    batch: int = 4
    """Series in the batch: the first ones of the data."""
    every: bool = False
    """Try the published methods over single steps too (DEER, ELK, Picard …), each for a few seconds, on as many steps
    of one series as it can do in them."""
    out: str = ""
    """Page to write; by default inspect.html in the folder of the run."""
    device: str = "auto"
    """cpu, cuda, …"""


def main(arguments: Sequence[str]) -> int:
    options = tyro.cli(
        Options,
        args=list(arguments),
        prog="timeloom inspect",
        description="Tries every solver on a trained model and one batch, and says what auto does and why.",
    )
    at_least("batch", options.batch, 1)
    if options.out:
        need_folder(Path(options.out))
    loaded = checkpoint.load(options.run)
    device = device_of(options.device)
    model = restore(loaded, device)
    table = data_of(loaded, options.data)
    series = [record.values for record in table.records[: options.batch]]
    series.sort(key=len, reverse=True)  # the first one, of which slow methods get a stretch, has no padding
    lengths = torch.tensor([len(values) for values in series])
    inputs = pad_sequence(series).to(device, model.offset.dtype)
    seconds = SECONDS if options.every else None
    found = inspect(model, inputs, None if (lengths == lengths[0]).all() else lengths, seconds=seconds)
    folder = options.run if options.run.is_dir() else options.run.parent
    out = Path(options.out) if options.out else folder / "inspect.html"
    header, *rows = found.rows()
    shown = Table(*header, min_width=70, title=f"{found.steps:,} steps, batch {found.batch}, chunks of {found.chunk}")
    for row in rows:
        shown.add_row(*row)
    CONSOLE.print(shown)
    CONSOLE.print("\n".join(found.words()), markup=False)
    write_inspection(out, found, str(options.run))
    CONSOLE.print(f"Picture: {out}", markup=False)
    return 0


def write_inspection(path: Path, found: Inspection, name: str) -> None:
    """The page: what `auto` does, drawn and told, all solvers in a table, and the residuals of every layer."""
    header, *rows = found.rows()
    auto = found.trials[1]
    solves = [
        (f"{where} {way}", solve)
        for where, report in auto.reports
        for way, solve in (("forward", report), ("backward", report.backward))
        if solve is not None
    ]
    times = [(trial.name, 1e3 * trial.seconds) for trial in found.trials if trial.stretch is None]
    parts = [
        page.heading(f"Solvers on {name}", level=1),
        page.paragraph(
            f"{found.steps:,} steps, batch {found.batch}; shooting from plain guesses in chunks of {found.chunk}"
        ),
        page.heading("What auto does, and why"),
        page.block(timeline(solves, found.steps)),
        *[page.paragraph(text) for text in found.words()],
        page.heading("All solvers"),
        page.charts([bar_chart(times, "A forward and backward pass", "ms")]),
        page.table(rows, header),
        page.heading("Largest jump between chunks after each sweep"),
        page.paragraph("No jump at all is drawn a hundred times below the tolerance.", soft=True),
        page.charts(residual_charts(found)),
    ]
    page.write_page(path, f"timeloom: solvers on {name}", *parts)


def residual_charts(found: Inspection) -> list[str]:
    """A chart for each layer and direction, forward and backward."""
    made = []
    for index, (where, _) in enumerate(found.trials[0].reports):
        for way in ("forward", "backward"):
            lines = []
            for trial in found.trials:
                report = trial.reports[index][1]
                solve = report if way == "forward" else report.backward
                if solve is not None and solve.residuals:
                    lines.append(_residuals(trial.name.removeprefix("shooting "), solve))
            made.append(line_chart(lines, f"{where} {way}", "sweep", "relative jump", log_y=True))
    return made


def _residuals(name: str, solve: SolveReport) -> Line:
    """Jumps by sweep; one of exactly zero is drawn a hundred times below the tolerance."""
    floor = solve.tolerance / 100
    return Line(name, range(1, len(solve.residuals) + 1), [max(value, floor) for value in solve.residuals], dots=True)
