"""A series from a Parquet file: rows are steps, columns channels; a column `label` holds the class of each step."""

from __future__ import annotations

from pathlib import Path

import torch

from timeloom.app.data.records import Record
from timeloom.app.errors import InputError


def read_parquet(path: Path) -> Record:
    """One file. A null is a missing value, refused later with its place."""
    try:
        from pyarrow import ArrowException, float64, parquet, types
    except ModuleNotFoundError:
        raise InputError(f"{path}: Parquet files need pyarrow: pip install 'timeloom[parquet]'") from None
    try:
        table = parquet.read_table(path)
    except (ArrowException, OSError) as error:
        raise InputError(f"{path}: not a whole Parquet file ({str(error).splitlines()[0]})") from None
    steps = None
    columns = []
    for name, column in zip(table.column_names, table.columns, strict=True):
        if name == "label":
            steps = ["" if value is None else str(value) for value in column.to_pylist()]
        elif types.is_floating(column.type) or types.is_integer(column.type) or types.is_boolean(column.type):
            columns.append(torch.tensor(column.cast(float64()).to_numpy(), dtype=torch.float32))
        else:
            raise InputError(f"{path}: the column {name!r} holds {column.type}, expected numbers; remove or encode it")
    if not columns:
        raise InputError(f"{path}: no columns of numbers")
    return Record(path.name, torch.stack(columns, dim=1), steps)
