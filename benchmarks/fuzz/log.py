"""The log of judged cases, one line of JSON each, written immediately so that stopped runs can be continued.

Lines: `{"run": facts}` where a run begins, and after it `{"seed", "index", "case", "findings", "worst", …}` for every
case. If a case was judged again, its last line counts; earlier findings that it no longer has count as mended.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Answer = dict[str, Any]
KINDS = ("outputs", "gradients")


class Log:
    """A file of lines, read once and then added to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.runs: list[dict[str, Any]] = []
        self.answers: dict[str, Answer] = {}
        """The last answer for each case, by the case."""
        self.mended: dict[str, Answer] = {}
        """Earlier answers with findings whose last answer for the same case has none, by the case."""
        if path.exists():
            for line in _lines(path):
                self._take(line)

    def begin(self, run: dict[str, Any]) -> None:
        self._write({"run": run})

    def add(self, answer: Answer, seed: int | str | None = None, index: int | None = None) -> None:
        """Add the answer for a case: number `index` of a seed, or one from a file."""
        kept = {name: value for name, value in answer.items() if name not in ("errors", "report", "broken")}
        if not kept["findings"]:
            del kept["findings"]
        elif "report" in answer:
            kept["report"] = answer["report"]
        found = {kind: worst(answer["errors"], kind == "gradients") for kind in KINDS}
        kept["worst"] = {kind: pair for kind, pair in found.items() if pair is not None}
        self._write({"seed": seed, "index": index, **kept})

    def done(self, seed: int | str) -> set[int]:
        """Which configurations of a seed have been judged."""
        return {answer["index"] for answer in self.answers.values() if answer["seed"] == seed}

    def found(self) -> list[Answer]:
        """Answers with findings."""
        return [answer for answer in self.answers.values() if answer.get("findings")]

    def _write(self, line: dict[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self._take(line)

    def _take(self, line: dict[str, Any]) -> None:
        if "run" in line:
            self.runs.append(line["run"])
            return
        line["number"] = len(self.runs)
        before = self.answers.get(line["case"])
        self.answers[line["case"]] = line
        if line.get("findings"):
            self.mended.pop(line["case"], None)
        elif before is not None and before.get("findings"):
            self.mended[line["case"]] = before


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """All lines except a last one that was cut off."""
    for text in path.read_text().splitlines():
        try:
            yield json.loads(text)
        except json.JSONDecodeError:
            continue


def worst(errors: dict[str, tuple[float, float]], gradient: bool) -> tuple[float, float] | None:
    """The largest finite error of outputs or of gradients, and torch's largest."""
    pairs = [pair for name, pair in errors.items() if name.startswith("grad ") == gradient]
    pairs = [pair for pair in pairs if not (math.isnan(pair[0]) or math.isnan(pair[1]))]
    return (max(pair[0] for pair in pairs), max(pair[1] for pair in pairs)) if pairs else None
