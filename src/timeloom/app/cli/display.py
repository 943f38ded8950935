"""What the terminal shows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from timeloom.app.train.objective import quality_name, quality_text
from timeloom.app.train.solved import Solved
from timeloom.app.train.trainer import Show, Trainer

CONSOLE = Console(highlight=False, soft_wrap=True)


@contextmanager
def training_bar(trainer: Trainer) -> Iterator[Show]:
    """A bar with loss and chunks of the latest step, one for torch's steps, and a line for every epoch."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=12),
        MofNCompleteColumn(),
        TextColumn("{task.fields[latest]}"),
        TimeRemainingColumn(),
    )
    task = trainer.splits.task
    with Progress(*columns, console=CONSOLE) as progress:
        bar = progress.add_task("timeloom", total=trainer.total, completed=trainer.progress.step, latest="")
        beside = None
        if trainer.compared:
            repeated = len(trainer.metrics.of("torch"))
            to_come = [step for step in trainer.compared if step >= trainer.progress.step]
            name, total = trainer.config.model.beside, repeated + len(to_come)
            beside = progress.add_task(name, total=total, completed=repeated, latest="")

        def show(row: dict[str, Any]) -> None:
            if row["kind"] == "step":
                solved = Solved(**{field.name: row[field.name] for field in fields(Solved)})
                latest = f"loss {row['loss']:.4f}, {row['seconds']:.3f} s, {solved.words()}"
                progress.update(bar, completed=row["step"], latest=latest)
            elif row["kind"] == "torch" and beside is not None:
                latest = f"loss {row['loss']:.4f}, {row['seconds']:.3f} s (the same steps)"
                progress.update(beside, advance=1, latest=latest)
            elif row["kind"] == "validation":
                mark = " (best so far)" if row["better"] else " (as good as the best)" if row["best"] else ""
                quality = f"{quality_name(task)} {quality_text(task, row['quality'])}"
                progress.console.print(
                    f"epoch {row['epoch']}: validation loss {row['loss']:.4f}, {quality}{mark}", markup=False
                )

        yield show
