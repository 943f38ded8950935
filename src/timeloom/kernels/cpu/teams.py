"""Which threads walk a row together (`team.h`): where there are more threads than rows, or few rows of many units.

Of rows that are cut among threads every thread reads all weights. Of rows that threads share, each reads the weights of
its own units alone, and all meet once or twice a step. What is computed is the same, to the bit.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

TOGETHER = 4
"""Rows that threads share, at most: more are better cut among them."""
WORTH_SHARING = 1 << 16
"""Multiplications of a step for each thread, at least: fewer may take less time than to meet. On cores that share a
cache 2^14 are enough, on others hardly 2^16, and the cores of a virtual machine are now these, now those. As CACHED
measured with 2 threads: `python -m benchmarks.calibrate`."""
CACHED = 1 << 18
"""Weights that a core keeps near beside all else: two rows of more are better shared by two threads than cut."""
MOST_TEAMS = 64
"""As fused.h has room for."""


class Team(NamedTuple):
    """Rows that are walked together, by so many threads; alone, as many rows as there are for a thread."""

    rows: int
    members: int


@lru_cache(maxsize=1024)
def team_of(rows: int, threads: int, work: int) -> Team:
    """`work`: multiplications of one row's step, or 0 where its units cannot be shared."""
    each = -(-rows // threads)
    apart = Team(each, 1)
    if each > TOGETHER or not work or (rows == threads and work < CACHED):
        return apart
    together = min(rows, TOGETHER)
    teams = -(-rows // together)
    members = min(threads // teams, work * together // WORTH_SHARING)
    fills = teams * members >= min(rows, threads)
    return Team(together, members) if members > 1 and teams <= MOST_TEAMS and fills else apart
