"""The results of a piece as files, rewritten after every row, so that a run that is stopped keeps its rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.compare import Row

SAME = ("device", "torch")
"""Facts in which an earlier run must agree to be continued."""


def stem(piece: str) -> str:
    """The name of a piece's files, without suffix."""
    return "gpu" if piece == "headline" else f"gpu-{piece}"


@dataclass
class Record:
    """Rows of one piece, by their names, in the piece's order."""

    folder: Path
    piece: str
    facts: dict[str, Any]
    order: Sequence[str]
    rows: dict[str, Row] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    """Names of what was not measured, and why."""

    @property
    def path(self) -> Path:
        return self.folder / f"{stem(self.piece)}.json"

    def resume(self) -> int:
        """Takes over the rows of an earlier run on the same device and torch, errors aside; returns their number."""
        earlier = load(self.path)
        if earlier is None or any(earlier.get(fact) != self.facts.get(fact) for fact in SAME):
            return 0
        wanted = set(self.order)
        rows = [row for row in earlier["rows"] if row.get("name") in wanted and "error" not in row]
        self.rows = {row["name"]: row for row in rows}
        return len(self.rows)

    def missing(self) -> list[str]:
        """Names still to be measured."""
        return [name for name in self.order if name not in self.rows]

    def add(self, row: Row) -> None:
        """Add a row."""
        self.rows[row["name"]] = row

    def content(self) -> dict[str, Any]:
        """What the JSON file holds."""
        rows = [self.rows[name] for name in self.order if name in self.rows]
        return {**self.facts, "piece": self.piece, "rows": rows, "left_out": self.left_out}

    def write(self, markdown: str) -> None:
        """Write both files, each atomically: a reader never sees half of one."""
        self.folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.content(), indent=1, ensure_ascii=False) + "\n"
        for path, content in ((self.path, text), (self.path.with_suffix(".md"), markdown)):
            unfinished = path.with_name(path.name + ".part")
            unfinished.write_text(content)
            unfinished.replace(path)


def load(path: Path) -> dict[str, Any] | None:
    """The content of a piece's JSON file; None where there is none."""
    if not path.is_file():
        return None
    content: dict[str, Any] = json.loads(path.read_text())
    return content
