"""The shortest warm-up that is enough, by bisection between one that was and one that was not.

How far apart two states still are says little about how long they take to meet. Some networks forget step by step;
others keep everything until an input wipes it out, in a single step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

FINENESS = 8
"""Warm-ups are rounded to an eighth of the power of two below them: an unchanged plan is recorded once and replayed."""
NARROW = 1.25
"""Factor over one that was too short within which a warm-up counts as the shortest."""
WORTH = 1.05
"""Factor by which a warm-up must be shorter to be tried."""
TELLING = 0.01
"""Relative jump below which jumps show how fast they shrink."""
SHORTER = 1.5
"""Factor by which a new search goes below the present warm-up: what is shorter still is assumed too short."""
LOOK_AFTER = 64
"""Solves in a row after which a shorter warm-up is tried again, since training changes weights."""
LOOK_AFTER_MISS, LONGEST_WAIT = 16, 128
"""The same after a warm-up failed that had been enough before, since inputs differ in what they need. Doubled each time
that this or a search shows it, up to the second."""
LONGER, MOST_LONGER = 1.5, 8.0
"""Smallest and largest factor by which a warm-up that was too short is lengthened."""
A_LITTLE = 1.25
"""The factor for one that has been enough before, if its jump is too large to show a rate."""


class Miss(NamedTuple):
    """A warm-up that was too short, and the relative jump that it left."""

    steps: int
    jump: float


@dataclass
class WarmupSearch:
    """Steps that were enough lately, and steps that were too short; 0 if unknown."""

    enough: int = 0
    too_short: int = 0
    wait: int = 0
    """Solves left before a shorter warm-up is tried."""
    pause: int = LOOK_AFTER_MISS
    """Solves to wait after the next miss."""
    shortened: bool = False
    """Whether a search found the present warm-up, and nothing has missed since."""
    looking: bool = False
    """Whether everything tried since a search began was enough, so that the shortest warm-up may be far below."""
    missed: tuple[Miss, ...] = ()
    """The last two warm-ups that were too short."""

    def note_enough(self, steps: int) -> None:
        """Note that a warm-up of this length was certified; there is nothing to search for if none ever failed."""
        if self.too_short == 0:
            return
        shorter = steps < self.enough
        self.enough = min(steps, self.enough or steps)
        if self.too_short >= self.enough or (shorter and self.looking):  # network or inputs have changed
            self.too_short, self.missed = max(int(self.enough / SHORTER**2), 1), ()
        self.shortened = self.shortened or (shorter and self.looking)
        if self.wait > 0:
            self.wait -= 1
            if self.wait == 0:
                if self.shortened:  # it was enough during all of the wait
                    self.pause, self.shortened = max(self.pause // 2, LOOK_AFTER_MISS), False
                self.looking, self.too_short, self.missed = True, max(int(self.enough / SHORTER), 1), ()

    def note_too_short(self, steps: int, jump: float) -> None:
        """Note that a warm-up of this length was not certified, since it left this jump."""
        was_enough = 0 < self.enough <= steps
        if was_enough:
            self.enough, self.wait = 0, self.pause
        if was_enough or (self.looking and not self.shortened):
            self.pause, self.shortened = min(2 * self.pause, LONGEST_WAIT), False
        self.looking = False
        self.too_short = max(self.too_short, steps)
        self.missed = (*self.missed[-1:], Miss(steps, jump))

    def longer(self, tried: int, more: float, jump: float) -> float:
        """Steps to try after a warm-up that was too short: `more` steps, as its jump seems to need, within limits.

        A large jump says nothing about that: a warm-up that has been enough at times is only a little too short.
        """
        if self.wait > 0 and jump >= TELLING:
            return A_LITTLE * tried
        return min(max(tried + more, LONGER * tried), MOST_LONGER * tried)

    def next(self, tolerance: float) -> int | None:
        """Steps of the warm-up to try next; None if none is known to be enough.

        Once there is nothing more to find, the next search begins after some solves.
        """
        if not self.enough or self.wait > 0:
            return self.enough or None
        shorter = max(math.isqrt(self.enough * self.too_short), self._foreseen(tolerance))
        if NARROW * self.too_short < self.enough and WORTH * shorter < self.enough:
            return rounded_down(shorter, above=self.too_short)
        self.wait = max(self.pause, LOOK_AFTER)
        return self.enough

    def _foreseen(self, tolerance: float) -> int:
        """Steps at which the jumps, extrapolated from the last two misses, reach the tolerance; 0 if unknown."""
        if len(self.missed) < 2:
            return 0
        (steps, jump), (longer, smaller) = self.missed
        if not (steps < longer and tolerance < smaller < min(jump, TELLING)):
            return 0
        rate = math.log(smaller / min(jump, 1.0)) / (longer - steps)
        return longer + math.ceil(math.log(tolerance / smaller) / rate)


def rounded_up(steps: int) -> int:
    """The next larger of the lengths that plans use."""
    step = _step(steps)
    return -(-steps // step) * step


def rounded_down(steps: int, above: int) -> int:
    """The next smaller of the lengths that plans use; `steps` itself if that is not above `above`."""
    step = _step(steps)
    fewer = steps // step * step
    return fewer if fewer > above else steps


def _step(steps: int) -> int:
    return 1 << max(0, steps.bit_length() - FINENESS.bit_length())
