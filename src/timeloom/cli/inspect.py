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

from timeloom.cli.display import CONSOLE
from timeloom.data import load
from timeloom.train import checkpoint, page
from timeloom.train.chart import Line, line_chart
from timeloom.train.config import at_least
from timeloom.train.inference import check_channels, restore
from timeloom.train.inspection import Inspection, Trial, inspect_model
from timeloom.train.trainer import device_of

HEADER = ("solver", "sweeps", "backward", "converged", "ms", "difference")


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
    """Try the published methods over single steps too (DEER, ELK, Picard …): minutes on long series."""
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
    loaded = checkpoint.load(options.run)
    device = device_of(options.device)
    model = restore(loaded, device)
    table = load(options.data or loaded.config.data)
    check_channels(loaded, table)
    series = [record.values for record in table.records[: options.batch]]
    lengths = torch.tensor([len(values) for values in series])
    inputs = pad_sequence(series).to(device, model.offset.dtype)
    found = inspect_model(model, inputs, None if (lengths == lengths[0]).all() else lengths, options.every)
    folder = options.run if options.run.is_dir() else options.run.parent
    out = Path(options.out) if options.out else folder / "inspect.html"
    write_inspection(out, found, str(options.run))
    shown = Table(*HEADER, min_width=70, title=f"{found.steps:,} steps, batch {found.batch}, chunks of {found.chunk}")
    for trial in found.trials:
        shown.add_row(*row(trial))
    CONSOLE.print(shown)
    CONSOLE.print("\n".join([*found.words(), f"Picture: {out}"]), markup=False)
    return 0


def row(trial: Trial) -> tuple[str, ...]:
    """A trial as text."""
    forward, backward = trial.sweeps()
    state = "fell back" if trial.fell_back else "yes"
    return (trial.name, str(forward), str(backward), state, f"{1e3 * trial.seconds:.1f}", f"{trial.difference:.1e}")


def write_inspection(path: Path, found: Inspection, name: str) -> None:
    """The page: the table, a chart of the residuals of every layer, and the words."""
    parts = [
        page.heading(f"Solvers on {name}", level=1),
        page.paragraph(
            f"{found.steps:,} steps, batch {found.batch}; shooting from plain guesses in chunks of {found.chunk}"
        ),
        page.table([row(trial) for trial in found.trials], HEADER),
        page.heading("What auto does, and why"),
        *[page.paragraph(text) for text in found.words()],
        page.heading("Largest jump between chunks after each sweep"),
        page.charts(residual_charts(found)),
    ]
    page.write_page(path, f"timeloom: solvers on {name}", *parts)


def residual_charts(found: Inspection) -> list[str]:
    """A chart for each layer and direction, forward and backward."""
    made = []
    for index, (where, _) in enumerate(found.trials[0].reports):
        for backward in (False, True):
            reports = [
                (t.name, t.reports[index][1].backward if backward else t.reports[index][1]) for t in found.trials
            ]
            lines = [
                Line(name.removeprefix("shooting "), range(1, len(report.residuals) + 1), report.residuals, dots=True)
                for name, report in reports
                if report is not None and report.residuals
            ]
            title = f"{where} {'backward' if backward else 'forward'}"
            made.append(line_chart(lines, title, "sweep", "relative jump", log_y=True))
    return made
