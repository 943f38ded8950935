"""`timeloom train`: data in, a trained model, its metrics and a report out."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from types import FrameType

import tyro

from timeloom.app.cli import first_rank
from timeloom.app.cli.display import CONSOLE, training_bar
from timeloom.app.data import Splits, load, split
from timeloom.app.device import device_of
from timeloom.app.errors import InputError
from timeloom.app.files import write_text
from timeloom.app.train import checkpoint
from timeloom.app.train.checkpoint import LAST, Checkpoint
from timeloom.app.train.config import TrainConfig, preset, read_config
from timeloom.app.train.model import solver_of
from timeloom.app.train.ranks import Alone, joined
from timeloom.app.train.run_report import write_report
from timeloom.app.train.summary import summarize
from timeloom.app.train.trainer import Trainer

CONFIG, SUMMARY, REPORT = "config.json", "summary.json", "report.html"


def main(arguments: Sequence[str]) -> int:
    resume, rest = _resume(list(arguments))
    config = parse(rest) if resume is None else read_config(resume / CONFIG)
    solver_of(config.solver)  # a wrong name is told before the data are read, and a device that is not there
    with joined(config) as ranks:
        device_of(ranks.device(config.device))
        CONSOLE.quiet = not ranks.first
        folder = ranks.folder(resume or _new_folder(config))
        start = None if resume is None else checkpoint.load(folder / LAST)
        ranks.check_start(0 if start is None else start.progress.step)
        with ranks.in_turn():
            splits = split(load(config.data), config.valid_fraction, config.test_fraction, config.seed, config.pool)
        ranks.check([splits.train, splits.valid, splits.test])
        return train(_prepare(config, splits, folder, start, ranks))


def parse(arguments: Sequence[str]) -> TrainConfig:
    """The configuration: a preset, changed by the options given."""
    chosen = preset(_value_of("--preset", arguments) or "default")
    return tyro.cli(
        tyro.conf.OmitArgPrefixes[TrainConfig],
        default=chosen,
        args=list(arguments),
        console_outputs=first_rank(),
        prog="timeloom train",
        description=(
            "Trains a recurrent network parallel in time, and writes weights, metrics and a report to a folder. "
            "To go on with a run that was stopped: timeloom train --resume FOLDER."
        ),
    )


def train(trainer: Trainer) -> int:
    """Run to the end, measure, and write the report."""
    folder, splits = trainer.folder, trainer.splits
    with training_bar(trainer) as show, _stopping_between_steps(trainer):
        trainer.show = show
        trainer.run()
    if trainer.interrupted:
        CONSOLE.print(f"stopped after step {trainer.progress.step}; go on with: timeloom train --resume {folder}")
        return 130
    trainer.use_best()
    score = trainer.measure(splits.test)
    if not trainer.ranks.first:
        return 0
    summary = summarize(
        trainer.config, splits, trainer.metrics, score, trainer.progress, trainer.device, trainer.ranks.size
    )
    write_text(folder / SUMMARY, json.dumps(summary.to_dict(), indent=2) + "\n")
    write_report(folder / REPORT, trainer.config, splits, trainer.metrics, summary)
    CONSOLE.print("\n".join([*summary.lines(), f"Report: {folder / REPORT} ({summary.pace()})"]), markup=False)
    return 0


def _prepare(config: TrainConfig, splits: Splits, folder: Path, start: Checkpoint | None, ranks: Alone) -> Trainer:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make the folder {folder}: {error.strerror}; choose another --out") from None
    if start is None and ranks.first:
        write_text(folder / CONFIG, json.dumps(config.to_dict(), indent=2) + "\n")
    CONSOLE.print(
        f"{splits.source}: {len(splits.train)} training, {len(splits.valid)} validation, {len(splits.test)} test "
        f"series, {splits.channels} channel{'' if splits.channels == 1 else 's'}, {splits.task}",
        markup=False,
    )
    return Trainer(config, splits, folder, start, lambda row: None, ranks)


def _new_folder(config: TrainConfig) -> Path:
    name = Path(config.data.partition(":")[0]).stem or "run"
    folder = Path(config.out or f"runs/{name}-{datetime.now():%Y%m%d-%H%M%S}")
    if (folder / LAST).exists():
        raise InputError(f"{folder} holds a run already: go on with --resume {folder}, or choose another --out")
    return folder


def _resume(arguments: list[str]) -> tuple[Path | None, list[str]]:
    """The folder to go on in, and the other arguments."""
    folder = _value_of("--resume", arguments)
    if folder is None:
        return None, arguments
    others = [word for word in arguments if word not in ("--resume", folder, f"--resume={folder}")]
    if others:
        raise InputError(f"--resume takes the run's own settings; remove {' '.join(others)}")
    if not (Path(folder) / LAST).is_file():
        raise InputError(f"{folder}: no {LAST} to go on from; start the training again without --resume")
    return Path(folder), others


def _value_of(option: str, arguments: Sequence[str]) -> str | None:
    for index, word in enumerate(arguments):
        if word.startswith(option + "="):
            return word.partition("=")[2]
        if word == option:
            if index + 1 == len(arguments):
                raise InputError(f"{option} needs a value")
            return arguments[index + 1]
    return None


@contextmanager
def _stopping_between_steps(trainer: Trainer) -> Iterator[None]:
    """The first Ctrl-C ends the run after the step under way, with a checkpoint; the second at once."""

    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, before)
        trainer.interrupt()

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
