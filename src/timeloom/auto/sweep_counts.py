"""How many corrected sweeps, and how many Newton steps, turned out to be enough for a layer."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from timeloom.report import SolveReport

TOO_MANY = 10**9
"""More sweeps than any plan has."""
FEW_SWEEPS = 2
"""Number of corrected sweeps so small that a warm-up may be cheaper again."""
MOST_CORRECTED = 40
"""Number of corrected sweeps beyond which there are no more of them."""
OVER_LONGER = 1.5
"""Factor by which the steps of all sweeps but the first are assumed to become more where chunks are longer. An LSTM
that needed 13 sweeps over chunks of 128 steps needed 5 over 512; a language model 14 over 64, and 9 over 256."""
MOST_BLINDLY = 12
"""The same if the error does not shrink from sweep to sweep: it may still vanish at once, when all is forgotten."""
STRETCHES = (1, 2, 4, 8, 16)
"""Factors by which chunks may be longer than the ones with the fastest sweeps."""
UNKNOWN = (None,) * len(STRETCHES)
LONGER_CHUNKS = 4
"""Factor by which chunks become longer where sweeps are far from being enough."""
KNOWN_FOR = 256
"""Solves for which is remembered how many sweeps other chunks took: training changes that."""
LOOKS = (1, 8, 64, 512)
"""Numbers of solves by several sweeps after which a warm-up is tried in their place, even if the jumps after shorter
warm-ups promise little."""
MANY_MORE = 1.5
"""Factor by which sweeps must have become more since a warm-up was last tried in their place to try it at once."""
FIRST_LOOK, LAST_LOOK = 8, 256
"""Solves in a row by few sweeps after which a warm-up is tried; doubled after each failed trial, up to the second."""
LOOK_AFTER, LONGEST_WAIT = 64, 512
"""Solves in a row after which a cheaper way that once failed is tried again: fewer sweeps, or a warm-up in place of
dense transfers. For fewer sweeps doubled, up to the second, each time that as few fail again."""
SPARE = 0.1
"""Share of its limit below which an error would already have met the limit a sweep earlier."""
TINY = 1e-30
"""Errors below this count as this one."""
SPARE_SOLVES = 8
"""Solves in a row that could do with one Newton step less, or with one sweep less than a number that once was too few,
after which that is tried. Batches that take turns need different numbers."""


class Tried(NamedTuple):
    """The sweeps that chunks of some length took, and the number of solves until then."""

    sweeps: int
    solves: int


@dataclass
class SweepCounts:
    """What solves by several sweeps have shown; changed only by its own methods."""

    needed: int | None = None
    """Number of sweeps with corrections by the decay that were enough; None if unknown."""
    enough: bool = False
    """Whether they were, when last tried."""
    stretch: int = 1
    """Factor by which chunks are longer than the ones with the fastest sweeps, since they need fewer sweeps."""
    tried: dict[int, Tried] = field(default_factory=dict)
    """What other chunks took, by their factor."""
    alternatives: tuple[int | None, ...] = UNKNOWN
    """`over` for all factors, found whenever it may have changed."""
    too_few: int = 0
    """Number of sweeps that were not enough when last tried."""
    since_too_few: int = 0
    """Number of solves since then."""
    wait: int = LOOK_AFTER
    """Number of solves after which so few are tried again."""
    failed: int = 0
    """Largest number of sweeps that was not enough."""
    has_failed: bool = False
    """Whether a number of sweeps ever was too few."""
    spare: int = 0
    """Number of solves in a row that could have done with one sweep less."""
    most_left: float = 0.0
    """Largest error that they left."""
    learned: int = 0
    """Number of solves by several sweeps."""
    solves: int = 0
    """Number of solves by several sweeps since a warm-up was last enough."""
    looking: bool = False
    """Whether the next plan should try the longest warm-up that would be faster than these sweeps."""
    looked: int = 0
    """Number of sweeps in whose place one was last tried."""
    calm: int = 0
    """Number of solves in a row for which few sweeps were enough."""
    look_after: int = FIRST_LOOK
    """Number of such solves after which a warm-up is tried instead."""
    newton_steps: int | None = None
    """Number of Newton steps that a solve by fused kernels needs."""
    newton_spare: int = 0
    """Number of solves in a row that could have done with one step less."""
    scan_sweeps: int = FEW_SWEEPS
    """Number of sweeps after a scan of gradients by fused kernels."""
    scans: int = 0
    """Number of such scans."""

    def over(self, stretch: int) -> int | None:
        """The sweeps that chunks longer by this factor took lately or should take; None if unknown."""
        if stretch == self.stretch or self.needed is None:
            return self.needed
        known = self.tried.get(stretch)
        if known is not None and self.learned - known.solves <= KNOWN_FOR:
            return known.sweeps
        if stretch < self.stretch or not self.enough:
            return None
        return math.ceil(OVER_LONGER * (self.needed - 1) * self.stretch / stretch) + 1

    def _look_over(self) -> None:
        self.alternatives = UNKNOWN if self.needed is None else tuple(map(self.over, STRETCHES))

    def note_stretch(self, stretch: int, sweeps: int) -> None:
        """Note that sweeps over chunks longer by this factor were planned: so many should be enough."""
        if stretch == self.stretch:
            return
        if self.needed is not None:
            self.tried[self.stretch] = Tried(self.needed, self.learned)
        self.stretch, self.needed, self.enough = stretch, sweeps, False
        self.too_few, self.has_failed, self.spare, self.failed = 0, False, 0, 0
        self._look_over()

    def note_too_few(self, sweeps: int, error: float, limit: float) -> None:
        """Note that these sweeps left an error above the limit: plan more, or longer chunks.

        More are planned as if each of them made the error smaller by the same factor; if that would take too many, half
        as many again, where so few were tried, or where they were enough for many solves: one that was not, however
        far off, does not mean that these chunks need too many.
        """
        settled = self.since_too_few > LOOK_AFTER
        self.wait = min(2 * self.wait, LONGEST_WAIT) if sweeps <= self.failed else LOOK_AFTER
        self.failed = max(sweeps, self.failed)
        self.too_few, self.since_too_few = sweeps, 0
        self.has_failed, self.spare, self.enough = True, 0, False
        more = sweeps_until(limit, sweeps, error)
        if more <= MOST_CORRECTED:
            self.needed = max(math.ceil(more), sweeps + FEW_SWEEPS)
        elif sweeps + sweeps // 2 <= (MOST_CORRECTED if settled else MOST_BLINDLY):
            self.needed = sweeps + max(FEW_SWEEPS, sweeps // 2)
        elif self.stretch * LONGER_CHUNKS <= STRETCHES[-1]:
            self.needed = TOO_MANY
            self.note_stretch(self.stretch * LONGER_CHUNKS, 0)
            self.needed = None
        else:
            self.needed = TOO_MANY
        self._look_over()

    def learn(self, report: SolveReport) -> bool:
        """Learn how many sweeps were needed; returns whether to forget what is known about warm-ups.

        That is so after they have been few for a while, since the network may forget quickly again. If chunks were
        lengthened, shorter ones are tried first.
        """
        spares = report.residuals[-1] < SPARE * report.tolerance
        self.most_left = max(report.residuals[-1], self.most_left if self.spare else 0.0)
        self.spare = self.spare + 1 if spares else 0
        before, needed = (self.needed, self.enough), report.iterations
        if self.spare >= (SPARE_SOLVES if self.has_failed else 1):
            excess = needed - sweeps_until(SPARE * report.tolerance, needed, self.most_left)
            needed -= max(int(excess / 2), 1)
            self.spare = 0
        self.since_too_few += 1
        if self.since_too_few > self.wait:
            self.too_few = 0
        self.needed, self.enough = max(needed, self.too_few + 1, FEW_SWEEPS), True
        self.learned += 1
        if before != (self.needed, True) or self.learned % LOOK_AFTER == 0:
            self._look_over()
        self.solves += 1
        due = self.solves in LOOKS or self.needed >= MANY_MORE * self.looked > 0
        self.looking = due and self.needed > FEW_SWEEPS
        self.looked = self.needed if self.looking else self.looked
        self.calm = self.calm + 1 if self.needed <= FEW_SWEEPS else 0
        if self.calm < self.look_after:
            return False
        self.needed, self.calm, self.look_after = None, 0, min(2 * self.look_after, LAST_LOOK)
        lengthened, self.stretch = self.stretch > 1, max(self.stretch // LONGER_CHUNKS, 1)
        self._look_over()
        return not lengthened

    def stop_looking(self) -> bool:
        """End the trial of the longest warm-up; returns whether it was under way."""
        looked, self.looking = self.looking, False
        return looked

    def note_warmup(self, looked: bool) -> None:
        """Note that a warm-up was enough; `looked`: whether it was tried in place of sweeps, so may not be cheaper."""
        self.solves = self.solves if looked else 0
        self.look_after = FIRST_LOOK

    def note_newton(self, steps: int) -> None:
        """Note that this number of Newton steps was enough.

        One step less saves little, and one too few costs a whole solve. So one less is planned only after several
        solves in a row that could have done with it.
        """
        self.newton_spare = self.newton_spare + 1 if steps + 1 == self.newton_steps else 0
        if self.newton_spare in (0, SPARE_SOLVES):
            self.newton_steps, self.newton_spare = steps, 0

    def note_scan(self, sweeps: int) -> None:
        """Note that so many sweeps were made after a scan of gradients; now and then few of them are tried again."""
        self.scans += 1
        self.scan_sweeps = FEW_SWEEPS if self.scans % LOOK_AFTER == 0 else sweeps

    def look_below(self) -> None:
        """Allow fewer sweeps than those that were too few before: solves now begin at known states."""
        self.too_few = self.since_too_few = 0
        self.has_failed = False

    def forget(self) -> None:
        """Forget how many sweeps were enough, since the network is learned anew."""
        self.needed, self.stretch, self.tried, self.alternatives, self.looked = None, 1, {}, UNKNOWN, 0
        self.has_failed, self.spare = False, 0


def sweeps_until(limit: float, sweeps: int, error: float) -> float:
    """Sweeps after which an error is at the limit that is `error` after `sweeps`, if each shrinks it by one factor."""
    if not 0 < limit < 1 or not error < 1:
        return math.inf
    return sweeps * math.log(limit) / math.log(max(error, TINY))
