"""What else the machine is busy with: a time measured beside other programs is theirs too."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch

NOTICEABLE = 0.15
"""Cores; below it nobody would see a difference."""
_STAT = Path("/proc/stat")


@dataclass(frozen=True)
class Load:
    """The cores that other programs used over some time."""

    others: float | None
    """Cores in use by other programs, on average; None where the system does not tell."""
    cores: int
    threads: int
    """Threads that torch may use in this process."""

    def words(self) -> str:
        """The load in one sentence."""
        here = f"{counted(self.threads, 'thread')} on {counted(self.cores, 'core')}"
        if self.others is None:
            return f"{here}; this system does not tell what else it was busy with."
        if self.others < NOTICEABLE:
            return f"{here} that nothing else used."
        return (
            f"{here}, of which other programs used {self.others:.1f}: times and speedup are those of a busy machine, "
            f"measure again when it is idle."
        )


def counted(number: int, noun: str) -> str:
    """A number with its noun."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def duration(seconds: float) -> str:
    """A time as people say it."""
    if seconds < 90:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"


class LoadMeter:
    """Measures from when it is made."""

    def __init__(self) -> None:
        self._busy, self._own, self._began = _busy_seconds(), time.process_time(), time.monotonic()

    def read(self) -> Load:
        """What others used since then."""
        busy, elapsed = _busy_seconds(), max(time.monotonic() - self._began, 1e-3)
        others = None
        if busy is not None and self._busy is not None:
            own = time.process_time() - self._own
            others = max(busy - self._busy - own, 0.0) / elapsed
        return Load(others, os.cpu_count() or 1, torch.get_num_threads())


def _busy_seconds() -> float | None:
    """Seconds that all cores together have worked since the machine was started, for whomever."""
    try:
        words = _STAT.read_text().split("\n", 1)[0].split()
        user, nice, system, _, _, interrupts, soft, steal = (int(word) for word in words[1:9])
    except (OSError, ValueError):
        return None
    return (user + nice + system + interrupts + soft + steal) / os.sysconf("SC_CLK_TCK")
