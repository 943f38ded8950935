"""`timeloom stream`: answers to a series that arrives row by row on standard input, with the state carried on."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, TextIO

import torch
import tyro

from timeloom.app.cli.predict import header, row_of
from timeloom.app.data.columns import is_missing, is_number
from timeloom.app.data.csv_file import separator_of
from timeloom.app.data.records import LARGEST
from timeloom.app.device import device_of
from timeloom.app.errors import InputError
from timeloom.app.files import need_folder
from timeloom.app.train import checkpoint
from timeloom.app.train.checkpoint import Checkpoint
from timeloom.app.train.inference import restore
from timeloom.app.train.streaming import Stream


@dataclass(frozen=True)
class Options:
    """Options of `timeloom stream`."""

    run: Annotated[Path, tyro.conf.Positional]
    """Folder of a run, or a checkpoint in it; of a model of one direction."""
    state: str = ""
    """File that keeps the state: read if it is there, and written at the end, so that the next call goes on."""
    device: str = "auto"
    """cpu, cuda, …"""


def main(arguments: Sequence[str]) -> int:
    options = tyro.cli(
        Options,
        args=list(arguments),
        prog="timeloom stream",
        description=(
            "Reads rows of CSV from standard input, one step each, and answers each of them at once on standard output."
        ),
    )
    loaded = checkpoint.load(options.run)
    if loaded.config.time:
        raise InputError("a model that takes the time between steps cannot be streamed to yet; use timeloom predict")
    stream = Stream(restore(loaded, device_of(options.device)))
    state = Path(options.state) if options.state else None
    if state is not None:
        need_folder(state)
        if state.is_file():
            stream.restore(state)
    try:
        answer(stream, loaded, sys.stdin, sys.stdout)
    finally:
        if state is not None and stream.steps:
            stream.save(state)
    return 0


def answer(stream: Stream, loaded: Checkpoint, rows: TextIO, out: TextIO) -> None:
    """A line for every row as it comes: the answer after it."""
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(header(loaded, steps=True)[1:])
    for values in _numbers(rows, loaded):
        found = stream.feed(torch.tensor(values).reshape(1, 1, -1))[0, 0].double().cpu()
        writer.writerow([stream.steps - 1, *row_of(found, loaded)])
        out.flush()


def _numbers(rows: TextIO, loaded: Checkpoint) -> Iterator[list[float]]:
    """The values of each row, in the order of the training's columns where a header names them."""
    order: list[int] | None = None
    first = rows.readline()
    mark = separator_of([first])
    for line, cells in enumerate(csv.reader(chain([first], rows), delimiter=mark), start=1):
        if not cells:
            continue
        row = cells if mark == "," else [cell.replace(",", ".") for cell in cells]
        if line == 1 and not any(is_number(text) for text in row):
            order = _order([name.strip() for name in cells], loaded)
            continue
        chosen = row if order is None else [row[i] for i in order if i < len(row)]
        if len(chosen) != loaded.channels:
            raise InputError(f"standard input, line {line}: {len(chosen)} values, expected {loaded.channels}")
        wrong = [text for text in chosen if is_missing(text) or not is_number(text) or not abs(float(text)) <= LARGEST]
        if wrong:
            got = "a missing value" if is_missing(wrong[0]) else repr(wrong[0].strip()[:40])
            expected = f"expected a number of at most {LARGEST:.1e}, got {got}"
            raise InputError(f"standard input, line {line}: {expected}")
        yield [float(text) for text in chosen]


def _order(names: Sequence[str], loaded: Checkpoint) -> list[int]:
    expected = loaded.columns or names
    missing = [name for name in expected if name not in names]
    if missing:
        raise InputError(f"standard input: no column {missing[0]!r}; the model was trained on {', '.join(expected)}")
    return [list(names).index(name) for name in expected]
