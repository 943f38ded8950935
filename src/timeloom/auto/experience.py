"""What earlier calls have shown of one pass of a layer: how fast it forgets, whether sweeps were enough. Changed by its
own methods alone, from the reports of solves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from timeloom.auto.rounding import NEARLY, Rounding
from timeloom.auto.sweep_counts import LOOK_AFTER, LOOKS, SweepCounts
from timeloom.auto.trials import Factors, Trials
from timeloom.auto.warmups import MOST_LONGER, Miss, WarmupSearch, rounded_down, rounded_up
from timeloom.kernels.layer import Cutting
from timeloom.report import SolveReport

ASSUMED_FORGETTING = 0.728
"""Forgetting of a network nothing is known about, a step: a freshly initialised GRU or LSTM forgets faster, as
`python -m benchmarks.calibrate` shows."""
NOISE, PART_OF_TOLERANCE = 1e-7, 1 / 64
"""Jumps this small, or this small a part of the tolerance, are rounding: they bound how fast a network forgets, but do
not tell it."""
STAYS = 0.9
"""A warm-up stays as it is where this part of it would be enough."""
MOST_MISSES = 4
"""Quick certificates that may fail by little, each making the warm-up longer, before they are not tried any more."""
MOST_FALLBACKS = 2
"""Times in a row that sweeps may give up, after each of which more is known, before the network is left alone."""
NEVER = 10**9
"""So many steps that no warm-up has them."""
LEAST_CONTRACTION = 0.5
"""What a warm-up is taken to shrink a difference by where it does not show: the next one then is as long as can be."""
MUCH_SHORTER = 16
"""A warm-up from known states that is shorter by this factor than one from elsewhere is taken for too short."""
FIRST_PAUSE, LONGEST_PAUSE = 20, 256
"""Calls after which `auto` looks again at a network that did not contract, at first and at most: a look that fails may
cost as much as a call does, of which one in 20 may be lost."""

Shown = tuple[int, int | None, int, bool, bool, float, Factors]
"""What an experience comes to for a plan: steps of warm-up, sweeps and how much longer their chunks are, whether the
network is unknown, whether transfers may be dense, the jumps that are rounding, and what was measured of each way."""
Basis = tuple[Any, ...]


@dataclass
class Experience:
    """What the calls on one layer and direction have shown of one pass so far; never part of a state_dict."""

    forgetting: float | None = None
    """Factor by which one step shrinks a difference between two states, as an upper bound."""
    correcting: bool = False
    """Whether the last plan was for several sweeps at once."""
    pause: int = 0
    """Calls for which shooting is not tried."""
    corrected: bool = False
    """Whether the last solve needed more than its warm-up and one sweep."""
    uncertified: bool = False
    """Whether the quick certificate of one sweep has just failed, and a general solve is under way."""
    misses: int = 0
    """Times that it failed by so little that the general solve found nothing to correct."""
    fallbacks: int = 0
    """Times in a row that sweeps gave up."""
    setbacks: int = 0
    """Times in a row that shooting turned out not to pay."""
    solves: int = 0
    """Solves that asked whether their gradient is due for a comparison."""
    missed: tuple[int, float] | None = None
    """Steps of the last warm-up that was not enough, and the jump it left, while a call tries longer ones."""
    missed_before: bool = False
    """Whether that was an earlier call, whose weights and inputs were others."""
    dense_plans: int = 0
    """Plans for dense transfers in a row."""
    without_dense: int = 0
    """Plans for which there are to be none, since they failed."""
    planned: int = 0
    """Steps of the last warm-up that was planned."""
    search: WarmupSearch = field(default_factory=WarmupSearch)
    """For the shortest warm-up, where one has failed."""
    counts: SweepCounts = field(default_factory=SweepCounts)
    """Of sweeps and Newton's steps, where several were made."""
    rounding: Rounding = field(default_factory=Rounding)
    """Jumps that nothing makes smaller."""
    trials: Trials = field(default_factory=Trials, repr=False)
    """Device times of the ways to run it; they differ between ranks."""
    extra_cycles: int = 0
    """Cycles that multigrid was given beyond the number asked for, since its gradients were too far off."""

    @property
    def sweeps(self) -> int | None:
        """Sweeps with corrections by the decay that were enough, where they were tried."""
        return self.counts.needed

    @property
    def stretch(self) -> int:
        """Factor by which the chunks of such sweeps are lengthened."""
        return self.counts.stretch

    @property
    def looking(self) -> bool:
        """Whether the next plan is to try the longest warm-up that would gain over these sweeps."""
        return self.counts.looking

    @property
    def resting(self) -> bool:
        """Whether shooting is not to be tried just now."""
        return self.pause > 0

    def rest_once(self) -> None:
        """Shooting is not to be tried in this call."""
        self.pause = max(self.pause, 1)

    def skip_call(self) -> None:
        """One call less to rest for."""
        self.pause = max(self.pause - 1, 0)

    def note_plan(self, sweeps: int, dense: bool = False) -> None:
        """A plan was made for so many sweeps at once, or for dense transfers."""
        self.correcting = sweeps > 1 and not dense
        self.dense_plans = self.dense_plans + 1 if dense else 0
        self.without_dense = max(self.without_dense - 1, 0)

    @property
    def allows_dense(self) -> bool:
        """Whether dense transfers may be planned: not where they have just failed, and now and then a warm-up shows
        whether the network forgets faster by now.
        """
        return not self.without_dense and self.dense_plans < LOOK_AFTER

    def worth_looking(self, longest: int) -> int:
        """Steps of the longest warm-up that would gain, where it is worth a try; 0 where it has just failed."""
        known = self.counts.solves == LOOKS[0] and (longest <= self.search.too_short or self.search.enough > 0)
        return 0 if known else rounded_down(longest, 0)

    def shown(self, tolerance: float, linear: bool) -> Shown:
        """All that plans are made from; `linear`: of those for gradients."""
        dense, counts, factors = linear and self.allows_dense, self.counts, self.trials.factors
        sweeps = counts.needed, counts.stretch
        return self.warmup(tolerance), *sweeps, self.forgetting is None, dense, self.rounding.largest, factors

    @property
    def basis(self) -> Basis:
        """What `shown` is made from."""
        search, counts, rounding = self.search, self.counts, self.rounding.largest
        searched = search.enough, search.too_short, search.missed, search.wait > 0
        return (self.forgetting, self.missed, self.misses, self.planned, counts.needed, counts.stretch,
                self.allows_dense, rounding, *searched, self.trials.factors)  # fmt: skip

    def note_certificate(self, met: bool) -> None:
        """The quick certificate of the planned sweeps was met, or was not and a general solve follows."""
        self.uncertified = not met

    def note_look(self, steps: int, jump: float) -> None:
        """Two states were so far apart after so many steps, without a sweep."""
        self.forgetting = min(max(jump, NOISE), 1.0) ** (1 / steps)

    def note_miss(self, plan: Cutting, error: float, over: bool = False) -> None:
        """The planned sweeps were not certified, by this jump or error. From two warm-ups of different lengths follows
        how fast the jump shrinks once what is quickly forgotten is gone, and so how long the next one must be. `over`:
        whether the call that showed it is over, so that what comes next is of another one.
        """
        if plan.dense:
            self.without_dense = LONGEST_PAUSE
            return
        if plan.sweeps > 1:
            self.counts.note_too_few(plan.sweeps)
            return
        last, self.missed = None if self.missed_before else self.missed, (plan.warmup, error)
        self.missed_before = over
        self.counts.stop_looking()
        before = (Miss(0, 1.0), Miss(0, 1.0), *self.search.missed)[-2]
        shorter = Miss(0, 1.0) if last is None else Miss(*last)  # of this call: another one's weights and inputs differ
        if self.rounding.learn_warmups(shorter, (plan.warmup, error)):
            self.missed = None
            short = before.steps if before.steps < shorter.steps else 0
            self.search = WarmupSearch(shorter.steps, max(short, int(shorter.steps / MOST_LONGER), 1))
            return
        self.search.note_too_short(plan.warmup, error)
        if plan.warmup == 0 or not 0 < error < math.inf:
            self.forgetting = 1.0
            return
        steps, jump = plan.warmup, min(error, 1.0)
        if last is not None and last[0] < steps and jump < min(last[1], 1.0):
            self.forgetting = (jump / min(last[1], 1.0)) ** (1 / (steps - last[0]))
        else:
            self.forgetting = min(jump ** (1 / steps), LEAST_CONTRACTION ** (1 / steps))

    def look_below(self) -> None:
        """Less may be enough from known states than what was: look at once, from what was enough downwards."""
        self.pause, self.missed = 0, None
        self.counts.look_below()
        if self.search.enough:
            self.search = WarmupSearch(self.search.enough, max(self.search.enough // MUCH_SHORTER, 1))

    def add_cycle(self) -> None:
        """Multigrid's gradients were too far off: a cycle more from now on."""
        self.extra_cycles += 1

    def due(self, every: int | None) -> bool:
        """Whether this solve's gradient is one of those to compare with the exact one."""
        self.solves += 1
        return every is not None and self.solves % every == 0

    def warmup(self, tolerance: float) -> int:
        """Steps after which this network has forgotten where it started, to within the tolerance."""
        forgetting = ASSUMED_FORGETTING if self.forgetting is None else self.forgetting
        if forgetting >= 1 - 1e-6:
            return NEVER
        if self.missed is not None:  # the steps of the last warm-up, and as many more as its jump needs
            tried, jump = self.missed
            if self.search.enough > tried:
                return self.search.enough
            more = math.log(tolerance / 4 / min(jump, 1.0)) / math.log(forgetting)
            return self._stepped(math.ceil(self.search.longer(tried, more, jump)))
        found = self.search.next(tolerance)
        if found is not None:
            return found
        steps = max(4, math.ceil(math.log(tolerance / 4) / math.log(forgetting)))
        return self._stepped(steps + self.misses * math.ceil(steps / 8))

    def _stepped(self, steps: int) -> int:
        """The last warm-up where that is about as long, else one that grows in steps."""
        if not STAYS * self.planned <= steps <= self.planned:
            self.planned = rounded_up(steps)
        return self.planned

    @property
    def trusted(self) -> bool:
        """Whether one sweep is likely to be certified at once."""
        return not self.corrected and self.misses <= MOST_MISSES

    def learn(self, report: SolveReport) -> None:
        """Take in what a shooting solve showed, if it can be seen yet."""
        if report.certificate is not None:
            return
        looked = self.counts.stop_looking()
        self._learn_tries(report)
        self.rounding.learn(report)
        self.corrected = report.iterations > 1 or report.fell_back or bool(report.levels)
        self.fallbacks = self.fallbacks + 1 if report.fell_back else 0
        self.misses += self.uncertified and not self.corrected
        self.uncertified = False
        if self.correcting and report.residuals and not report.warmup:  # else it is of an earlier plan
            self._learn_sweeps(report)
        if report.warmup and report.residuals:
            first = report.residuals[0]
            noise = min(NOISE, PART_OF_TOLERANCE * report.tolerance)
            seen = min(max(first, noise), 1.0) ** (1 / report.warmup)
            halved = len(report.residuals) > 1 and report.residuals[1] < 0.5 * first
            # What is left, and what no sweep makes less, is rounding: a longer warm-up would not help.
            near = first <= NEARLY * report.tolerance and not halved
            self.forgetting = min(seen, self.forgetting or 1.0) if near else seen
            if not self.corrected:  # sweeps that had to be corrected may converge and yet not pay
                self.search.note_enough(report.warmup)
                self.counts.note_warmup(looked)
                self.setbacks = 0 if report.converged else self.setbacks
            if self.misses > MOST_MISSES and first <= report.tolerance / 4:
                self.misses = 0
        if self.fallbacks >= MOST_FALLBACKS:
            self.rest()

    def _learn_tries(self, report: SolveReport) -> None:
        """Take in how a call ended whose first warm-up was not enough: leave the network alone where none was."""
        if self.missed is None:
            return
        self.missed, self.uncertified = None, False
        if report.solver == "sequential" and not self.resting:
            self.rest()

    def _learn_sweeps(self, report: SolveReport) -> None:
        """Take in how many sweeps were needed, or that they were not enough."""
        if report.fell_back or not report.converged:
            self.rest()
            return
        self.setbacks = 0
        if self.counts.learn(report):
            self.forgetting, self.search = None, WarmupSearch()

    def rest(self) -> None:
        """Shooting does not pay on this network as it is: leave it alone for a while, then look at it afresh."""
        self.setbacks += 1
        self.fallbacks = 0
        self.pause = min(FIRST_PAUSE * 2 ** (self.setbacks - 1), LONGEST_PAUSE)
        self.forgetting, self.search = None, WarmupSearch()
        self.counts.forget()


@lru_cache(maxsize=64)
def assumed_warmup(tolerance: float) -> int:
    """Steps after which a network nothing is known about has forgotten where it started."""
    return Experience().warmup(tolerance)
