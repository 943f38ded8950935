"""Which threads share rows (`team.h`): where there are more threads than rows, or few rows of many units.

If rows are divided among threads, every thread reads all weights. If threads share rows, each reads only the weights of
its own units, and all of them synchronize once or twice a step. Results are then those of one thread, to the bit.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

TOGETHER = 4
"""Largest number of rows that threads share: more are better divided among them."""
WORTH_SHARING = 1 << 16
"""Least multiplications per step and thread for threads to share rows: fewer may take less time than a synchronization.
On cores that share a cache 2^14 are enough, on others hardly 2^16, and a virtual machine may run on either. Like
CACHED, measured with 2 threads: `python -m benchmarks.calibrate`."""
CACHED = 1 << 18
"""Weights that a core's cache holds beside all else: with more, two rows are better shared by two threads than divided
among them."""
MOST_TEAMS = 64
"""As many as fused.h has room for."""


class Team(NamedTuple):
    """Rows that `members` threads share; with one member, the rows of one thread."""

    rows: int
    members: int


@lru_cache(maxsize=1024)
def team_of(rows: int, threads: int, work: int) -> Team:
    """The team for each group of rows; `work`: multiplications per step and row, or 0 if units cannot be shared."""
    each = -(-rows // threads)
    apart = Team(each, 1)
    if each > TOGETHER or not work or (rows == threads and work < CACHED):
        return apart
    together = min(rows, TOGETHER)
    teams = -(-rows // together)
    members = min(threads // teams, work * together // WORTH_SHARING)
    fills = teams * members >= min(rows, threads)
    return Team(together, members) if members > 1 and teams <= MOST_TEAMS and fills else apart
