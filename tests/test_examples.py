"""Every example runs, in small, and says what it promises to say."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "examples"
FAST = {
    "custom_cell": ("--length 200 --steps 25 --units 6", "squared error"),
    "lightning_or_hf": ("--length 120 --series 6 --epochs 1", "the same weights in torch's own layers answer the same"),
    "long_series": ("--length 600 --steps 10 --units 6 --batch 2", "one step by torch's layer"),
    "neural_ode": ("--steps 40 --updates 25 --width 8", "distance from the true spiral"),
    "rl_resets": ("--length 120 --updates 20 --batch 2", "episodes won"),
}
PROGRAMS = {
    "amplifier": ("--length 1024 --seconds 0.2", "error-to-signal ratio"),
    "long_files": ("--minutes 0.05", "times faster than its loop"),
    "lorenz": ("--length 200 --updates 10 --width 8", "largest Lyapunov exponent"),
    "policy": ("--sizes 24 2 8 --steps 256 --rollout 16", "timeloom, resets="),
    "public_cells": ("--length 30 --units 4 --batch 2", "| times |"),
}
"""Folders: a program, its page and its picture. They run with the packages that they are about, or a stand-in."""
ELSEWHERE = {"many_ranks", "two_body"}
"""Run by the tests of what they are about."""
pytestmark = pytest.mark.usefixtures("one_thread", "settings_stay")


@pytest.mark.filterwarnings("ignore")  # Lightning's own
@pytest.mark.parametrize("name", FAST | PROGRAMS)
def test_an_example_runs(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options, promised = (FAST | PROGRAMS)[name]
    if name == "lightning_or_hf":
        pytest.importorskip("lightning")
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *options.split()])
    monkeypatch.chdir(tmp_path)
    before = torch.get_default_dtype()
    try:
        runpy.run_path(str(EXAMPLES / (name if name in PROGRAMS else ".") / f"{name}.py"), run_name="__main__")
    finally:
        torch.set_default_dtype(before)
    assert promised in capsys.readouterr().out


def test_examples_are_short_and_all_of_them_are_run() -> None:
    files = {path.stem: path.read_text().splitlines() for path in EXAMPLES.glob("*.py")}
    assert set(files) - ELSEWHERE == set(FAST)
    assert max(len(lines) for lines in files.values()) <= 100


def test_programs_are_folders_with_a_page() -> None:
    folders = {path.parent.name: path.parent for path in EXAMPLES.glob("*/*.py")}
    assert folders.keys() == PROGRAMS.keys()
    for name, folder in folders.items():
        assert sum(len(path.read_text().splitlines()) for path in folder.glob("*.py")) <= 150, name
        page = (folder / "README.md").read_text()
        assert f"examples/{name}/{name}.py" in page
        assert all((folder / picture).exists() for picture in re.findall(r"!\[.*?\]\((.*?)\)", page))
