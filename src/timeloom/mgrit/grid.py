"""How time is coarsened: points and factors of every level, as whole numbers.

Level 0 is time itself, T steps cut into C = ⌈T / m₀⌉ chunks. Level 1 has the chunk starts as its points, so C − 1
steps; level l + 1 has every m_l-th point of level l. No length needs to be divisible by a factor: the remaining points
at the end of a level are F-points that belong to no coarser level.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

from timeloom.cells.coarse import UserStep

COARSEST = 32
"""Number of steps up to which a level is solved sequentially rather than coarsened once more."""
LATER_FACTOR = 4
"""Automatic coarsening factor of all levels but the first, whose factor is the chunk length."""


@dataclass(frozen=True)
class Coarsening:
    """Everything that defines the coarse levels of one solve."""

    factors: tuple[int, ...]
    """Coarsening factor of every level but the coarsest; the first is the chunk length."""
    coarse: str | UserStep
    """Kind of the coarse step, or the user's own."""
    inputs: str
    """The input of a coarse step: the `mean` over its interval, or the first one there (`inject`)."""


def steps_of(steps: int, factors: tuple[int, ...]) -> list[int]:
    """The number of steps on every level, given T steps on level 0."""
    counts = [steps]
    for factor in factors:
        counts.append(-(-steps // factor) - 1 if len(counts) == 1 else counts[-1] // factor)
    return counts


def fit(
    steps: int, levels: int | None, coarsening: int | tuple[int, ...] | None, chunk: Callable[[], int]
) -> tuple[int, ...]:
    """Coarsening factors for T steps; empty if nothing can be coarsened.

    `chunk` chooses the first factor if the user did not. Factors or levels that do not fit are left out, with a warning
    that says what is used instead.
    """
    wanted = _wanted(steps, levels, coarsening, chunk)
    factors: tuple[int, ...] = ()
    for factor in wanted:
        if steps_of(steps, (*factors, factor))[-1] < 1:
            break
        factors += (factor,)
    if len(factors) < len(wanted) and (levels is not None or coarsening is not None):
        _warn(steps, levels, coarsening, factors)
    return factors


def _wanted(
    steps: int, levels: int | None, coarsening: int | tuple[int, ...] | None, chunk: Callable[[], int]
) -> tuple[int, ...]:
    if isinstance(coarsening, tuple):
        return coarsening
    first, later = (chunk(), LATER_FACTOR) if coarsening is None else (coarsening, coarsening)
    if levels is not None:
        return (first,) + (later,) * (levels - 2)
    factors: tuple[int, ...] = (first,)
    while steps_of(steps, factors)[-1] > COARSEST:
        factors += (later,)
    return factors


def _warn(steps: int, levels: int | None, coarsening: int | tuple[int, ...] | None, factors: tuple[int, ...]) -> None:
    given = ", ".join(
        f"{name}={value}" for name, value in (("levels", levels), ("coarsening", coarsening)) if value is not None
    )
    used = f"{len(factors) + 1} levels, coarsened by {', '.join(map(str, factors))}" if factors else "a sequential run"
    warnings.warn(f"MGRIT({given}) does not fit {steps} steps: used {used} instead", stacklevel=2)
