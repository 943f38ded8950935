"""What the folds of a run say together."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from timeloom.app.data.records import NUMERIC
from timeloom.app.files import write_json
from timeloom.app.train import checkpoint
from timeloom.app.train.checkpoint import LAST
from timeloom.app.train.objective import quality_name, quality_text
from timeloom.app.train.run_files import FOLD, REPORT, SUMMARY


def finished(folder: Path) -> bool:
    """Whether a run has its report, and of the steps that its last checkpoint holds: it may have gone on since."""
    if not (folder / SUMMARY).is_file() or not (folder / REPORT).is_file() or not (folder / LAST).is_file():
        return False
    steps: int = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))["steps"]
    return steps == checkpoint.load(folder / LAST).progress.step


def summarize_folds(folder: Path, folds: int) -> list[str]:
    """Write the numbers of all folds to summary.json, and tell them."""
    found: list[dict[str, Any]] = [
        json.loads((folder / f"{FOLD}{i + 1}" / SUMMARY).read_text(encoding="utf-8")) for i in range(folds)
    ]
    task = found[0]["task"]
    qualities: list[float | None] = [one["test_quality"] for one in found]
    known = [quality for quality in qualities if quality is not None]  # R² needs two targets that differ
    mean = statistics.fmean(known) if known else math.nan
    deviation = statistics.stdev(known) if len(known) > 1 else math.nan
    together = _explained([pair for one in found for pair in one["answers"]]) if task in NUMERIC else None
    series = sum(one["test_series"] for one in found)
    values = {
        "task": task, "folds": folds, "test_series": series, "test_quality": mean, "deviation": deviation,
        "qualities": qualities, "together": together, "test_loss": statistics.fmean(one["test_loss"] for one in found),
    }  # fmt: skip
    write_json(folder / SUMMARY, values)
    spread = f" ± {quality_text(task, deviation)}" if len(known) > 1 else ""
    each = ", ".join("–" if quality is None else quality_text(task, quality) for quality in qualities)
    name, once = quality_name(task), f"over {folds} folds, each of {series} series tested once"
    pooled = [] if together is None else [f"All answers together: {name} {quality_text(task, together)}, {once}."]
    return [
        *([f"Test {name} {quality_text(task, mean)}{spread} {once} ({each})."] if known else []),
        *pooled,
        f"Runs: {folder}/{FOLD}1 to {FOLD}{folds}; numbers: {folder / SUMMARY}",
    ]


def _explained(pairs: Sequence[Sequence[float]]) -> float:
    """R² of pairs of the true number and the answer; NaN where the true ones are all the same."""
    mean = statistics.fmean(true for true, _ in pairs)
    variance = sum((true - mean) ** 2 for true, _ in pairs)
    return 1 - sum((true - answer) ** 2 for true, answer in pairs) / variance if variance else math.nan
