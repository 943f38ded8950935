"""What the folds of a run say together."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

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
    qualities = [float("nan") if one["test_quality"] is None else one["test_quality"] for one in found]
    mean, deviation = statistics.fmean(qualities), statistics.stdev(qualities)
    series = sum(one["test_series"] for one in found)
    values = {
        "task": task, "folds": folds, "test_series": series, "test_quality": mean, "deviation": deviation,
        "qualities": qualities, "test_loss": statistics.fmean(one["test_loss"] for one in found),
    }  # fmt: skip
    write_json(folder / SUMMARY, values)
    spread = quality_text(task, deviation)
    each = ", ".join(quality_text(task, quality) for quality in qualities)
    return [
        f"Test {quality_name(task)} {quality_text(task, mean)} ± {spread} over {folds} folds, each of {series} series "
        f"tested once ({each}).",
        f"Runs: {folder}/{FOLD}1 to {FOLD}{folds}; numbers: {folder / SUMMARY}",
    ]
