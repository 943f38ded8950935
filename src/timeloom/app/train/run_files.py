"""Names of what a run writes, beside its checkpoints, settings and metrics."""

from __future__ import annotations

import re
from pathlib import Path

SUMMARY, REPORT, FOLD = "summary.json", "report.html", "fold-"


def folds_of(folder: Path) -> list[Path]:
    """The runs of all folds in a folder, in order; none where it is no folder of folds."""
    found = [path for path in folder.glob(f"{FOLD}*") if re.fullmatch(rf"{FOLD}\d+", path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix(FOLD)))
