"""The experiment with a pruned VGG-11 runs, in small."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

EXPERIMENT = Path(__file__).parent.parent / "experiments" / "bppsa_vgg" / "vgg.py"


@pytest.mark.usefixtures("one_thread")
def test_the_pruned_network_is_retrained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    options = ["--share", "16", "--train", "1", "--retrain", "2", "--batch", "2"]
    monkeypatch.setattr(sys, "argv", ["vgg.py", *options])
    script = runpy.run_path(str(EXPERIMENT))
    monkeypatch.setitem(script["main"].__globals__, "HERE", tmp_path)
    script["main"]()
    results = json.loads((tmp_path / "vgg.json").read_text())
    assert results["largest_difference"] < 1e-4
    assert results["losses"]["scan"] == pytest.approx(results["losses"]["autograd"], rel=1e-4)
    assert results["levels"][0]["critical_flops"] == results["levels"][0]["total_flops"]
    assert results["serial_sparse_flops"] < results["serial_dense_flops"]
    assert (tmp_path / "vgg.png").exists()
