"""metrics.jsonl: a line for each training step, validation and comparison."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any, TextIO

from timeloom.app.errors import InputError
from timeloom.app.files import finite, write_text

NAME = "metrics.jsonl"


class Metrics:
    """The rows of a run, in memory and in its file; in memory alone where another process writes."""

    def __init__(self, folder: Path, up_to: int, writes: bool = True) -> None:
        """Keep the rows of the first `up_to` steps, drop later ones: they will be made again."""
        self.path = folder / NAME
        self.rows = [row for row in read(self.path) if row["step"] <= up_to]
        self._file: TextIO | None = None
        if writes:
            write_text(self.path, "".join(_line(row) for row in self.rows))
            self._file = self.path.open("a", encoding="utf-8")

    def add(self, **row: Any) -> None:
        """A row; it is in the file when this returns."""
        self.rows.append(row)
        if self._file is None:
            return
        try:
            self._file.write(_line(row))
            self._file.flush()
        except OSError as error:
            raise InputError(
                f"cannot write {self.path}: {error.strerror or error}. Make room, and run it again"
            ) from error

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Rows of a kind: step, validation or torch."""
        return [row for row in self.rows if row["kind"] == kind]

    def close(self) -> None:
        with contextlib.suppress(OSError):  # no room: told when the row was added
            if self._file is not None:
                self._file.close()


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a file; a last line cut short by a crash is left out."""
    rows = []
    if path.is_file():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                break
    return rows


def _line(row: dict[str, Any]) -> str:
    return json.dumps(finite(row), allow_nan=False) + "\n"
