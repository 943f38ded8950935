"""Which jumps between chunks are rounding, so that neither sweeps nor warm-ups reduce them."""

from __future__ import annotations

from dataclasses import dataclass

from timeloom.report import SolveReport

NEARLY = 4
"""Factor of the tolerance within which a first jump needs no longer warm-up: the few rows over it are swept again."""
MOST_ROUNDING, MOST_ROUNDING_SHOWN = 1e-6, 4e-6
"""Largest jump that can be rounding if one more sweep did not reduce it, and if a longer warm-up did not."""
LONGER = 1.1
"""Least factor by which that warm-up is longer: the added steps would shrink a jump of 1e-6 to a fourth."""
ABOVE_ROUNDING = 2.0
"""Smallest tolerance as a multiple of the largest jump that is rounding: no sweep is more precise."""


@dataclass
class Rounding:
    """The largest jump that could not be reduced; changed only by its own methods."""

    largest: float = 0.0

    def attainable(self, tolerance: float) -> float:
        """The tolerance, or the smallest one that rounding allows if that is larger."""
        return max(tolerance, ABOVE_ROUNDING * self.largest)

    def learn(self, report: SolveReport) -> None:
        """Learn from a report in which a sweep did not halve jumps near the tolerance."""
        if report.fell_back or len(report.residuals) < 2:
            return
        before, after = report.residuals[-2:]
        if 0.5 * before < after and before <= min(NEARLY * report.tolerance, MOST_ROUNDING):
            self.largest = max(self.largest, before)

    def learn_warmups(self, shorter: tuple[int, float], longer: tuple[int, float]) -> bool:
        """Learn from the steps and jumps of two warm-ups; returns whether the jumps were rounding."""
        (steps, before), (more, after) = shorter, longer
        are_rounding = 0.5 * before < after <= MOST_ROUNDING_SHOWN and before <= MOST_ROUNDING_SHOWN
        if LONGER * steps > more or not are_rounding:
            return False
        self.largest = max(self.largest, before, after)
        return True
