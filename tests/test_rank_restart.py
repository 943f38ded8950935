"""Under torchrun: the example trains; and where a rank is killed, all resume and end where an undisturbed run ends."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import rank_training
import torch

EXAMPLE = Path(__file__).parents[1] / "examples" / "many_ranks.py"
ABORTED = "terminate called without an active exception"
"""What is said of a rank that C++ has aborted as it exits, after which all ranks are started once more."""


def said_by(*command: str) -> str:
    """What a command said that must end well, run by two ranks that may be started once more."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    run = subprocess.Popen([*launcher, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        said = run.communicate(timeout=180)[0]
        assert run.returncode == 0, said
        return said
    finally:
        run.terminate()  # and with it the ranks, where one of them hangs
        run.communicate()


def test_a_killed_run_resumes_from_its_checkpoint_and_ends_with_the_same_weights(tmp_path: Path) -> None:
    plain, killed = tmp_path / "plain", tmp_path / "killed"
    for folder in (plain, killed):
        folder.mkdir()
    said_by(rank_training.__file__, str(plain), str(killed))
    steps, at = range(rank_training.STEPS), rank_training.KILLED_AT
    assert (plain / "log.txt").read_text().split() == [f"0:{step}" for step in steps]
    assert (killed / "log.txt").read_text().split() == [f"{int(step >= at)}:{step}" for step in steps]
    ends = [torch.load(folder / "checkpoint.pt")["model"] for folder in (plain, killed)]
    for name, weight in ends[0].items():
        assert torch.equal(weight, ends[1][name]), name


def test_the_example_trains() -> None:
    said = said_by(str(EXAMPLE))
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+); \w+\[\w+\] over 2 ranks", said)]
    assert len(losses) == (6 if ABORTED in said else 3), said
    assert losses[-1] < losses[-3]
    assert losses[:-3] in ([], losses[-3:]), "started anew, it trains as before"
