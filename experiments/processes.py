"""Experiments over processes of their own: torchrun, and the rows that they write."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from experiments.harness import ROOT, Clock, Results, attempt


def torchrun(module: str, ranks: int, arguments: Sequence[str], seconds: float) -> None:
    """`module` on so many processes of one thread each; an error or too long a run is told by the end of its output."""
    source = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": source}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    try:
        done = subprocess.run(
            [*launcher, "-m", module, *arguments],
            env=environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired as expired:
        raise TimeoutError(f"{ranks} processes took more than {seconds:.0f} s") from expired
    if done.returncode:
        told = [
            line for line in done.stderr.splitlines() if re.match(r"(\[rank0\]: )?\w*(Error|Exception)\b", line.strip())
        ]
        raise RuntimeError((told or done.stderr.strip().splitlines() or ["no output"])[0])


def rows_of_processes(
    module: str, ranks: int, arguments: Sequence[str], clock: Clock, file: Path, kept: Sequence[Results] = ()
) -> list[Results]:
    """Rows that `module` writes to `file` as they come, on so many processes of one launch, since starting many takes
    longer than most measurements. The file holds the rows that are `kept` at first; an error becomes a row.
    """
    seconds = 3600.0 if clock.limit is None else max(10.0, clock.left)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    if kept:
        file.write_text(json.dumps(kept))

    def run() -> Results:
        torchrun(module, ranks, [*arguments, "--to", str(file.resolve()), "--seconds", str(seconds)], seconds + 90)
        return {"measured": True}

    done = attempt({"ranks": ranks}, run)
    rows = json.loads(file.read_text()) if file.exists() else []
    file.unlink(missing_ok=True)
    return rows + ([done] if "error" in done else [])


class RowsTogether:
    """Rows that the processes of one launch measure, one after the other, until their time is over: each by the first
    of them, as many as it takes. The very first writes them to a file as they come, behind those that it `held`.
    """

    def __init__(self, seconds: float, file: Path) -> None:
        self._clock, self._file = Clock(seconds / 60), file
        self.held: list[Results] = json.loads(file.read_text()) if file.exists() else []
        self._rows = list(self.held)
        dist.barrier()  # all have read when one writes

    def add(self, ranks: int, measure: Callable[[], Results]) -> None:
        """What `measure()` returns on each of the first `ranks` processes; to be called by all."""
        over = torch.tensor(float(self._clock.over))
        dist.broadcast(over, 0)  # all processes stop together
        if not over and dist.get_rank() < ranks:
            self._rows.append(measure())
        if dist.get_rank() == 0:
            self._file.write_text(json.dumps(self._rows))
        dist.barrier()  # the others wait, and leave their cores alone


def options_of(sizes: Mapping[str, int]) -> list[str]:
    """Sizes as options of a command line."""
    return [part for name, value in sizes.items() for part in (f"--{name}", str(value))]
