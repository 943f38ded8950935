"""`timeloom predict`: a trained model's answers for new series, as a CSV file."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro
from torch import Tensor

from timeloom.app.cli.display import CONSOLE
from timeloom.app.data.records import PER_STEP
from timeloom.app.device import device_of
from timeloom.app.files import need_folder, write_text
from timeloom.app.train import checkpoint
from timeloom.app.train.agreement import compare
from timeloom.app.train.checkpoint import Checkpoint
from timeloom.app.train.config import at_least
from timeloom.app.train.inference import answer, data_of, restore


@dataclass(frozen=True)
class Options:
    """Options of `timeloom predict`."""

    run: Annotated[Path, tyro.conf.Positional]
    """Folder of a run, or a checkpoint in it."""
    data: str
    """A folder, a .csv, .npy, .parquet or .ts file; labels are not needed."""
    out: Path = Path("predictions.csv")
    """Where the answers go."""
    solver: str = ""
    """Solver to answer with; by default the run's."""
    device: str = "auto"
    """cpu, cuda, …"""
    batch: int = 16
    """Series in a batch."""
    compare: bool = True
    """Run the first batch without timeloom too, where that takes less than a minute, and say how far apart the answers
    are and how much faster timeloom is."""


def main(arguments: Sequence[str]) -> int:
    options = tyro.cli(
        Options,
        args=list(arguments),
        prog="timeloom predict",
        description="Writes a trained model's answers to a CSV file.",
    )
    need_folder(options.out)
    at_least("batch", options.batch, 1)
    loaded = checkpoint.load(options.run)
    model = restore(loaded, device_of(options.device), options.solver)
    table = data_of(loaded, options.data)
    answers = answer(model, table.records, loaded, options.batch)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for row in rows([record.name for record in table.records], answers.values, loaded):
        writer.writerow(row)
    write_text(options.out, text.getvalue())
    lines = [f"{len(table.records)} series in {answers.seconds:.3f} s: {options.out}"]
    if options.compare:
        agreement = compare(model, table.records[: options.batch], loaded, options.batch)
        agreement = replace(agreement, series=len(table.records))
        lines += agreement.lines(loaded.config.model)
    CONSOLE.print("\n".join(lines), markup=False)
    return 0


def rows(names: Sequence[str], values: Sequence[Tensor], loaded: Checkpoint) -> Iterator[Sequence[object]]:
    """A header, then a row for each series, or for each step where steps have answers of their own."""
    per_step = loaded.task in PER_STEP
    yield header(loaded, per_step)
    for name, value in zip(names, values, strict=True):
        for step, row in enumerate(value.reshape(-1, value.shape[-1])):
            yield (*((name, step) if per_step else (name,)), *row_of(row, loaded))


def header(loaded: Checkpoint, steps: bool) -> list[str]:
    """Names of the columns; `steps`: whether every step has a row."""
    answers = ["label", *(f"p({name})" for name in loaded.classes)] if loaded.classes else ["value"]
    return ["series", *(["step"] if steps else []), *answers]


def row_of(answers: Tensor, loaded: Checkpoint) -> list[object]:
    """One answer `(K,)`: the class and the probabilities of all, or the number."""
    if not loaded.classes:
        return [f"{answers.item():.9g}"]
    shares = answers.softmax(-1)
    return [loaded.classes[int(shares.argmax())], *(f"{share:.6f}" for share in shares.tolist())]
