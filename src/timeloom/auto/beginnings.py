"""Whether a module's calls begin at known states: where these may save enough to be tried, and a try has shown it.

States are looked up before such a call and kept behind it, and on a GPU it is not replayed as a whole. What that buys
is a shorter warm-up or fewer sweeps, if the states have moved little since the samples were last there.

`python -m benchmarks.calibrate` measures COST, `python -m benchmarks.gpu runs` the same on a GPU, and
`python -m benchmarks.warm_starts` what is within REACH.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from timeloom.report import SolveReport

Turn = Literal["as usual", "begin"]
"""What a call does with known states: nothing, or begin there, if all are known, and keep what is found."""
Phase = Literal["waiting", "trying", "begun"]

COST, COST_ON_GPU = 5e-4, 2e-3
"""Seconds that a call takes longer for it: on a CPU with the same warm-up, and on an H200, where two whole training
runs took 1.7 and 2 ms more an update."""
LEAST_SHARE = 0.1
"""Share of a call that must be within reach for a try: one costs as much as some calls save."""
REACH = 0.5
"""Share of what known states may save at best that is taken to be within reach: at the rates of a training from the
start, warm-ups from there are half as long, or no shorter at all."""
SWEEPS = 2
"""Sweeps that chunks take from known states where the network forgets too slowly for a warm-up, at best."""
ON_GPU = 64
"""Chunks that run side by side on a GPU, at least."""
FIRST_WAIT = 8
"""Calls as usual before a try: until then they learn and compile."""
LEARNING = 4
"""Calls that begin at known states before their times count: they learn and compile, too."""
TRIED = 8
"""Last calls of each kind whose times are compared."""
WORTH = 1.03
"""How much longer calls as usual must take for others to go on."""
LOOK, FIRST_LOOKS = 32, 8
"""One call in so many is made as usual, where others begin at known states, to see what it takes by now; and while few
have been."""
AMORTISED = 16
"""Calls as usual after a try that showed no gain, in calls that the try took."""

LEFT = "known states left alone"
"""What a report says of a call that did not begin there."""


@dataclass
class Beginning:
    """What calls of one kind took with and without known states; changed by its own methods alone.

    phase: "begun" from the start for a solver that the user has chosen.
    """

    cost: float = COST
    phase: Phase = "waiting"
    wait: int = FIRST_WAIT
    """Calls before a try."""
    tried: int = 0
    """Calls of this try."""
    filled: int = 0
    """Calls of it after which there was no room for more states; 0 where there is."""
    learned: int = 0
    """Calls of it since the first one that began at known states."""
    barred: bool = False
    """Whether what runs these calls begins as usual, whatever is known."""
    usual: list[float] = field(default_factory=list)
    """Seconds for each step of the last calls as usual."""
    begun: list[float] = field(default_factory=list)
    """The same of calls that began at known states, or would have if all of them had been known."""
    savable: list[float] = field(default_factory=list)
    """Seconds that known states may save of each of the last calls as usual."""
    shares: list[float] = field(default_factory=list)
    """The same as shares of these calls."""
    told: float = 0.0
    """Of these, as it was told last."""
    verdict: str = ""
    """What the last try showed, in words."""

    @property
    def keeps(self) -> bool:
        """Whether states are of use for calls to come."""
        return self.phase != "waiting"

    def turn(self, repeats: bool, full: bool = False) -> Turn:
        """What the next call is to do. `repeats`: whether samples come back at all; `full`: whether there was no room
        for the states of all of them.
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
        """A call of so many steps took so long; `began`: whether it was at known states."""
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
        """These calls cannot begin at known states."""
        self.barred, self.phase = True, "waiting"

    @property
    def why(self) -> str:
        """Why a call as usual did not begin at known states, for its report."""
        if self.verdict or self.keeps or self.barred or len(self.savable) < FIRST_WAIT:
            return self.verdict
        most = median(self.savable)
        if not 0.5 * self.told <= most <= 2 * self.told:  # else the words would be others at every call
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
    """Seconds of a solve that known states may save at best: the warm-up, and all sweeps but one. Where all of it runs
    in one chunk, `resting` since the network forgets too slowly: what so many chunks `side_by_side` would.
    """
    if report.chunk >= steps:
        return report.seconds * max(1 - SWEEPS / side_by_side, 0.0) if resting else 0.0
    run = report.warmup + report.iterations * report.chunk
    return report.seconds * (1 - report.chunk / run)


def _told(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds >= 1 else f"{1e3 * seconds:.2g} ms"
