"""Columns of numbers as the channels of a series."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy
import torch
from torch import Tensor

from timeloom.app.data.clocks import counts_time, example
from timeloom.app.data.reading import Reading
from timeloom.app.data.records import LARGEST, Record
from timeloom.app.data.step_labels import Steps
from timeloom.app.errors import InputError, Problems


def as_float32(values: numpy.ndarray, names: Sequence[str], where: str) -> Tensor:
    """`(T, D)` of any precision in float32; a number that is too large for it is refused."""
    with numpy.errstate(over="ignore"):
        narrow = numpy.ascontiguousarray(values, dtype=numpy.float32)
    beyond = numpy.isinf(narrow) & numpy.isfinite(values)
    if beyond.any():
        step, channel = numpy.argwhere(beyond)[0]
        raise InputError(
            f"{where}: the column {names[channel]!r} has {values[step, channel]:g} at step {step}, and float32 ends at "
            f"{LARGEST:.1e}; correct it, or scale the column",
            kind=f"the column {names[channel]!r} exceeds float32",
        )
    return torch.from_numpy(narrow)


def series_of(
    columns: Mapping[str, numpy.ndarray], problems: Problems, steps: Steps, path: Path, reading: Reading, named: bool
) -> Record:
    """One series of the columns `(T,)`, in float64, that could be read; `problems` holds those that could not.

    named: whether the file itself names its columns.
    """
    where, chosen = str(path), list(columns)
    if reading.columns and not problems.found:  # as --columns has them, the time last where it is not named there
        chosen = [*reading.columns, *(column for column in columns if column not in reading.columns)]
    if not chosen:
        problems.tell(where)
        raise InputError(f"{where}: no columns of numbers are left; name others with --columns")
    values, record = numpy.stack([columns[column] for column in chosen], axis=1), None
    with problems.noted():
        record = steps.record(path.name, as_float32(values, chosen, where), tuple(chosen) if named else None)
    if record is not None and problems.found and reading.fill == "none":
        problems.add_of(record.problem(), str(path.parent))
    problems.tell(where)
    assert record is not None
    return replace(record, clocks=clocks_of({column: columns[column] for column in chosen}, reading))


def clocks_of(columns: Mapping[str, numpy.ndarray], reading: Reading) -> dict[str, str]:
    """Columns that count time or rows, with an example; those that the user has named are meant as they are."""
    if reading.columns:
        return {}
    return {
        name: example(values)
        for name, values in columns.items()
        if name != reading.time and counts_time(values.astype(numpy.float64), name)
    }
