"""A series from a CSV file: rows are steps, columns channels; the first row may name them.

A column `label` holds the class of each step, `target` the number of each step, and `mask` whether a step counts.
Columns are separated by commas, semicolons or tabs.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from pathlib import Path

import numpy

from timeloom.app.data.channels import series_of
from timeloom.app.data.columns import as_time, check_names, is_missing, is_number, numbers, seconds_between
from timeloom.app.data.reading import Reading
from timeloom.app.data.records import Record
from timeloom.app.data.step_labels import SPECIAL, Steps
from timeloom.app.errors import InputError, Problems

_DIGITS = re.compile(r"[+-]?\d+(?:[eE][+-]?\d+)?")


def rows_of(path: Path) -> tuple[list[list[str]], str]:
    """The rows of a CSV file that are not empty, and what separates their columns."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            head = [line for _, line in zip(range(5), file, strict=False)]
            file.seek(0)
            separator = separator_of(head)
            return [row for row in csv.reader(file, delimiter=separator) if row], separator
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path}: not a CSV file in UTF-8 ({error}); write it again", kind="UTF-8") from None


def separator_of(head: Sequence[str]) -> str:
    """A comma, unless semicolons or tabs cut the first lines into equally many parts and are in all of them."""
    for mark in (";", "\t"):
        widths = {len(row) for row in csv.reader(head, delimiter=mark) if row}
        if len(widths) == 1 and widths != {1}:
            return mark
    return ","


def read_csv(path: Path, reading: Reading) -> Record:
    """One series."""
    rows, separator = rows_of(path)
    if not rows:
        raise InputError(f"{path}: the file is empty")
    named = _is_header(rows)
    names = [name.strip() for name in rows.pop(0)] if named else [str(i + 1) for i in range(len(rows[0]))]
    first_line = 2 if named else 1
    for line, row in enumerate(rows, start=first_line):
        if len(row) != len(names):
            why = _why(row, names, separator)
            raise InputError(f"{path}, line {line}: {len(row)} columns, expected {len(names)}; {why}", kind=why)
    channels, problems = dict[str, numpy.ndarray](), Problems()
    with problems.noted():
        check_names(names, (*reading.columns, reading.time), str(path))
    cells = dict(zip(names, zip(*rows, strict=True) if rows else [()] * len(names), strict=True))
    steps = Steps.of_texts({name: cells[name] for name in SPECIAL if named and name in cells}, str(path))
    for name, column in cells.items():
        if (named and name in SPECIAL) or not reading.takes(name):
            continue
        with problems.noted():
            if name == reading.time:
                channels[name] = seconds_between(column, name, str(path), first_line)
            else:
                channels[name] = numbers(column, name, str(path), first_line, decimal_comma=separator != ",")
    return series_of(channels, problems, steps, path, reading, named)


def _why(row: Sequence[str], names: Sequence[str], separator: str) -> str:
    """What may be wrong with a row of another width than the header, and what to do."""
    if len(row) < len(names):
        return "is the file cut short?"
    if separator == "," and all(_DIGITS.fullmatch(cell.strip()) for cell in row):
        return "are these decimal commas? Write points, or put semicolons between columns"
    return "give every column a name, or remove the cells at its end"


def _is_header(rows: Sequence[Sequence[str]]) -> bool:
    """Whether the first row names columns: none of it is a value, or it has words above a column of numbers."""
    first = rows[0]
    values = [is_number(text) or is_missing(text) or as_time(text) is not None for text in first]
    if not any(values):
        return True
    below = rows[1] if len(rows) > 1 else []
    return any(not value and is_number(text) for value, text in zip(values, below, strict=False))
