"""Columns of numbers that count time or rows: they tell when a series was recorded, not what was seen."""

from __future__ import annotations

import numpy

FEWEST_STEPS = 8
"""Shorter series rise by chance."""
EVEN = 0.01
"""Largest deviation of a step from their mean, relative to it, in a column that rises evenly."""
SINCE_1970 = tuple((5e8 * unit, 4e9 * unit) for unit in (1.0, 1e3, 1e6, 1e9))
"""Seconds, milliseconds, microseconds and nanoseconds since 1970, from 1985 to 2096."""
NAMES = frozenset(
    ("time", "times", "timestamp", "timestamps", "date", "datetime", "t", "ts", "epoch", "unixtime", "seconds", "ms",
     "index", "row", "step", "unnamed: 0")
)  # fmt: skip


def counts_time(values: numpy.ndarray, name: str) -> bool:
    """Whether a column `(T,)` of float64 rises as times or the numbers of rows do: evenly, or within the times since
    1970, or in any way under such a name.
    """
    if len(values) < FEWEST_STEPS or not numpy.isfinite(values).all():
        return False
    steps = numpy.diff(values)
    if (steps < 0).any() or values[0] == values[-1]:
        return False
    if name.strip().lower() in NAMES or any(low <= values[0] and values[-1] <= high for low, high in SINCE_1970):
        return True
    return bool((numpy.abs(steps - steps.mean()) <= EVEN * steps.mean()).all())


def example(values: numpy.ndarray) -> str:
    """The first two values."""
    return ", ".join(f"{value:.15g}" for value in values[:2].tolist())
