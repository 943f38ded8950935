"""Peak memory of training steps, each side in a separate process.

`python -m benchmarks.memory LIBRARY CASE` prints the bytes by which the process's peak grew over its steps.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.cases import Case, Regime
from benchmarks.layers import LIBRARIES, Library, Problem, TrainingStep, build

STEPS = 3
"""Enough for timeloom to have settled on its solver."""
LINUX_STATUS = Path("/proc/self/status")
LINUX_RESET = Path("/proc/self/clear_refs")


def peak_growth(case: Case) -> dict[Library, int]:
    """Bytes that training steps of the case add to the peak of a fresh process, for each side."""
    return {library: _in_fresh_process(case, library) for library in LIBRARIES}


def _in_fresh_process(case: Case, library: Library) -> int:
    command = [sys.executable, "-m", "benchmarks.memory", library, json.dumps(asdict(case))]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return int(done.stdout)


def grow(case: Case, library: Library) -> int:
    """Run training steps in this process; returns the bytes by which its peak grew."""
    # A small step first: what a library allocates once, whatever the size, does not count.
    small = replace(case, length=min(case.length, 32), batch=1)
    TrainingStep(build(small, library), Problem.draw(small))()
    step = TrainingStep(build(case, library), Problem.draw(case))
    _forget_peak()
    before = _peak()
    for _ in range(STEPS):
        step()
    return _peak() - before


def _peak() -> int:
    """Largest resident size of this process so far.

    On Linux `ru_maxrss` starts at the parent's peak, which would hide anything smaller, so the kernel's own
    count of this process is read there.
    """
    if LINUX_STATUS.exists():
        for line in LINUX_STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return usage if sys.platform == "darwin" else 1024 * usage


def _forget_peak() -> None:
    """Reset the peak to the present size, if the system can: imports may have peaked higher."""
    if LINUX_RESET.exists():
        LINUX_RESET.write_text("5")


def _main(library: str, text: str) -> None:
    fields = json.loads(text)
    case = Case(**{**fields, "regime": Regime(**fields["regime"])})
    print(grow(case, "timeloom" if library == "timeloom" else "torch"))


if __name__ == "__main__":
    _main(*sys.argv[1:])
