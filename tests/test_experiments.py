"""The experiments on papers run, in small, and say what their data are."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import pipeline

ROOT = Path(__file__).parents[1]
PAPERS = ("mgrit_hmdb51", "deer_eigenworms", "deer_two_body", "bppsa_bitstream", "bppsa_irmas")

pytestmark = pytest.mark.usefixtures("one_thread")


def fast(name: str, out: Path, *more: str) -> dict[str, Any]:
    """Run an experiment's fast mode; its results. There are a table and a picture too."""
    importlib.import_module(f"experiments.{name}.run").main(["--fast", "--out", str(out), *more])
    assert {path.suffix for path in out.iterdir()} == {".json", ".md", ".png"}
    (path,) = out.glob("*.json")
    results: dict[str, Any] = json.loads(path.read_text())
    return results


def test_multigrid_on_clips(tmp_path: Path) -> None:
    results = fast("mgrit_hmdb51", tmp_path)
    assert results["data"].startswith("generated stand-in for HMDB51")
    assert "generated stand-in" in (tmp_path / "generated.md").read_text()
    ways = results["ways"]
    assert len(ways) == 5
    assert ways["GRU, torch"]["losses"] == pytest.approx(ways["GRU, timeloom"]["losses"], rel=1e-4)
    exact, serial = ways["implicit GRU, exact multigrid"], ways["implicit GRU, in order"]
    assert exact["losses"] == pytest.approx(serial["losses"], rel=1e-3)
    assert exact["accuracy"] == exact["accuracy_in_order"] == serial["accuracy"]


def test_worms(tmp_path: Path) -> None:
    results = fast("deer_eigenworms", tmp_path)
    assert results["data"].startswith("generated stand-in for EigenWorms")
    runs = results["runs"]
    assert runs["parallel"]["loss_difference"] < 1e-4
    assert runs["parallel, short"]["losses"] == pytest.approx(runs["torch, short"]["losses"], rel=1e-4)


def test_two_bodies(tmp_path: Path) -> None:
    found = fast("deer_two_body", tmp_path)["found"]
    assert found["losses"][-1] < found["losses"][0]
    assert len(found["compared"]) == 2
    assert max(one["gradient_difference"] for one in found["compared"]) < 1e-10
    assert torch.get_default_dtype() == torch.float32


def test_bit_streams(tmp_path: Path) -> None:
    results = fast("bppsa_bitstream", tmp_path)
    assert max(one["difference"] for found in results["backward"].values() for one in found.values()) < 1e-5
    ways = results["training"]["ways"]
    for name in ("default", "scan"):
        assert ways[name]["losses"] == pytest.approx(ways["torch"]["losses"], rel=1e-4)


@pytest.mark.parametrize("name", PAPERS)
def test_each_paper_has_its_page(name: str) -> None:
    text = (ROOT / "experiments" / name / "README.md").read_text()
    for part in (f"python -m experiments.{name}.run", "--fast", "## The paper", "## Ours", "## What differs"):
        assert part in text, part
    for word in text.split("](")[1:]:
        assert (ROOT / "experiments" / name / word.partition(")")[0].partition("#")[0]).exists() or "://" in word
    assert f"[{name}]({name}/README.md)" in (ROOT / "experiments" / "README.md").read_text()


def test_wrong_data_end_an_experiment_with_a_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("mgrit_hmdb51", "deer_eigenworms"):
        with pytest.raises(SystemExit):
            importlib.import_module(f"experiments.{name}.run").main(["--data", str(tmp_path / "missing.ts")])
        assert "missing.ts: no such" in capsys.readouterr().err


def test_the_wait_for_data_is_measured(tmp_path: Path) -> None:
    pipeline.main(["--small", "--out", str(tmp_path)])
    results = json.loads((tmp_path / "pipeline.json").read_text())
    for ways in results["cases"].values():
        assert all(0 <= way["share"] < 1 and way["step_ms"] > 0 for way in ways.values())
    assert "| clips |" in (tmp_path / "pipeline.md").read_text()
