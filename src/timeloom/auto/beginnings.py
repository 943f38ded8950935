"""Whether a module's calls begin at known states: tried if these may save enough, kept up if the trial was faster.

Such a call looks up states before it and keeps the new ones after it, and on a GPU it is not replayed as a whole. In
return, it needs a shorter warm-up or fewer sweeps if the states have changed little since the samples were last used.

`python -m benchmarks.calibrate` measures COST, `python -m benchmarks.gpu runs` the same on a GPU, and
`python -m benchmarks.warm_starts` measures REACH.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from timeloom.report import SolveReport

Turn = Literal["as usual", "begin"]
"""What a call does with known states: nothing, or begin at them if all are known and keep the new ones."""
Phase = Literal["waiting", "trying", "begun"]

COST, COST_ON_GPU = 5e-4, 2e-3
"""Seconds that known states add to a call: on a CPU with the same warm-up, and on an H200, where two whole training
runs took 1.7 and 2 ms longer for each update."""
LEAST_SHARE = 0.1
"""Share of a call's time that must be within reach for a trial, which costs as much as some calls save."""
REACH = 0.5
"""Share of the largest possible saving that is assumed to be within reach: at the learning rates of a training from
scratch, warm-ups from known states are half as long, or no shorter at all."""
SWEEPS = 2
"""Sweeps that chunks need from known states, at best, if the network forgets too slowly for a warm-up."""
ON_GPU = 64
"""Fewest chunks that run side by side on a GPU."""
FIRST_WAIT = 8
"""Usual calls before the first trial: until then they learn and compile."""
LEARNING = 4
"""Calls of a trial at known states before their times count: they learn and compile, too."""
TRIED = 8
"""Number of last calls of each kind whose times are compared."""
WORTH = 1.03
"""Factor by which usual calls must be slower for calls to go on beginning at known states."""
LOOK, FIRST_LOOKS = 32, 8
"""While calls begin at known states, one call in `LOOK` is made as usual, to keep its time up to date; one in
`FIRST_LOOKS` as long as few are timed."""
AMORTISED = 16
"""Usual calls after a trial that showed no gain, as a multiple of the trial's calls."""

LEFT = "known states left alone"
"""Words in the reason of a report whose call could have begun at known states, but did not."""


@dataclass
class Beginning:
    """Times of calls of one kind with and without known states; changed only by its own methods.

    phase: "begun" from the start for a solver that the user has chosen.
    """

    cost: float = COST
    phase: Phase = "waiting"
    wait: int = FIRST_WAIT
    """Calls left before a trial."""
    tried: int = 0
    """Calls of this trial so far."""
    filled: int = 0
    """Calls of this trial after which there was no room for more states; 0 as long as there is."""
    learned: int = 0
    """Calls of this trial since the first one that began at known states."""
    barred: bool = False
    """Whether the kernels of these calls cannot use known states."""
    usual: list[float] = field(default_factory=list)
    """Seconds per step of the last usual calls."""
    begun: list[float] = field(default_factory=list)
    """Seconds per step of the last calls that began at known states, or would have if all had been known."""
    savable: list[float] = field(default_factory=list)
    """Seconds that known states may save at best, for each of the last usual calls."""
    shares: list[float] = field(default_factory=list)
    """The same as shares of the times of these calls."""
    told: float = 0.0
    """The median of `savable` that was last stated in a report."""
    verdict: str = ""
    """The outcome of the last trial, in words."""

    @property
    def keeps(self) -> bool:
        """Whether states are kept for later calls."""
        return self.phase != "waiting"

    def turn(self, repeats: bool, full: bool = False) -> Turn:
        """Decide what the next call does.

        repeats: whether samples repeat at all. full: whether there was no room for the states of all samples.
        """
        if self.phase == "waiting":
            if not self._is_worth_a_try(repeats):
                return "as usual"
            self.phase, self.usual = "trying", []
        self.tried += 1
        if self.learned == 0:
            self.filled = self.filled or full * self.tried
            if self.filled and self.tried > 2 * self.filled + FIRST_WAIT:
                self._give_up("there was no room for those of all samples")
                return "as usual"
            return "begin"
        looks = LOOK if len(self.usual) >= TRIED else FIRST_LOOKS
        every = 2 if self.phase == "trying" else looks
        return "as usual" if self.learned > LEARNING and self.tried % every == 0 else "begin"

    def note(self, turn: Turn, began: bool, seconds: float, steps: int, savable: float) -> None:
        """Note the time of a call of `steps` steps; `began`: whether it began at known states."""
        if turn == "as usual":
            self.wait = max(self.wait - 1, 0)
            self.usual = [*self.usual, seconds / steps][-TRIED:]
            self.savable = [*self.savable, savable][-TRIED:]
            self.shares = [*self.shares, savable / seconds if seconds > 0 else 0.0][-TRIED:]
        elif began or self.learned:
            self.learned += 1
            if self.learned > LEARNING:
                self.begun = [*self.begun, seconds / steps][-TRIED:]
        if self.keeps and min(len(self.usual), len(self.begun)) >= TRIED:
            self._judge(steps)

    def bar(self) -> None:
        """Note that these calls cannot begin at known states."""
        self.barred, self.phase = True, "waiting"

    @property
    def why(self) -> str:
        """Why a usual call did not begin at known states, for its report."""
        if self.verdict or self.keeps or self.barred or len(self.savable) < FIRST_WAIT:
            return self.verdict
        most = median(self.savable)
        if not 0.5 * self.told <= most <= 2 * self.told:  # else the text would change with every call
            self.told = most
        return "" if self._has_much_to_save else f"{LEFT}: they would save {_told(self.told)} at most"

    def _is_worth_a_try(self, repeats: bool) -> bool:
        return repeats and not self.barred and self.wait == 0 and self._has_much_to_save

    @property
    def _has_much_to_save(self) -> bool:
        return REACH * median(self.savable) >= self.cost and REACH * median(self.shares) >= LEAST_SHARE

    def _judge(self, steps: int) -> None:
        usual, begun = median(self.usual), median(self.begun)
        if begun * WORTH < usual:
            self.phase, self.verdict = "begun", ""
        else:
            self._give_up(f"a call took {_told(begun * steps)} with them, {_told(usual * steps)} without")

    def _give_up(self, why: str) -> None:
        self.phase, self.verdict = "waiting", f"{LEFT}: {why}"
        self.wait = AMORTISED * self.tried
        self.begun, self.tried, self.learned, self.filled = [], 0, 0, 0


def savable(report: SolveReport, steps: int, resting: bool, side_by_side: int) -> float:
    """Seconds of a solve that known states may save at best: the warm-up, and all sweeps but one.

    For a solve in one chunk that is `resting`, since the network forgets too slowly: the time that as many chunks
    `side_by_side` would save.
    """
    if report.chunk >= steps:
        return report.seconds * max(1 - SWEEPS / side_by_side, 0.0) if resting else 0.0
    run = report.warmup + report.iterations * report.chunk
    return report.seconds * (1 - report.chunk / run)


def _told(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds >= 1 else f"{1e3 * seconds:.2g} ms"
