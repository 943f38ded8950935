"""How many sweeps with corrections, and how many of Newton's steps, turned out to be enough for a layer."""

from __future__ import annotations

from dataclasses import dataclass

from timeloom.report import SolveReport

TOO_MANY = 10**9
"""So many sweeps that no plan has them."""
FEW_SWEEPS = 2
"""Corrected sweeps so few that a warm-up may be cheaper again."""
MOST_CORRECTED = 12
"""Sweeps with corrections that are tried at once, at most: where they are not enough, chunks are lengthened."""
LONGER_CHUNKS, MOST_LONGER = 4, 16
"""Factor by which they are, each time, and altogether at most."""
LOOKS = (1, 8, 64, 512)
"""Solves by more sweeps after which it is tried whether a warm-up would be cheaper, however little the jumps behind
shorter ones promise."""
FIRST_LOOK, LAST_LOOK = 8, 256
"""Solves of so few sweeps in a row after which that is tried; twice as many after each try that failed, to the last."""
LOOK_AFTER = 64
"""Solves in a row after which something cheaper that was not enough once is tried again: fewer sweeps, a warm-up in
place of dense transfers."""
SPARE = 0.1
"""An error this much below its limit would have met it a sweep earlier."""
SPARE_SOLVES = 8
"""Solves in a row after which one of Newton's steps less is tried."""


@dataclass
class SweepCounts:
    """What solves of several sweeps have shown; changed by its own methods alone."""

    needed: int | None = None
    """Sweeps with corrections by the decay that were enough, where they were tried."""
    stretch: int = 1
    """Factor by which chunks are longer than those that are swept fastest, which took too many sweeps."""
    too_few: int = 0
    """Sweeps that were not enough when they were tried last."""
    since_too_few: int = 0
    """Solves since then."""
    solves: int = 0
    """Solves by several sweeps since a warm-up was enough."""
    looking: bool = False
    """Whether the next plan is to try the longest warm-up that would gain over these sweeps."""
    calm: int = 0
    """Solves in a row for which few sweeps were enough."""
    look_after: int = FIRST_LOOK
    """Number of them after which a warm-up is tried instead."""
    newton_steps: int | None = None
    """Newton's steps that a solve by fused kernels takes."""
    newton_spare: int = 0
    """Solves in a row that would have done with one less."""

    def note_too_few(self, sweeps: int) -> None:
        """So many sweeps were not enough: some more the next time, or longer chunks."""
        self.too_few, self.since_too_few = sweeps, 0
        more = sweeps + max(FEW_SWEEPS, sweeps // 2)
        if more <= MOST_CORRECTED:
            self.needed = more
        elif self.stretch < MOST_LONGER:
            self.stretch, self.needed, self.too_few = self.stretch * LONGER_CHUNKS, None, 0
        else:
            self.needed = TOO_MANY

    def learn(self, report: SolveReport) -> bool:
        """Take in how many sweeps were needed. True where they have been few for a while: the network may forget
        quickly again, so that is to be looked at afresh. Of chunks that were lengthened, shorter ones are tried first.
        """
        spare = report.residuals[-1] < SPARE * report.tolerance
        self.since_too_few += 1
        if self.since_too_few > LOOK_AFTER:
            self.too_few = 0
        self.needed = max(report.iterations - spare, self.too_few + 1, FEW_SWEEPS)
        self.solves += 1
        self.looking = self.solves in LOOKS and self.needed > FEW_SWEEPS
        self.calm = self.calm + 1 if self.needed <= FEW_SWEEPS else 0
        if self.calm < self.look_after:
            return False
        self.needed, self.calm, self.look_after = None, 0, min(2 * self.look_after, LAST_LOOK)
        lengthened, self.stretch = self.stretch > 1, max(self.stretch // LONGER_CHUNKS, 1)
        return not lengthened

    def stop_looking(self) -> bool:
        """The longest warm-up is not to be tried any more; whether it was to be."""
        looked, self.looking = self.looking, False
        return looked

    def note_warmup(self, looked: bool) -> None:
        """A warm-up was enough; `looked`: one that was tried in place of sweeps, and may not be cheaper."""
        self.solves = self.solves if looked else 0
        self.look_after = FIRST_LOOK

    def note_newton(self, steps: int) -> None:
        """So many of Newton's steps were enough. One less than were made is little to gain, and a step too few costs a
        whole solve: that is tried after some solves in a row that would have done with it.
        """
        self.newton_spare = self.newton_spare + 1 if steps + 1 == self.newton_steps else 0
        if self.newton_spare in (0, SPARE_SOLVES):
            self.newton_steps, self.newton_spare = steps, 0

    def look_below(self) -> None:
        """Fewer may be enough than what was not: solves now begin at known states."""
        self.too_few = self.since_too_few = 0

    def forget(self) -> None:
        """The network is looked at afresh: whatever was enough."""
        self.needed, self.stretch = None, 1
