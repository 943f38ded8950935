"""`timeloom train`: data in, a trained model, its metrics and a report out."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import FrameType

import tyro

import timeloom
from timeloom.app.cli import first_rank
from timeloom.app.cli.display import CONSOLE, training_bar
from timeloom.app.data import Splits, load, prepare, split
from timeloom.app.device import device_of
from timeloom.app.errors import InputError
from timeloom.app.files import write_json
from timeloom.app.interrupt import obeyed
from timeloom.app.train import checkpoint, config_file
from timeloom.app.train.checkpoint import LAST, Checkpoint
from timeloom.app.train.config import TrainConfig, at_least, preset
from timeloom.app.train.defaults import described, fitted
from timeloom.app.train.folds import FOLD, summarize_folds
from timeloom.app.train.model import solver_of
from timeloom.app.train.ranks import Alone, joined
from timeloom.app.train.run_folder import REPORT, SUMMARY, claimed, new_folder, refuse_taken
from timeloom.app.train.run_report import write_report
from timeloom.app.train.summary import command_line, summarize
from timeloom.app.train.trainer import Trainer

RESUMED = ("--epochs", "--patience")
"""What a run that goes on may be told anew."""


def main(arguments: Sequence[str]) -> int:
    words = list(arguments)
    resume = _value_of("--resume", words)
    if resume is not None:
        return _go_on(Path(resume), _without("--resume", words))
    config = parse(words)
    solver_of(config.solver)  # a wrong name is told before the data are read, and a device that is not there
    with joined(config) as ranks:
        device_of(ranks.device(config.device))
        CONSOLE.quiet = not ranks.first
        folder = ranks.folder(new_folder(config.data, config.out) if ranks.first else Path())
        if ranks.first and any(folder.glob(f"{FOLD}*")):
            raise InputError(f"{folder} holds folds already: go on with --resume {folder}, or choose another --out")
        if config.folds and not config.fold:
            return _all_folds(config, words, folder, ranks)
        return _run(config, words, folder, None, ranks)


def _go_on(folder: Path, words: list[str]) -> int:
    """`--resume`: a run, or all folds of one, from where it stopped."""
    changed = {name: _value_of(name, words) for name in RESUMED}
    others = words
    for name in RESUMED:
        others = _without(name, others)
    if others:
        raise InputError(
            f"--resume takes the run's own settings, and of new ones {' and '.join(RESUMED)}; remove {' '.join(others)}"
        )
    folds = sorted(folder.glob(f"{FOLD}*"), key=lambda path: int(path.name.removeprefix(FOLD)))
    if folds and not (folder / LAST).is_file():
        for name in (name for name, text in changed.items() if text is not None):
            raise InputError(f"{name} is for one fold at a time: --resume {folds[0]} {name} {changed[name]}")
        config = config_file.read_config(folder / config_file.NAME)
        with joined(config) as ranks:
            CONSOLE.quiet = not ranks.first
            return _all_folds(config, [], folder, ranks)
    if not (folder / LAST).is_file():
        raise InputError(f"{folder}: no {LAST} to go on from; start the training again without --resume")
    start = checkpoint.load(folder / LAST)
    config = _longer(start, changed)
    with joined(config) as ranks:
        device_of(ranks.device(config.device))
        CONSOLE.quiet = not ranks.first
        folder = ranks.folder(folder)
        ranks.check_start(start.progress.step)
        return _run(config, [], folder, start, ranks)


def _longer(start: Checkpoint, changed: dict[str, str | None]) -> TrainConfig:
    """The run's own settings, with more epochs if that is asked for."""
    config, progress = start.config, start.progress
    given = {name.removeprefix("--"): _whole(name, text) for name, text in changed.items() if text is not None}
    if given:
        if "epochs" in given and given["epochs"] < config.optim.epochs:
            raise InputError(
                f"--epochs {given['epochs']}: the run was to have {config.optim.epochs} already; give more"
            )
        epochs, patience = given.get("epochs", config.optim.epochs), given.get("patience", config.optim.patience)
        config = replace(config, optim=replace(config.optim, epochs=epochs, patience=patience))
        progress.epochs_without = 0  # more was asked for: the patience begins anew
    return config


