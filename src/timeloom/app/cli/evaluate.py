"""`timeloom evaluate`: what a trained model is worth, and how fast it answers with timeloom and without."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import tyro

from timeloom.app.cli.display import CONSOLE
from timeloom.app.data import Record, Table, examples, split
from timeloom.app.device import device_of
from timeloom.app.train import checkpoint
from timeloom.app.train.agreement import compare
from timeloom.app.train.checkpoint import Checkpoint
from timeloom.app.train.config import at_least
from timeloom.app.train.inference import answer, data_of, restore, task_of
from timeloom.app.train.objective import Score, quality_name, quality_text


@dataclass(frozen=True)
class Options:
    """Options of `timeloom evaluate`."""

    run: Annotated[Path, tyro.conf.Positional]
    """Folder of a run, or a checkpoint in it."""
    data: str = ""
    """Labelled data to measure on; by default the run's own test series."""
    solver: str = ""
    """Solver to answer with; by default the run's."""
    device: str = "auto"
    """cpu, cuda, …"""
    batch: int = 16
    """Series in a batch."""
    json: bool = False
    """Print the numbers as JSON."""


def main(arguments: Sequence[str]) -> int:
    options = tyro.cli(
        Options,
        args=list(arguments),
        prog="timeloom evaluate",
        description="Measures a trained model on labelled series.",
    )
    at_least("batch", options.batch, 1)
    loaded = checkpoint.load(options.run)
    model = restore(loaded, device_of(options.device), options.solver)
    table = data_of(loaded, options.data)
    records = test_records(table, loaded, own=not options.data)
    labelled = examples(records, task_of(loaded), loaded.classes, table.source)
    answers = answer(model, records, loaded, options.batch)
    score = Score(task_of(loaded), len(loaded.classes))
    for values, target in zip(answers.values, labelled.targets, strict=True):
        score.add(
            values.unsqueeze(0), target.unsqueeze(0).to(torch.float64) if not loaded.classes else target.unsqueeze(0)
        )
    agreement = compare(model, records, loaded, options.batch)
    if options.json:
        numbers = {"series": len(records), "loss": score.loss, "quality": score.quality, **asdict(agreement)}
        print(json.dumps(numbers))
        return 0
    quality = f"{quality_name(model.task)} {quality_text(model.task, score.quality)}"
    lines = [f"{quality} on {len(records)} series, loss {score.loss:.4f}", *agreement.lines(loaded.config.model)]
    CONSOLE.print("\n".join(lines), markup=False)
    return 0


def test_records(table: Table, loaded: Checkpoint, own: bool) -> list[Record]:
    """The run's own test series, or those that the data name as test series, or all."""
    if own:
        config = loaded.config
        fold = (config.fold, config.folds)
        parts = split(table, config.valid_fraction, config.test_fraction, config.seed, config.pool, fold)
        names = set(parts.test.names)
        return [record for record in table.records if record.name in names]
    named = [record for record in table.records if record.split == "test"]
    return named or table.records
