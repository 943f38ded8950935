"""A series from a Parquet file: rows are steps, columns channels, with the special columns of CSV files."""

from __future__ import annotations

from pathlib import Path

import numpy

from timeloom.app.data.channels import series_of
from timeloom.app.data.columns import check_names, gaps
from timeloom.app.data.reading import Reading
from timeloom.app.data.records import Record
from timeloom.app.data.step_labels import SPECIAL, Steps
from timeloom.app.errors import InputError, Problems


def read_parquet(path: Path, reading: Reading) -> Record:
    """One file. A null is a missing value."""
    try:
        from pyarrow import ArrowException, float64, int64, parquet, types
    except ModuleNotFoundError:
        raise InputError(f"{path}: Parquet files need pyarrow: pip install 'timeloom[parquet]'") from None
    try:
        table = parquet.read_table(path)
    except (ArrowException, OSError) as error:
        raise InputError(f"{path}: not a whole Parquet file ({str(error).splitlines()[0]})", kind="Parquet") from None
    channels, problems = dict[str, numpy.ndarray](), Problems()
    with problems.noted():
        check_names(table.column_names, (*reading.columns, reading.time), str(path))
    columns = dict(zip(table.column_names, table.columns, strict=True))
    texts = {
        name: ["" if value is None else str(value) for value in columns[name].to_pylist()]
        for name in SPECIAL
        if name in columns
    }
    steps = Steps.of_texts(texts, str(path))
    for name, column in columns.items():
        if name in SPECIAL or not reading.takes(name):
            continue
        numeric = types.is_floating(column.type) or types.is_integer(column.type) or types.is_boolean(column.type)
        with problems.noted():
            if name == reading.time:
                seconds = column.cast("timestamp[ns]").cast(int64()).to_numpy() / 1e9 if not numeric else column
                channels[name] = gaps(numpy.asarray(seconds, dtype=numpy.float64), name, str(path))
            elif numeric:
                channels[name] = numpy.asarray(column.cast(float64()).to_numpy())
            elif types.is_temporal(column.type):
                raise InputError(
                    f"{path}: the column {name!r} holds times ({column.type}): leave it out with --columns, or with "
                    f"--time {name} take it as the time between steps"
                )
            else:
                raise InputError(
                    f"{path}: the column {name!r} holds {column.type}, expected numbers; leave it out with --columns, "
                    f"or encode it"
                )
    return series_of(channels, problems, steps, path, reading, named=True)
