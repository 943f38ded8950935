"""Device times of plans, measured beside what the costs say: they decide between ways that are about as cheap.

Each way to run a pass (one sweep behind a warm-up, several corrected sweeps, dense transfers) has a factor by which its
costs are off on this machine and at this size. A way that has none yet and may be the fastest is tried.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from timeloom.kernels.layer import Cutting

Way = Literal["warm-up", "sweeps", "dense"]
WAYS: tuple[Way, ...] = ("warm-up", "sweeps", "dense")
TIMED = 6
"""Calls by the same plan whose least time counts: the first ones are launched as they are, or recorded."""
NEAR = 1.5
"""A way that should take no more than this, beside the best one's time, is worth a try."""
FINENESS = 8
"""Factors are told apart by this part of a power of two: finer differences make no other plan."""

Cut = tuple[int, int, int]
"""Chunk, warm-up and sweeps."""
Factors = tuple[int | None, ...]
"""Of each way, as a power of two in parts of FINENESS; None where it was not measured."""


@dataclass
class Trial:
    """What was measured of one way."""

    factor: int | None = None
    cut: Cut | None = None
    """Of the plan that is being measured."""
    calls: int = 0
    least: float = 0.0
    """Of these, as a factor."""


@dataclass
class Trials:
    """What was measured of each way, for one layer and direction."""

    of_way: dict[Way, Trial] = field(default_factory=lambda: {way: Trial() for way in WAYS})
    factors: Factors = (None,) * len(WAYS)
    """Of all ways: what plans are made from."""

    def want(self, plan: Cutting, expected: float) -> bool:
        """Whether the time of a pass by this plan, of so many microseconds by the costs, is still to be measured."""
        trial = self.of_way[_way_of(plan)]
        return expected > 0 and (trial.cut != _cut_of(plan) or trial.calls < TIMED)

    def note(self, plan: Cutting, expected: float, milliseconds: float) -> None:
        """A pass by this plan took so long on the device."""
        trial, cut, factor = self.of_way[_way_of(plan)], _cut_of(plan), 1e3 * milliseconds / expected
        if trial.cut != cut:
            trial.cut, trial.calls = cut, 0
        trial.least = factor if trial.calls == 0 else min(trial.least, factor)
        trial.calls += 1
        if trial.calls == TIMED:
            trial.factor = round(FINENESS * math.log2(trial.least))
            self.factors = tuple(self.of_way[way].factor for way in WAYS)


def _way_of(plan: Cutting) -> Way:
    return "dense" if plan.dense else "sweeps" if plan.sweeps > 1 else "warm-up"


def _cut_of(plan: Cutting) -> Cut:
    return plan.chunk, plan.warmup, plan.sweeps


def fastest(takes: Mapping[Way, float], factors: Factors) -> Way:
    """The way to run next, by what each should take: the fastest by what was measured, or one that may be faster and
    was not.
    """
    known = dict(zip(WAYS, factors, strict=True))
    told = [factor for factor in factors if factor is not None]
    others = 0.0 if not told else sum(told) / len(told)

    def time(way: Way) -> float:
        factor = known[way]
        return takes[way] * math.exp2((others if factor is None else factor) / FINENESS)

    best = min(takes, key=time)
    untried = [way for way in takes if known[way] is None and way != best and time(way) < NEAR * time(best)]
    if known[best] is None or not untried:
        return best
    return min(untried, key=time)