def _whole(name: str, text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise InputError(f"{name} must be a whole number, got {text!r}") from None
    at_least(name.removeprefix("--"), value, 1 if name == "--epochs" else 0)
    return value


def parse(arguments: Sequence[str], start: TrainConfig | None = None) -> TrainConfig:
    """The configuration: a file's, a preset's or `start`, changed by the options given."""
    words = list(arguments)
    given = _value_of("--config", words)
    if start is None:
        start = preset(_value_of("--preset", words) or "default") if given is None else _from_file(given, words)
    return tyro.cli(
        tyro.conf.OmitArgPrefixes[TrainConfig],
        default=start,
        args=_without("--config", words),
        console_outputs=first_rank(),
        prog="timeloom train",
        description=(
            "Trains a recurrent network parallel in time, and writes weights, metrics and a report to a folder. "
            "Model and schedule are chosen from the size of the data unless they are given. "
            "--config FILE begins from the run.toml of another run. "
            "To go on with a run that was stopped: timeloom train --resume FOLDER [--epochs N]."
        ),
    )


def _from_file(path: str, words: list[str]) -> TrainConfig:
    if _value_of("--preset", words) is not None:
        raise InputError("--config has a preset of its own; give either --config or --preset")
    return config_file.read_config(Path(path))


def _run(config: TrainConfig, words: list[str], folder: Path, start: Checkpoint | None, ranks: Alone) -> int:
    """Read the data, choose what was left open, train."""
    prepare(config.data, ranks.index, ranks.size)
    ranks.wait()
    with ranks.in_turn():
        fold = (config.fold, config.folds)
        table = load(config.data, config.reading, labelled=True)
        splits = split(table, config.valid_fraction, config.test_fraction, config.seed, config.pool, fold)
    ranks.check([splits.train, splits.valid, splits.test])
    with claimed(folder) if ranks.first else nullcontext():
        if start is None and ranks.first:
            refuse_taken(folder)  # another training may have been here while the data were read
        return train(_prepare(config, words, splits, folder, start, ranks))


def _all_folds(config: TrainConfig, words: list[str], folder: Path, ranks: Alone) -> int:
    """Train once for every fold, in a folder of its own; finished ones are left as they are."""
    if ranks.first:
        folder.mkdir(parents=True, exist_ok=True)
        config_file.write_config(folder / config_file.NAME, config, _heading())
    for number in range(1, config.folds + 1):
        inner = folder / f"{FOLD}{number}"
        if (inner / SUMMARY).is_file():
            continue
        CONSOLE.print(f"Fold {number} of {config.folds}")
        start = checkpoint.load(inner / LAST) if (inner / LAST).is_file() else None
        own = replace(config, fold=number) if start is None else start.config
        asked = [*words, "--fold", str(number)] if words else []
        status = _run(own, asked, inner, start, ranks)
        if status:
            return status
    if ranks.first:
        CONSOLE.print("\n".join(summarize_folds(folder, config.folds)), markup=False)
    return 0


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


def _prepare(
    config: TrainConfig, words: list[str], splits: Splits, folder: Path, start: Checkpoint | None, ranks: Alone
) -> Trainer:
    CONSOLE.print(
        f"{splits.source}: {len(splits.train)} training, {len(splits.valid)} validation, {len(splits.test)} test "
        f"series, {splits.channels} channel{'' if splits.channels == 1 else 's'}, {splits.task}",
        markup=False,
    )
    if start is None and _value_of("--config", words) is None:
        chosen = fitted(config, splits)
        if chosen is not config:
            config = parse(words, chosen)
            CONSOLE.print(f"{described(config, splits)}.", markup=False)
    if ranks.first:
        config_file.write_config(folder / config_file.NAME, config, _heading())
    return Trainer(config, splits, folder, start, lambda row: None, ranks)


def _heading() -> str:
    return (
        f"timeloom {timeloom.__version__}, {datetime.now():%Y-%m-%d %H:%M}\n{command_line()}\nAgain: --config THIS_FILE"
    )


def _value_of(option: str, arguments: Sequence[str]) -> str | None:
    for index, word in enumerate(arguments):
        if word.startswith(option + "="):
            return word.partition("=")[2]
        if word == option:
            if index + 1 == len(arguments):
                raise InputError(f"{option} needs a value")
            return arguments[index + 1]
    return None


def _without(option: str, arguments: Sequence[str]) -> list[str]:
    """The words without an option and its value."""
    words, left = iter(arguments), []
    for word in words:
        if word == option:
            next(words, None)
        elif not word.startswith(option + "="):
            left.append(word)
    return left


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
