"""A rank is killed, torchrun starts all of them anew, and training ends where an undisturbed run ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import rank_training
import torch


def start(folder: Path, *options: str) -> subprocess.Popen[str]:
    folder.mkdir()
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    command = [*launcher, rank_training.__file__, str(folder), *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_a_killed_run_resumes_from_its_checkpoint_and_ends_with_the_same_weights(tmp_path: Path) -> None:
    plain, killed = tmp_path / "plain", tmp_path / "killed"
    runs = [start(plain), start(killed, "die")]
    try:
        for run in runs:
            said, _ = run.communicate(timeout=180)
            assert run.returncode == 0, said
    finally:
        for run in runs:
            run.terminate()  # and with it the ranks, where one of them hangs
            run.communicate()
    steps, at = range(rank_training.STEPS), rank_training.KILLED_AT
    assert (plain / "log.txt").read_text().split() == [f"0:{step}" for step in steps]
    assert (killed / "log.txt").read_text().split() == [f"{int(step >= at)}:{step}" for step in steps]
    ends = [torch.load(folder / "checkpoint.pt")["model"] for folder in (plain, killed)]
    for name, weight in ends[0].items():
        assert torch.equal(weight, ends[1][name]), name
