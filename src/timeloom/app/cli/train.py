"""`timeloom train`: data in, a trained model, its metrics and a report out."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import FrameType

import torch
import tyro

from timeloom.app.cli import first_rank
from timeloom.app.cli.display import CONSOLE, training_bar
from timeloom.app.cli.output import go_on_without
from timeloom.app.cli.unparsed import value_of, whole_number, without
from timeloom.app.data import Splits, Table, load, prepare, split
from timeloom.app.device import device_of
from timeloom.app.errors import InputError
from timeloom.app.files import write_json
from timeloom.app.interrupt import obeyed
from timeloom.app.train import checkpoint, config_file
from timeloom.app.train.checkpoint import LAST, Checkpoint
from timeloom.app.train.config import TrainConfig, preset
from timeloom.app.train.defaults import fitted
from timeloom.app.train.described import described
from timeloom.app.train.ending import ending
from timeloom.app.train.folds import finished, summarize_folds
from timeloom.app.train.model import solver_of
from timeloom.app.train.objective import check_objective
from timeloom.app.train.ranks import Alone, joined
from timeloom.app.train.run_files import FOLD, REPORT, SUMMARY, folds_of
from timeloom.app.train.run_folder import claimed, new_folder, refuse_taken
from timeloom.app.train.run_report import write_report
from timeloom.app.train.summary import command_line, summarize
from timeloom.app.train.trainer import Trainer

RESUMED = ("--epochs", "--patience")
"""What a run that goes on may be told anew."""


def main(arguments: Sequence[str]) -> int:
    words = list(arguments)
    if words and not words[0].startswith("-"):
        raise InputError(f"{words[0]!r} stands without an option; data are given by --data {words[0]}")
    resume = value_of("--resume", words)
    if resume is not None:
        return _go_on(Path(resume), without("--resume", words))
    config = parse(words)
    solver_of(config.solver)  # a wrong name is told before the data are read, and a device that is not there
    with _ranks(config) as ranks:
        if ranks.first and config.out:
            refuse_taken(Path(config.out))
        table = _read(config, ranks)
        splits = _split(config, table)
        config = _settled(config, words, splits)
        folder = ranks.folder(new_folder(config.data, config.out) if ranks.first else Path())
        if config.folds and not config.fold:
            return _all_folds(config, table, folder, ranks)
        return _run(config, splits, folder, None, ranks)


def _go_on(folder: Path, words: list[str]) -> int:
    """`--resume`: a run, or all folds of one, from where it stopped."""
    changed = {name: value_of(name, words) for name in RESUMED}
    others = words
    for name in RESUMED:
        others = without(name, others)
    if others:
        raise InputError(
            f"--resume takes the run's own settings, and of new ones {' and '.join(RESUMED)}; remove {' '.join(others)}"
        )
    if (folds := folds_of(folder)) and not (folder / LAST).is_file():
        for name in (name for name, text in changed.items() if text is not None):
            raise InputError(f"{name} is for one fold at a time: --resume {folds[0]} {name} {changed[name]}")
        config = config_file.read_config(folder / config_file.NAME)
        with _ranks(config) as ranks:
            return _all_folds(config, _read(config, ranks), folder, ranks)
    if not (folder / LAST).is_file():
        raise InputError(f"{folder}: no {LAST} to go on from; start the training again without --resume")
    start = checkpoint.load(folder / LAST)
    config = _longer(start, changed)
    with _ranks(config) as ranks:
        folder = ranks.folder(folder)
        ranks.check_start(start.progress.step)
        status = _run(config, _split(config, _read(config, ranks)), folder, start, ranks)
        folds = [fold for fold in folds_of(folder.resolve().parent) if (fold / SUMMARY).is_file()]
        if ranks.first and not status and folder.resolve() in folds and len(folds) == config.folds:
            CONSOLE.print("\n".join(summarize_folds(folds[0].parent, config.folds)), markup=False)
        return status


def _longer(start: Checkpoint, changed: dict[str, str | None]) -> TrainConfig:
    """The run's own settings, with more epochs or patience if that is asked for."""
    config, progress = start.config, start.progress
    given = {
        name.removeprefix("--"): whole_number(name, text, 1 if name == "--epochs" else 0)
        for name, text in changed.items()
        if text is not None
    }
    if given:
        if "epochs" in given and given["epochs"] < config.optim.epochs:
            raise InputError(
                f"--epochs {given['epochs']}: the run was to have {config.optim.epochs} already; give more"
            )
        epochs, patience = given.get("epochs", config.optim.epochs), given.get("patience", config.optim.patience)
        config = replace(config, optim=replace(config.optim, epochs=epochs, patience=patience))
        progress.epochs_without = 0  # more was asked for: the patience begins anew
    return config


