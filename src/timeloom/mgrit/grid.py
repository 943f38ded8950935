"""How time is coarsened: points and factors of every level, as whole numbers.

Level 0 is time itself, T steps cut into C = ⌈T / m₀⌉ chunks. Level 1 has the chunk starts as its points, so C − 1
steps; level l + 1 has every m_l-th point of level l. No length needs to be divisible by anything: what is left over at
the end of a level is F-points that no coarser level knows about.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

from timeloom.cells.coarse import UserStep

COARSEST = 32
"""Steps up to which a level is run serially rather than coarsened once more."""
LATER_FACTOR = 4
"""Automatic coarsening factor of all levels but the first, whose factor is the chunk length."""


@dataclass(frozen=True)
class Coarsening:
    """Everything that makes up the coarse levels of one solve."""

    factors: tuple[int, ...]
    """Coarsening factor of every level but the coarsest; the first is the chunk length."""
    coarse: str | UserStep
    """Kind of the coarse step, or the user's own."""
    inputs: str
    """`mean` or `inject`: what a coarse step reads of its interval's inputs."""


def steps_of(steps: int, factors: tuple[int, ...]) -> list[int]:
    """Steps on every level, from T steps on level 0."""
    counts = [steps]
    for factor in factors:
        counts.append(-(-steps // factor) - 1 if len(counts) == 1 else counts[-1] // factor)
    return counts


def fit(
    steps: int, levels: int | None, coarsening: int | tuple[int, ...] | None, chunk: Callable[[], int]
) -> tuple[int, ...]:
    """Coarsening factors for T steps; none at all where nothing can be coarsened.

    `chunk` chooses the first factor where the user did not. What was asked for and does not fit is fitted, with a
    warning that says what is used instead.
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
