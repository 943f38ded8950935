"""A folder of series, one CSV, NPY or Parquet file each.

Labels come from `labels.csv` (columns `file` and `label`, or `target` for a number; `split` if wanted), or from the
names of subfolders, or, for a class at every step, from a column `label` or a file `<name>.labels.npy` beside
`<name>.npy`. Without any of these the folder can be predicted on, not trained on.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import cast, get_args

import numpy
import torch

from timeloom.app.data.parquet import read_parquet
from timeloom.app.data.records import Label, Record, Split, Table, Task, as_series
from timeloom.app.errors import InputError

INDEX = "labels.csv"
STEP_LABELS = ".labels.npy"
SUFFIXES = (".csv", ".npy", ".parquet")


def read_folder(folder: Path) -> Table:
    """All series in a folder; those that an index of labels leaves out have none."""
    index = folder / INDEX
    if index.is_file():
        return _indexed(folder, index)
    if files := _series_files(folder):
        records = [read_series(path) for path in files]
        labelled = [isinstance(record.label, list) for record in records]
        if any(labelled) and not all(labelled):
            name = records[labelled.index(False)].name
            raise InputError(f"{folder}: {name} has no label column and others have; give all or none")
        return Table(str(folder), "labelling" if all(labelled) else None, records)
    records = []
    for inner in sorted(path for path in folder.iterdir() if path.is_dir()):
        for path in _series_files(inner):
            record = read_series(path)
            records.append(Record(f"{inner.name}/{path.name}", record.values, inner.name))
    if not records:
        raise InputError(f"{folder}: no .csv, .npy or .parquet files, and none in subfolders")
    return Table(str(folder), "classification", records)


def read_series(path: Path) -> Record:
    """One file; its label is that of each step where it holds them, else None."""
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    if path.suffix == ".npy":
        values = as_series(torch.from_numpy(_numbers(path)), str(path))
        beside = path.with_name(path.stem + STEP_LABELS)
        steps: list[str] | None = [str(value) for value in _array(beside).ravel()] if beside.is_file() else None
        return Record(path.name, values, steps)
    if path.suffix == ".csv":
        return _read_csv(path)
    if path.suffix == ".parquet":
        return read_parquet(path)
    raise InputError(f"{path}: expected a .csv, .npy or .parquet file")


def _series_files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.suffix in SUFFIXES and p.name != INDEX and STEP_LABELS not in p.name)


def _indexed(folder: Path, index: Path) -> Table:
    header, *lines = _rows(index) or [[]]
    columns = set(header)
    kinds: list[tuple[str, Task]] = [("label", "classification"), ("target", "regression")]
    found = [(column, task) for column, task in kinds if column in columns]
    if "file" not in columns or len(found) != 1:
        raise InputError(
            f"{index}: expected the columns 'file' and 'label' (or 'target'), got {sorted(columns) or 'nothing'}"
        )
    column, task = found[0]
    records = []
    for number, line in enumerate(lines, start=2):
        row = dict(zip(header, line, strict=False))
        where = f"{index}, line {number}"
        text = row.get(column, "").strip()
        if not text:
            raise InputError(f"{where}: no {column}; is the file cut short?")
        label: Label = _as_number(text, where) if task == "regression" else text
        name = row["file"].strip()
        if not (folder / name).is_file():
            raise InputError(f"{where}: {folder / name}: no such file; correct its name or remove the line")
        record = read_series(folder / name)
        records.append(Record(name, record.values, label, _as_split(row.get("split"), where)))
    listed = {record.name for record in records}
    others = [path for path in _series_files(folder) if path.name not in listed]
    records += [Record(path.name, read_series(path).values, None) for path in others]
    return Table(str(folder), task, records)


def _as_split(text: str | None, where: str) -> Split | None:
    if not text:
        return None
    if text not in get_args(Split):
        raise InputError(f"{where}: split must be train, valid or test, got {text!r}")
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
        raise InputError(f"{path}: not a whole .npy file ({error})") from None


def _numbers(path: Path) -> numpy.ndarray:
    """An array of numbers in the machine's own byte order."""
    found = _array(path)
    if found.dtype.kind not in "fiub":
        raise InputError(f"{path}: holds {found.dtype}, expected real numbers; convert it")
    return numpy.ascontiguousarray(found, dtype=numpy.float32)


def _rows(path: Path) -> list[list[str]]:
    """The rows of a CSV file that are not empty."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            return [row for row in csv.reader(file) if row]
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path}: not a CSV file in UTF-8 ({error}); write it again") from None


def _read_csv(path: Path) -> Record:
    """Rows are steps, columns channels; the first row may name them."""
    rows = _rows(path)
    if not rows:
        raise InputError(f"{path}: the file is empty")
    header = [] if _numeric(rows[0]) else [name.strip() for name in rows.pop(0)]
    at = header.index("label") if "label" in header else None
    width = len(header) if header else len(rows[0]) if rows else 0
    values, steps = [], []
    for number, row in enumerate(rows, start=2 if header else 1):
        if len(row) != width:
            raise InputError(f"{path}, line {number}: {len(row)} columns, expected {width}; is the file cut short?")
        if at is not None:
            steps.append(row[at].strip())
            row = row[:at] + row[at + 1 :]
        values.append([_cell(text, f"{path}, line {number}") for text in row])
    channels = width - (at is not None)
    return Record(
        path.name,
        torch.tensor(values, dtype=torch.float32).reshape(len(values), channels),
        steps if at is not None else None,
    )


def _numeric(row: list[str]) -> bool:
    try:
        [float(text or "nan") for text in row]
    except ValueError:
        return False
    return True


def _cell(text: str, where: str) -> float:
    """An empty cell is a missing value, refused later with its place."""
    return _as_number(text, where) if text.strip() else float("nan")
