"""The shortest warm-up that is enough: found by halving what lies between one that was and one that was not.

How far apart two states still are tells little of how long they take to meet. What one network forgets step by step,
another one keeps until an input wipes it out: all of it, up to a step, and nothing beyond.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

FINENESS = 8
"""Warm-ups grow by an eighth of a power of two at least: a plan that stays the same is recorded once and replayed."""
NARROW = 1.25
"""A warm-up that is longer by no more than this than one that was too short is as short as can be."""
WORTH = 1.05
"""A warm-up must be shorter by this to be tried."""
TELLING = 0.01
"""Relative jumps from which on it shows how fast they shrink."""
SHORTER = 1.5
"""A look after a while takes a warm-up that is shorter by this factor for too short."""
LOOK_AFTER = 64
"""Solves in a row after which a shorter one is tried again: training changes weights."""
LOOK_AFTER_MISS, LONGEST_WAIT = 16, 128
"""The same after a warm-up that had been enough was not: inputs differ in what they take. Twice as many after each time
that this or a look showed it, up to so many."""
LONGER, MOST_LONGER = 1.5, 8.0
"""A warm-up that was not enough is tried longer: by these factors at least and at most."""
A_LITTLE = 1.25
"""The same of one that has been enough, where a jump does not tell."""


class Miss(NamedTuple):
    """A warm-up that was too short, and the relative jump that it left."""

    steps: int
    jump: float


@dataclass
class WarmupSearch:
    """What was enough and what was not, lately, in steps; 0 where nothing is known."""

    enough: int = 0
    too_short: int = 0
    wait: int = 0
    """Solves before a shorter one is tried."""
    pause: int = LOOK_AFTER_MISS
    """Solves to wait after the next miss."""
    shortened: bool = False
    """Whether a look found what is enough now, and nothing has missed since."""
    looking: bool = False
    """Whether all that was tried since a look began was enough: then what is looked for may be far below."""
    missed: tuple[Miss, ...] = ()
    """The last two that were too short."""

    def note_enough(self, steps: int) -> None:
        """A warm-up of so many steps was certified. Nothing is searched for where none ever failed."""
        if self.too_short == 0:
            return
        shorter = steps < self.enough
        self.enough = min(steps, self.enough or steps)
        if self.too_short >= self.enough or (shorter and self.looking):  # that was another network, or another input
            self.too_short, self.missed = max(int(self.enough / SHORTER**2), 1), ()
        self.shortened = self.shortened or (shorter and self.looking)
        if self.wait > 0:
            self.wait -= 1
            if self.wait == 0:
                if self.shortened:  # it has held for all of the wait
                    self.pause, self.shortened = max(self.pause // 2, LOOK_AFTER_MISS), False
                self.looking, self.too_short, self.missed = True, max(int(self.enough / SHORTER), 1), ()

    def note_too_short(self, steps: int, jump: float) -> None:
        """A warm-up of so many steps was not certified, since it left this jump."""
        was_enough = 0 < self.enough <= steps
        if was_enough:
            self.enough, self.wait = 0, self.pause
        if was_enough or (self.looking and not self.shortened):
            self.pause, self.shortened = min(2 * self.pause, LONGEST_WAIT), False
        self.looking = False
        self.too_short = max(self.too_short, steps)
        self.missed = (*self.missed[-1:], Miss(steps, jump))

    def longer(self, tried: int, more: float, jump: float) -> float:
        """Steps to try in place of a warm-up that was too short, by as many more as its jump seems to need. A large
        one tells nothing: what has been enough at times is little too short.
        """
        if self.wait > 0 and jump >= TELLING:
            return A_LITTLE * tried
        return min(max(tried + more, LONGER * tried), MOST_LONGER * tried)

    def next(self, tolerance: float) -> int | None:
        """Steps of the warm-up to try next; None where none is known to be enough. Once there is nothing to find any
        more, the next look is some solves away.
        """
        if not self.enough or self.wait > 0:
            return self.enough or None
        shorter = max(math.isqrt(self.enough * self.too_short), self._foreseen(tolerance))
        if NARROW * self.too_short < self.enough and WORTH * shorter < self.enough:
            return rounded_down(shorter, above=self.too_short)
        self.wait = max(self.pause, LOOK_AFTER)
        return self.enough

    def _foreseen(self, tolerance: float) -> int:
        """Where the jumps behind the last two would fall to the tolerance, if they go on as they do; 0 where that
        cannot be told.
        """
        if len(self.missed) < 2:
            return 0
        (steps, jump), (longer, smaller) = self.missed
        if not (steps < longer and tolerance < smaller < min(jump, TELLING)):
            return 0
        rate = math.log(smaller / min(jump, 1.0)) / (longer - steps)
        return longer + math.ceil(math.log(tolerance / smaller) / rate)


def rounded_up(steps: int) -> int:
    """The next of few lengths."""
    step = _step(steps)
    return -(-steps // step) * step


def rounded_down(steps: int, above: int) -> int:
    """The last of few lengths; `steps` itself where that is not above another one."""
    step = _step(steps)
    fewer = steps // step * step
    return fewer if fewer > above else steps


def _step(steps: int) -> int:
    return 1 << max(0, steps.bit_length() - FINENESS.bit_length())