def parse(arguments: Sequence[str], start: TrainConfig | None = None) -> TrainConfig:
    """The configuration: a file's, a preset's or `start`, changed by the options given."""
    words = list(arguments)
    given = value_of("--config", words)
    if start is None:
        start = preset(value_of("--preset", words) or "default") if given is None else _from_file(given, words)
    return tyro.cli(
        tyro.conf.OmitArgPrefixes[TrainConfig],
        default=start,
        args=without("--config", words),
        console_outputs=first_rank(),
        prog="timeloom train",
        description=(
            "Trains a recurrent network parallel in time, and writes weights, metrics and a report to a folder. "
            "--data FOLDER holds a .csv, .npy or .parquet file for each series (rows are steps, columns channels) and "
            "labels.csv with the columns file and label (a class) or target (a number); or a subfolder for each class; "
            "or files with a column label or target for every step. "
            "Model and schedule are chosen from the size of the data unless they are given. "
            "--config FILE begins from the run.toml of another run. "
            "To go on with a run that was stopped: timeloom train --resume FOLDER [--epochs N]."
        ),
    )


def _from_file(path: str, words: list[str]) -> TrainConfig:
    if value_of("--preset", words) is not None:
        raise InputError("--config has a preset of its own; give either --config or --preset")
    return config_file.read_config(Path(path))


@contextmanager
def _ranks(config: TrainConfig) -> Iterator[Alone]:
    """The processes of torchrun, each with its device; the first alone speaks."""
    with joined(config) as ranks:
        device_of(ranks.device(config.device))
        CONSOLE.quiet = not ranks.first
        go_on_without()
        yield ranks


def _read(config: TrainConfig, ranks: Alone) -> Table:
    prepare(config.data, ranks.index, ranks.size)
    ranks.wait()
    with ranks.in_turn():
        return load(config.data, config.reading, labelled=True)


def _split(config: TrainConfig, table: Table) -> Splits:
    """What is for training, choosing and measuring; of all folds, in the first one."""
    fold = (max(config.fold, 1), config.folds) if config.folds else (0, 0)
    return split(table, config.valid_fraction, config.test_fraction, config.seed, config.pool, fold)


def _settled(config: TrainConfig, words: list[str], splits: Splits) -> TrainConfig:
    """The settings, those that nobody gave chosen from the size of the data."""
    check_objective(config.optim.metric, config.optim.class_weights, splits.task)
    if value_of("--config", words) is not None:
        return config
    given = [name for name in ("batch", "epochs") if value_of(f"--{name}", words) is not None]
    chosen = fitted(config, splits, given)
    return config if chosen is config else parse(words, chosen)


def _all_folds(config: TrainConfig, table: Table, folder: Path, ranks: Alone) -> int:
    """Train once for every fold, in a folder of its own; finished ones are left as they are."""
    with claimed(folder) if ranks.first else nullcontext():
        if ranks.first:
            _write_settings(config, folder, goes_on=bool(folds_of(folder)))
        for number in range(1, config.folds + 1):
            inner = folder / f"{FOLD}{number}"
            if finished(inner):
                continue
            CONSOLE.print(f"Fold {number} of {config.folds}")
            start = checkpoint.load(inner / LAST) if (inner / LAST).is_file() else None
            own = replace(config, fold=number) if start is None else start.config
            status = _run(own, _split(own, table), inner, start, ranks)
            if status:
                return status
        if ranks.first:
            CONSOLE.print("\n".join(summarize_folds(folder, config.folds)), markup=False)
    return 0


def _run(config: TrainConfig, splits: Splits, folder: Path, start: Checkpoint | None, ranks: Alone) -> int:
    """Tell what is about to be done, and train."""
    ranks.check([splits.train, splits.valid, splits.test])
    with claimed(folder) if ranks.first else nullcontext():
        if start is None and ranks.first:
            refuse_taken(folder)  # another training may have been here while the data were read
        trainer = Trainer(config, splits, folder, start, lambda row: None, ranks)
        if start is not None and trainer.ended and finished(folder):
            trainer.close()
            CONSOLE.print(f"{folder} has ended. {ending(trainer)}", markup=False)
            return 0
        if ranks.first:
            _write_settings(config, folder, goes_on=start is not None)
        CONSOLE.print("\n".join(described(config, splits, str(trainer.device), torch.get_num_threads())), markup=False)
        CONSOLE.print(f"All settings, chosen or given: {folder / config_file.NAME}", markup=False)
        if start is not None:
            CONSOLE.print(f"Going on after step {start.progress.step:,} of {trainer.total:,}.", markup=False)
        return train(trainer)


def train(trainer: Trainer) -> int:
    """Run to the end, measure, and write the report."""
    folder, splits = trainer.folder, trainer.splits
    with training_bar(trainer) as show, _stopping_between_steps(trainer), obeyed(trainer.last_words):
        trainer.show = show
        trainer.run()
    if trainer.interrupted:
        CONSOLE.print(f"stopped after step {trainer.progress.step}; go on with: {trainer.again}", markup=False)
        return 130
    trainer.use_best()
    score = trainer.measure(splits.test)
    if not trainer.ranks.first:
        return 0
    with trainer.resumable():
        summary = summarize(trainer, score)
        write_json(folder / SUMMARY, summary.to_dict())
        write_report(folder / REPORT, trainer.config, splits, trainer.metrics, summary)
    CONSOLE.print("\n".join([*summary.lines(), f"Report: {folder / REPORT} ({summary.pace()})"]), markup=False)
    return 0


def _write_settings(config: TrainConfig, folder: Path, goes_on: bool) -> None:
    """run.toml, with the commands that made the run so far."""
    path = folder / config_file.NAME
    config_file.write_config(path, config, [*(config_file.commands_of(path) if goes_on else []), command_line()])


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
