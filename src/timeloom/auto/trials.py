"""Measured device times of plans, which decide between ways whose costs are about the same in the cost model.

For each way to run a pass (one sweep after a warm-up, several corrected sweeps, dense transfers), the ratio of measured
to modelled time on this machine and at this size is kept. A way that was not measured yet and may be the fastest is
tried.
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
"""Number of calls by the same plan of which the shortest time counts: the first ones are not replays yet."""
NEAR = 1.5
"""Multiple of the best way's time up to which a way is worth a trial."""
FINENESS = 8
"""Factors are rounded to powers of two to the 1 / FINENESS: finer differences would not change a plan."""

Cut = tuple[int, int, int]
"""Chunk, warm-up and number of sweeps."""
Factors = tuple[int | None, ...]
"""Measured over modelled time of each way, as an exponent of two in units of 1 / FINENESS; None if not measured."""


@dataclass
class Trial:
    """The measurements of one way."""

    factor: int | None = None
    cut: Cut | None = None
    """Cut of the plan that is being measured."""
    calls: int = 0
    least: float = 0.0
    """The smallest ratio of measured to modelled time in these calls."""


@dataclass
class Trials:
    """The measurements of each way, for one layer and direction."""

    of_way: dict[Way, Trial] = field(default_factory=lambda: {way: Trial() for way in WAYS})
    factors: Factors = (None,) * len(WAYS)
    """The factors of all ways, from which plans are made."""

    def want(self, plan: Cutting, expected: float) -> bool:
        """Whether a pass by this plan, which should take `expected` microseconds, is still to be timed."""
        trial = self.of_way[_way_of(plan)]
        return expected > 0 and (trial.cut != _cut_of(plan) or trial.calls < TIMED)

    def note(self, plan: Cutting, expected: float, milliseconds: float) -> None:
        """Note the device time of a pass by this plan."""
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
    """The way to run next, by the expected times: the fastest one, or one that may be faster and was not measured."""
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
