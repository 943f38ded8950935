"""Columns of text as channels of numbers: what a column holds, and what to do about those that are no numbers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime

import numpy

from timeloom.app.errors import InputError

MISSING = frozenset(("", "na", "n/a", "nan", "null", "none", "?", "-"))
"""What people write where a value is missing, in small letters."""
_DECIMAL_COMMA = re.compile(r"[+-]?\d*,\d+(?:[eE][+-]?\d+)?|[+-]?\d+")
_GROUPED = re.compile(r"[+-]?\d{1,3}([., ]\d{3})+([.,]\d+)?")


def is_missing(text: str) -> bool:
    return text.strip().lower() in MISSING


def is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def as_time(text: str) -> float | None:
    """Seconds of a date, a time or a number; None where it is none of them."""
    text = text.strip()
    if is_number(text):
        return float(text)
    for form in (None, "%d.%m.%Y %H:%M:%S", "%d.%m.%Y %H:%M", "%d.%m.%Y", "%m/%d/%Y %H:%M:%S", "%m/%d/%Y %H:%M",
                 "%m/%d/%Y", "%H:%M:%S", "%H:%M"):  # fmt: skip
        try:
            found = datetime.fromisoformat(text) if form is None else datetime.strptime(text, form)
        except ValueError:
            continue
        return found.timestamp() if found.tzinfo else (found - datetime(1970, 1, 1)).total_seconds()
    return None


def numbers(cells: Sequence[str], name: str, where: str, first_line: int, decimal_comma: bool) -> numpy.ndarray:
    """A column as numbers, NaN where a value is missing.

    where: the file; first_line: the line of the first cell; decimal_comma: whether "1,5" can only mean 1.5 here.
    """
    texts = ["nan" if is_missing(cell) else cell for cell in cells]
    try:
        return numpy.asarray(texts, dtype=numpy.float64)
    except ValueError:
        pass
    if decimal_comma and all(_DECIMAL_COMMA.fullmatch(text.strip()) or is_number(text) for text in texts):
        return numpy.asarray([text.replace(",", ".") for text in texts], dtype=numpy.float64)
    kind, text = _diagnosis(texts, name, where, first_line)
    raise InputError(text, kind=f"the column {name!r}: {kind}")


def _diagnosis(texts: Sequence[str], name: str, where: str, first_line: int) -> tuple[str, str]:
    """What a column holds in place of numbers: its kind, and what to do with an example."""
    wrong = [(line, text.strip()) for line, text in enumerate(texts, start=first_line) if not is_number(text)]
    line, example = wrong[0]
    shown = repr(example[:40])
    column = f"{where}: the column {name!r}"
    leave = f"leave it out with --columns, or with --time {name} take it as the time between steps"
    if all(as_time(text) is not None for _, text in wrong):
        return "times", f"{column} holds times ({shown}): {leave}"
    if _DECIMAL_COMMA.fullmatch(example):
        todo = "write a point, or put semicolons between columns"
        return "decimal commas", f"{column} has a decimal comma ({shown}, line {line}): {todo}"
    if _GROUPED.fullmatch(example):
        return "thousands", f"{column} has marks between thousands ({shown}, line {line}): write plain numbers"
    if 2 * len(wrong) > len(texts):
        kinds = len({text for _, text in wrong})
        return "text", (
            f"{column} holds text ({shown}, {kinds} different): leave it out with --columns, or encode it as numbers "
            f"(a class for each step belongs in a column named 'label')"
        )
    hint = "; put commas between columns" if ";" in example or "\t" in example else ""
    return "no number", f"{where}, line {line}: expected a number in the column {name!r}, got {shown}{hint}"


def seconds_between(cells: Sequence[str], name: str, where: str, first_line: int) -> numpy.ndarray:
    """A column of times as the seconds since the step before, 0 at the first."""
    times = [as_time(cell) for cell in cells]
    for line, (text, found) in enumerate(zip(cells, times, strict=True), start=first_line):
        if found is None:
            raise InputError(
                f"{where}, line {line}: expected a time in the column {name!r}, got {text.strip()[:40]!r}",
                kind=f"the column {name!r}: no time",
            )
    return gaps(numpy.asarray(times, dtype=numpy.float64), name, where)


def gaps(times: numpy.ndarray, name: str, where: str) -> numpy.ndarray:
    """Differences of times, 0 at the first step."""
    found = numpy.diff(times, prepend=times[:1])
    if (found < 0).any():
        step = int((found < 0).argmax())
        raise InputError(f"{where}: the times of {name!r} go back at step {step}; sort the rows")
    return found


def check_names(names: Sequence[str], wanted: Sequence[str], where: str) -> None:
    """Refuse a header in which a column cannot be named."""
    for name in wanted:
        if name and name not in names:
            raise InputError(
                f"{where}: no column {name!r}; it has {', '.join(map(repr, names))}", f"no column {name!r}"
            )
    twice = sorted({name for name in names if names.count(name) > 1 and name})
    if twice:
        raise InputError(f"{where}: several columns are named {twice[0]!r}; rename them")
    if "" in names and not any(wanted):
        at = list(names).index("")
        others = ",".join(name for name in names if name)
        raise InputError(
            f"{where}: column {at + 1} has no name (an index that was written along?); leave it out with "
            f"--columns {others}"
        )
