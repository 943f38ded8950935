"""`timeloom train` over ranks: the losses, weights and results of one process, whatever is split and however."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import launch
from test_app_train import SMALL, SOURCE, assert_same_run, folder_of

from timeloom.app import cli
from timeloom.app.train import checkpoint
from timeloom.app.train.checkpoint import BEST, LAST
from timeloom.app.train.metrics_file import read
from timeloom.app.train.trainer import Trainer

ALIKE = [
    "--precision",
    "float64",
    "--epochs",
    "2",
    "--compare",
    "0",
    "--hidden",
    "6",
    "--device",
    "cpu",
    "--dropout",
    "0",
]
CASES: dict[str, tuple[str, list[str]]] = {
    # 26 training series in batches of 25: one is left for the last batch, too few for all data ranks
    "time": ("turning", ["--compare", "1"]),
    "both": ("classification", ["--time-ranks", "2", "--cell", "lstm", "--layers", "2", "--bidirectional"]),
    "labels": ("labelling", ["--layers", "2", "--residual", "--norm", "--mlp"]),
    "labels of both": ("labelling", ["--time-ranks", "2", "--solver", "shooting:chunk=4"]),
    "data": ("regression", ["--time-ranks", "1", "--batch", "5"]),
    "last": ("regression", ["--pooling", "last", "--solver", "mgrit", "--clip", "0.01"]),
    "turning, last": ("turning", ["--pooling", "last", "--cell", "rnn", "--solver", "sequential"]),
}


def arguments(data: Path, case: str, out: Path) -> list[str]:
    kind, options = CASES[case]
    source = "turning:length=65,train=9,valid=5,test=6" if kind == "turning" else str(data / kind)
    return ["--data", source, *ALIKE, "--batch", "25", *options, "--out", str(out / case)]


def train_all(rank: int, data: Path, out: Path, cases: list[str]) -> dict[str, int]:
    """Exit status of each run, on every rank."""
    return {case: cli.run("train", [*arguments(data, case, out), "--debug"]) for case in cases}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for kind in ("classification", "labelling", "regression"):
        folder_of(kind, folder / kind)
    return folder


@pytest.fixture(scope="module")
def alone(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    assert not any(train_all(0, data, folder, list(CASES)).values())
    return folder


def assert_alike(one: Path, other: Path) -> None:
    """Rows, weights and results agree to rounding."""
    mine, theirs = read(one / "metrics.jsonl"), read(other / "metrics.jsonl")
    assert [(row["kind"], row["step"]) for row in mine] == [(row["kind"], row["step"]) for row in theirs]
    for a, b in zip(mine, theirs, strict=True):
        for name in ("loss", "quality", "lr"):
            assert a.get(name, 0) == pytest.approx(b.get(name, 0), rel=1e-9, abs=1e-12), (a, b)
    for name in (LAST, BEST):
        weights = [checkpoint.load(folder / name).weights for folder in (one, other)]
        for key, weight in weights[0].items():
            torch.testing.assert_close(weight, weights[1][key], rtol=1e-7, atol=1e-9)
    results = [json.loads((folder / "summary.json").read_text()) for folder in (one, other)]
    for name in ("test_loss", "test_quality"):
        assert results[0][name] == pytest.approx(results[1][name], rel=1e-9)
    assert results[0]["confusion"] == results[1]["confusion"]
    assert (one / "report.html").is_file()


@pytest.mark.parametrize(("size", "cases"), [(4, list(CASES)), (2, ["both", "labels"])])
def test_ranks_train_as_one_process_does(size: int, cases: list[str], data: Path, alone: Path, tmp_path: Path) -> None:
    assert launch(train_all, size, data, tmp_path, cases) == [dict.fromkeys(cases, 0)] * size
    for case in cases:
        assert_alike(tmp_path / case, alone / case)
        assert json.loads((tmp_path / case / "summary.json").read_text())["processes"] == size


def at_step(number: int, action: Any) -> None:
    """In this process, act before a training step."""
    plain = Trainer._one_step

    def acting(self: Trainer) -> None:
        if self.progress.step == number:
            Trainer._one_step = plain  # type: ignore[method-assign]
            action()
        plain(self)

    Trainer._one_step = acting  # type: ignore[method-assign]


def said_by(*words: str) -> tuple[int, str]:
    """Exit status and what a command tells on stderr, on a rank that does not leave it to the first."""
    cli.WAIT = 0.0
    with contextlib.redirect_stderr(io.StringIO()) as said:
        status = cli.run("train", list(words))
    return status, said.getvalue()


def stop_and_go_on(rank: int, out: Path) -> dict[str, Any]:
    options = [*SMALL, "--epochs", "2", "--layers", "2", "--dropout", "0.2", "--device", "cpu"]
    whole = cli.run("train", [*options, "--out", str(out / "whole"), "--debug"])
    if rank == 1:
        at_step(5, lambda: os.kill(os.getpid(), signal.SIGINT))
    stopped = cli.run("train", [*options, "--out", str(out / "stopped"), "--debug"])
    step = checkpoint.load(out / "stopped" / LAST).progress.step
    if rank == 0:
        shutil.copytree(out / "stopped", out / "copy")
    resumed = cli.run("train", ["--resume", str(out / "stopped"), "--debug"])
    refused = said_by(*options, "--solver", "elk", "--out", str(out / "none"))
    return {"whole": whole, "stopped": stopped, "step": step, "resumed": resumed, "refused": refused}


def test_a_stop_on_one_rank_stops_all_and_resumes_exactly(tmp_path: Path) -> None:
    told = (
        "error: ELK does not run over many ranks: its damping looks at all steps in order. Use 'auto', 'shooting', "
        "'mgrit', 'deer', 'quasi-deer' or 'sequential'\n"
    )
    expected = {"whole": 0, "stopped": 130, "step": 6, "resumed": 0, "refused": (1, told)}
    assert launch(stop_and_go_on, 2, tmp_path) == [expected] * 2
    assert_same_run(tmp_path / "whole", tmp_path / "stopped")
    assert cli.run("train", ["--resume", str(tmp_path / "copy"), "--debug"]) == 0  # in one process
    assert checkpoint.load(tmp_path / "copy" / LAST).progress.step == 8


def die(rank: int, out: Path) -> tuple[int, str]:
    if rank == 1:
        at_step(2, lambda: os.kill(os.getpid(), signal.SIGKILL))
    return said_by(*SMALL, "--time-ranks", "1", "--out", str(out / "run"), "--device", "cpu")


def test_a_rank_that_dies_is_named_by_the_others(tmp_path: Path) -> None:
    (status, said), dead = launch(die, 2, tmp_path)
    assert dead == -signal.SIGKILL
    assert status == 1
    assert said.startswith("error: rank 1 stopped answering: killed, cut off, or hanging"), said
    assert len(said.splitlines()) == 1
    assert len(read(tmp_path / "run" / "metrics.jsonl")) == 2


def refuse(rank: int, out: Path) -> tuple[int, str]:
    return said_by("--data", str(out / "data"), "--out", str(out / str(rank)), "--device", "cpu")


def test_series_too_short_to_share_are_named(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for i in range(6):
        (tmp_path / "data" / f"{i}.csv").write_text("1\n" if i == 2 else "1\n2\n3\n")
    (tmp_path / "data" / "labels.csv").write_text("\n".join(["file,label", *(f"{i}.csv,{i % 2}" for i in range(6))]))
    told = "error: 2.csv has 1 steps, too few for 2 processes to share: give --time-ranks 1 or fewer\n"
    assert launch(refuse, 2, tmp_path) == [(1, told)] * 2


def test_the_command_under_torchrun(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "timeloom"]
    command = [*launcher, "train", *SMALL, "--epochs", "1", "--device", "cpu", "--out", str(tmp_path / "run")]
    environment = {**os.environ, "PYTHONPATH": SOURCE}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("Report: ") == 1, run.stdout
    assert "2 processes together" in run.stdout
