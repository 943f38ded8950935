"""Reads `.ts` files, the text format of the UEA and UCR archives.

A header of `@` lines, then `@data`, then a series a line: channels separated by colons, values by commas, the class or
the target last. With `@timestamps true` a value is a pair `(time,value)`; the times are left out.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy

from timeloom.app.data.channels import as_float32
from timeloom.app.data.records import Label, Record, Split, Table, Task
from timeloom.app.errors import InputError, Problems

_STAMPED = re.compile(r"\(([^()]*),([^(),]*)\)")


def read_ts(path: Path, split: Split | None) -> Table:
    """The series of one file, with what is wrong with others."""
    header: dict[str, list[str]] = {}
    records: list[Record] = []
    problems, in_data = Problems(), False
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            text = line.strip()
            if not text or text.startswith(("#", "%")):
                continue
            if in_data:
                with problems.noted(path.name):
                    records.append(_series(text, header, f"{path.name}, line {number}", split))
            elif text.lower() == "@data":
                in_data = True
            elif text.startswith("@"):
                key, *values = text[1:].split()
                header[key.lower()] = values
            else:
                raise InputError(f"{path}, line {number}: expected a line that starts with @, got {text[:40]!r}")
    if not in_data:
        raise InputError(f"{path}: no @data line; the file is not a .ts file or is cut short")
    return Table(str(path), _task(header), records, tuple(problems.found))


def _says(header: dict[str, list[str]], key: str) -> bool:
    return header.get(key, ["false"])[0].lower() == "true"


def _task(header: dict[str, list[str]]) -> Task | None:
    if _says(header, "classlabel"):
        return "classification"
    return "regression" if _says(header, "targetlabel") else None


def _series(text: str, header: dict[str, list[str]], where: str, split: Split | None) -> Record:
    stamped = _says(header, "timestamps")
    if stamped:  # times may hold colons
        text = _STAMPED.sub(lambda match: match[2].strip(), text)
    parts = text.split(":")
    task = _task(header)
    label: Label | None = None
    if task is not None:
        label = parts.pop().strip()
        classes = header.get("classlabel", [])[1:]
        if task == "classification" and classes and label not in classes:
            raise InputError(
                f"{where}: the label {label[:40]!r} is not among those of the header; is the line cut short?",
                kind="a label that the header does not have",
            )
        if task == "regression":
            label = _number(label, where)
    channels = [_channel(part, where) for part in parts]
    if not channels:
        raise InputError(f"{where}: a label and no values")
    if len({len(channel) for channel in channels}) > 1:
        lengths = ", ".join(str(len(channel)) for channel in channels)
        raise InputError(
            f"{where}: channels of different lengths ({lengths}); is the line cut short?", kind="lengths of channels"
        )
    names = [str(i + 1) for i in range(len(channels))]
    return Record(where, as_float32(numpy.stack(channels, axis=1), names, where), label, split)


def _channel(text: str, where: str) -> numpy.ndarray:
    return numpy.array([_number(value, where) for value in text.split(",") if value.strip()], dtype=numpy.float64)


def _number(text: str, where: str) -> float:
    if text.strip() == "?":
        return float("nan")
    try:
        return float(text)
    except ValueError:
        raise InputError(f"{where}: expected a number, got {text.strip()[:40]!r}", kind="no number") from None
