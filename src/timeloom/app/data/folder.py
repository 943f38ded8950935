"""A folder of series, one CSV, NPY or Parquet file each.

Labels come from `labels.csv` (columns `file` and `label`, or `target` for a number; `split` if wanted), or from the
names of subfolders, or, for every step, from a column `label` (a class) or `target` (a number) of the files, or from
`<name>.labels.npy` or `<name>.targets.npy` beside `<name>.npy`. Without any of these the folder can be predicted on,
not trained on. What is wrong with its files is kept in the table, and told with what is wrong with the series.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast, get_args

import numpy

from timeloom.app.data.channels import as_float32, clocks_of
from timeloom.app.data.csv_file import read_csv, rows_of
from timeloom.app.data.parquet import read_parquet
from timeloom.app.data.reading import Reading, filled
from timeloom.app.data.records import Label, Record, Split, Table, Task
from timeloom.app.data.step_labels import of_arrays
from timeloom.app.errors import InputError, Problems

INDEX = "labels.csv"
STEP_LABELS, STEP_TARGETS, STEP_MASK = ".labels.npy", ".targets.npy", ".mask.npy"


def read_folder(folder: Path, reading: Reading) -> Table:
    """All series in a folder; those that an index of labels leaves out have none."""
    index = folder / INDEX
    if index.is_file():
        return _indexed(folder, index, reading)
    problems, records = Problems(), list[Record]()
    if files := _series_files(folder):
        for path in files:
            with problems.noted(str(path)):
                records.append(read_series(path, reading))
        kinds = {_task_of(record) for record in records}
        if len(kinds) > 1:
            names = [next(r.name for r in records if _task_of(r) == kind) for kind in sorted(kinds, key=str)]
            problems.add(
                f"{folder}: {names[0]} and {names[1]} are labelled differently: give every file a column 'label', "
                f"every file a column 'target', or none of them"
            )
        return Table(str(folder), kinds.pop() if kinds else None, records, tuple(problems.found))
    for inner in sorted(path for path in folder.iterdir() if path.is_dir()):
        for path in _series_files(inner):
            with problems.noted(str(path)):
                record = read_series(path, reading)
                named = f"{inner.name}/{path.name}"
                records.append(replace(record, name=named, label=inner.name, counts=None))
    if not records and not problems.found:
        raise InputError(f"{folder}: no {ENDINGS} files, and none in subfolders")
    return Table(str(folder), "classification", records, tuple(problems.found))


def _task_of(record: Record) -> Task | None:
    """What the steps of a series are labelled with."""
    if not isinstance(record.label, list):
        return None
    return "labelling" if record.label and isinstance(record.label[0], str) else "tracking"


def read_series(path: Path, reading: Reading) -> Record:
    """One file; its label is that of each step where it holds them, else None."""
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    read = READERS.get(path.suffix.lower())
    if read is None:
        raise InputError(f"{path}: expected a {ENDINGS} file")
    record = read(path, reading)
    return replace(record, values=filled(record.values, reading.fill, str(path)))


def _read_npy(path: Path, reading: Reading) -> Record:
    if reading.time:
        raise InputError(f"{path}: an array has no column {reading.time!r}; --time is for .csv and .parquet files")
    found = _numbers(path)
    names = [str(i + 1) for i in range(found.shape[1])]
    values = as_float32(found, names, str(path))
    if reading.columns:
        values = values[:, _positions(reading.columns, values.shape[1], path)]
    labels, targets, mask = (
        _array(beside) if (beside := path.with_name(path.stem + end)).is_file() else None
        for end in (STEP_LABELS, STEP_TARGETS, STEP_MASK)
    )
    record = of_arrays(labels, targets, mask).record(path.name, values, None)
    return replace(record, clocks=clocks_of(dict(zip(names, found.T, strict=True)), reading))


def _positions(columns: tuple[str, ...], channels: int, path: Path) -> list[int]:
    """The channels of an array by their numbers, from 1 on."""
    wrong = [name for name in columns if not name.isdigit() or not 1 <= int(name) <= channels]
    if wrong:
        raise InputError(f"{path}: no column {wrong[0]!r}; the columns of an array are numbers, here 1 to {channels}")
    return [int(name) - 1 for name in columns]


def _series_files(folder: Path) -> list[Path]:
    beside = (STEP_LABELS, STEP_TARGETS, STEP_MASK)
    return sorted(
        p for p in folder.iterdir() if p.suffix.lower() in READERS and p.name != INDEX and not p.name.endswith(beside)
    )


def _indexed(folder: Path, index: Path, reading: Reading) -> Table:
    header, *lines = rows_of(index)[0] or [[]]
    header = [name.strip() for name in header]
    columns = set(header)
    kinds: list[tuple[str, Task]] = [("label", "classification"), ("target", "regression")]
    found = [(column, task) for column, task in kinds if column in columns]
    if "file" not in columns or len(found) != 1:
        raise InputError(
            f"{index}: expected the columns 'file' and 'label' (or 'target'), got {sorted(columns) or 'nothing'}"
        )
    column, task = found[0]
    problems, records = Problems(), list[Record]()
    rows = [{name: cell.strip() for name, cell in zip(header, line, strict=False)} for line in lines]
    listed = {row.get("file") for row in rows}
    for number, row in enumerate(rows, start=2):
        with problems.noted(row.get("file", "")):
            records.append(_listed(folder, row, column, f"{index}, line {number}", reading))
    for path in _series_files(folder):
        if path.name not in listed:
            with problems.noted(str(path)):
                other = read_series(path, reading)
                records.append(replace(other, label=None, counts=None))
    return Table(str(folder), task, records, tuple(problems.found))


def _listed(folder: Path, row: dict[str, str], column: str, where: str, reading: Reading) -> Record:
    """The series of one line of the index."""
    name, text = row.get("file"), row.get(column)
    if not text or not name:
        raise InputError(f"{where}: no {'file' if text else column}; is the file cut short?")
    label: Label = _as_number(text, where) if column == "target" else text
    if not (folder / name).is_file():
        raise InputError(f"{where}: {folder / name}: no such file; correct its name or remove the line")
    record = read_series(folder / name, reading)
    return replace(record, name=name, label=label, split=_as_split(row.get("split"), where), counts=None)


def _as_split(text: str | None, where: str) -> Split | None:
    if not text:
        return None
    if text not in get_args(Split):
        raise InputError(f"{where}: split must be train, valid or test, got {text!r}", kind="split")
    return cast(Split, text)


def _as_number(text: str, where: str) -> float:
    try:
        return float(text)
    except ValueError:
        hint = "; put commas between columns" if ";" in text or "\t" in text else ""
        raise InputError(f"{where}: expected a number, got {text[:40]!r}{hint}") from None


def _array(path: Path) -> numpy.ndarray:
    try:
        return cast(numpy.ndarray, numpy.load(path, allow_pickle=False))
    except (ValueError, EOFError, OSError) as error:
        raise InputError(f"{path}: not a whole .npy file ({error})", kind="npy") from None


def _numbers(path: Path) -> numpy.ndarray:
    """An array of numbers, `(T, D)`."""
    found = _array(path)
    if found.dtype.kind not in "fiub":
        raise InputError(f"{path}: holds {found.dtype}, expected real numbers; convert it")
    if found.ndim not in (1, 2):
        raise InputError(f"{path}: expected an array (steps, channels), got shape {found.shape}")
    if found.size == 0:
        raise InputError(f"{path}: is empty; remove it")
    return found.reshape(len(found), -1)


READERS: dict[str, Callable[[Path, Reading], Record]] = {".csv": read_csv, ".npy": _read_npy, ".parquet": read_parquet}
"""What reads a series from a file, by the file's ending."""
ENDINGS = ", ".join(list(READERS)[:-1]) + f" or {list(READERS)[-1]}"
