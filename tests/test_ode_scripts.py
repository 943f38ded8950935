"""The example and the measurement of `odeint` run, in small."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.usefixtures("one_thread")


def test_two_bodies_learn(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(
        sys, "argv", ["two_body.py", "--epochs", "11", "--steps", "40", "--orbits", "2", "--width", "8"]
    )
    before = torch.get_default_dtype()
    try:
        runpy.run_path(str(ROOT / "examples" / "two_body.py"), run_name="__main__")
    finally:
        torch.set_default_dtype(before)
    lines = capsys.readouterr().out.splitlines()
    first, last = (float(line.split("loss ")[1].split()[0]) for line in lines[:2])
    assert last < first
    assert lines[-1].startswith("orbits never seen")


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
