"""Which jumps between chunks are rounding, so that neither sweeps nor warm-ups make them smaller."""

from __future__ import annotations

from dataclasses import dataclass

from timeloom.report import SolveReport

NEARLY = 4
"""A first jump within this factor of the tolerance needs no longer warm-up: the few rows over it are run again."""
MOST_ROUNDING, MOST_ROUNDING_SHOWN = 1e-6, 4e-6
"""Jumps beyond this are never rounding, as one more sweep tells; and as a longer warm-up does."""
LONGER = 1.1
"""How much longer that one is at least: over so many steps more, what is forgotten to 1e-6 shrinks to a fourth."""
ABOVE_ROUNDING = 2.0
"""Tolerance, in jumps that turned out to be rounding: more precise than that no sweep is."""


@dataclass
class Rounding:
    """The largest jump that could not be made smaller; changed by its own methods alone."""

    largest: float = 0.0

    def attainable(self, tolerance: float) -> float:
        """The tolerance, or what rounding has turned out to allow."""
        return max(tolerance, ABOVE_ROUNDING * self.largest)

    def learn(self, report: SolveReport) -> None:
        """Take in that a sweep has not halved jumps that were hardly over the tolerance."""
        if report.fell_back or len(report.residuals) < 2:
            return
        before, after = report.residuals[-2:]
        if 0.5 * before < after and before <= min(NEARLY * report.tolerance, MOST_ROUNDING):
            self.largest = max(self.largest, before)

    def learn_warmups(self, shorter: tuple[int, float], longer: tuple[int, float]) -> bool:
        """Take in the jumps behind two warm-ups of so many steps; whether they were rounding."""
        (steps, before), (more, after) = shorter, longer
        are_rounding = 0.5 * before < after <= MOST_ROUNDING_SHOWN and before <= MOST_ROUNDING_SHOWN
        if LONGER * steps > more or not are_rounding:
            return False
        self.largest = max(self.largest, before, after)
        return True
