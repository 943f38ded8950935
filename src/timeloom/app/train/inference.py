"""Trained models at work: answers from a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from timeloom.app.data import load
from timeloom.app.data.folder import READERS
from timeloom.app.data.records import Record, Table, Task
from timeloom.app.errors import InputError
from timeloom.app.train.checkpoint import Checkpoint
from timeloom.app.train.comparison import synchronize
from timeloom.app.train.model import SequenceModel, solver_of
from timeloom.app.train.setup import autocast, build_model


def restore(checkpoint: Checkpoint, device: torch.device, solver: str = "") -> SequenceModel:
    """The model of a checkpoint, ready to answer; with another solver if one is named."""
    solver_of(solver or checkpoint.config.solver)
    model = build_model(checkpoint.config, task_of(checkpoint), len(checkpoint.classes), checkpoint.channels, device)
    try:
        model.load_state_dict(checkpoint.weights)
    except RuntimeError as error:
        raise InputError(
            f"the checkpoint's weights do not fit its configuration: {str(error).splitlines()[-1]}"
        ) from None
    for layer in model.recurrent_layers():
        layer.solver = solver_of(solver or checkpoint.config.solver)
    return model.eval()


def task_of(checkpoint: Checkpoint) -> Task:
    return cast(Task, checkpoint.task)


def fitting(checkpoint: Checkpoint, table: Table) -> Table:
    """The data with their channels in the order that the model was trained on; others are refused."""
    expected = checkpoint.columns
    if expected and table.columns:
        return replace(table, records=[r.in_order(expected, "the training data") for r in table.records])
    if table.channels != checkpoint.channels:
        raise InputError(
            f"{table.source} has {table.channels} channels, the model was trained on {checkpoint.channels}; "
            f"give data like those of {checkpoint.config.data}"
        )
    return table


def data_of(checkpoint: Checkpoint, source: str) -> Table:
    """The data that are named, or the run's own where none are, read as the training read them."""
    config = checkpoint.config
    reading = config.reading
    if source and checkpoint.columns and not reading.columns:  # what else the files hold is of no use
        reading = replace(reading, columns=tuple(name for name in checkpoint.columns if name != reading.time))
    path = Path(source)
    if source and not path.is_dir() and path.suffix.lower() not in READERS:  # there are no columns to choose from
        reading = replace(reading, columns=(), time="")
    return fitting(checkpoint, load(source or config.data, reading))


@dataclass(frozen=True)
class Answers:
    """What a model says about some series."""

    values: list[Tensor]
    """Of each series: `(K,)`, or `(T, K)` for a label at every step."""
    seconds: float


def answer(model: SequenceModel, records: Iterable[Record], checkpoint: Checkpoint, size: int) -> Answers:
    """Run the model over series in batches."""
    records = list(records)
    device, values, seconds = model.offset.device, list[Tensor](), 0.0
    for begin in range(0, len(records), size):
        series = [record.values for record in records[begin : begin + size]]
        lengths = torch.tensor([len(part) for part in series])
        inputs = pad_sequence(series).to(device, model.offset.dtype)
        started = time.perf_counter()
        with torch.no_grad(), autocast(checkpoint.config, device):
            out = model(inputs, None if (lengths == lengths[0]).all() else lengths)
        synchronize(device)
        seconds += time.perf_counter() - started
        out = out.to("cpu", torch.float64)
        values += [out[: lengths[i], i] if model.per_step else out[i] for i in range(len(series))]
    return Answers(values, seconds)
