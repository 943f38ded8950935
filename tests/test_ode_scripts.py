"""The measurement of `odeint` runs, in small."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_measurement_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = runpy.run_path(str(ROOT / "experiments" / "ode" / "run.py"))
    short = {name: (build, first, 1.0) for name, (build, first, _) in script["PROBLEMS"].items()}
    for name, value in (("STEPS", 20), ("ROUNDS", 1), ("HERE", tmp_path), ("PROBLEMS", short)):
        monkeypatch.setitem(script["main"].__globals__, name, value)
    script["main"]()
    rows = json.loads((tmp_path / "results.json").read_text())
    assert len(rows) == 3 * 2 * 5
    assert all(row["error"] < 1e-3 and row["forward_ms"] > 0 for row in rows)
    assert (tmp_path / "results.md").read_text().count("\n| ") == len(rows) + 1
