"""One pass under a plan that stands: copy in, one replay, copy out, a look at the certificate.

What settled layers (`solve.steady`) and settled cells (`solve.steady_cell`) are made of. Where a graph itself mends
what is not certified, nobody waits for the look: it is taken when somebody asks for the report, or before the next
replay.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from timeloom.auto.experience import Experience
from timeloom.kernels.recording import LOCK, Recording, copy
from timeloom.kernels.replay import RECORDINGS
from timeloom.report import SolveReport
from timeloom.solve.first_sweep import report_of, watch_for
from timeloom.solve.newton import StandingNewton
from timeloom.solve.plan import Plan, StandingPlan
from timeloom.torch_state.streams import Watch

if TYPE_CHECKING:
    from timeloom.solve.steady import SteadyLayer
    from timeloom.solve.trunk import LayerSolve


class Dropped(Exception):
    """A recording has just been dropped to make room."""


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass of a layer, as it was recorded under a plan that stands.

    places: where what changes from call to call is copied to. wanted: what is copied out. lent: number of results that
    are not.
    """

    standing: StandingPlan | StandingNewton
    experience: Experience
    recording: Recording
    places: list[Tensor]
    wanted: list[Tensor]
    lent: int = 0

    @staticmethod
    def of(
        standing: StandingPlan | StandingNewton,
        experience: Experience,
        recording: Recording,
        places: list[Any],
        wanted: list[Any],
        lent: int = 0,
    ) -> Pass:
        return Pass(standing, experience, recording, recording.hold(places), recording.hold(wanted), lent)

    def stands(self) -> bool:
        """Whether the next pass of its kind is to be this one; what the last one told is taken in first."""
        self.recording.catch_up()
        return self.recording.here and self.standing.holds(self.experience)

    def stands_in(self, stream: int, set_as: tuple[bool, bool]) -> bool:
        """The same, where replays are possible, in these surroundings."""
        recording = self.recording
        recording.catch_up()
        return recording.is_of(stream, set_as) and self.standing.holds(self.experience)

    def run(self, given: Sequence[Tensor | None]) -> tuple[list[Tensor], int, Watch | None]:
        """What is wanted, and behind it what is lent; which replay it was, and a watch where it is timed."""
        plan = self.standing.plan
        watched = watch_for(plan, self.experience, self.recording.device)
        found = self.recording.replay_some(self.places, given, self.wanted, self.lent)
        if found is None:
            raise Dropped
        if watched is not None:
            watched.stop()
        self.experience.note_plan(plan.sweeps, plan.dense)
        return *found, watched


class Verdict:
    """What the certificate of one pass says, once somebody looks: its report, for which the GPU may be waited for, and
    what is learned from it. To be made under the lock that the replay was made under.
    """

    __slots__ = ("_backward", "_began", "_learn", "_pass", "_report", "_steps", "_turn", "_watched", "looked", "took")

    def __init__(
        self, found: Pass, turn: int, watched: Watch | None, steps: int, began: float,
        learn: Callable[[SolveReport], None],
    ) -> None:  # fmt: skip
        self._pass: Pass | None = found
        self._turn, self._watched, self._steps, self._learn = turn, watched, steps, learn
        self._began = began
        self._report: SolveReport | None = None
        self._backward: Verdict | None = None
        self.looked = False
        """Whether somebody has, so that what comes behind is to be told at once."""
        self.took: float | None = None
        """Seconds of the host, where nobody waits for the GPU."""
        if found.recording.mended:
            self.took, found.recording.unread = time.perf_counter() - began, self._take_in

    def wait(self) -> bool:
        """Whether what the pass found may be used, which may take waiting for the GPU."""
        if self.took is None:
            self._take_in()
        return self.took is not None or self._report is not None

    def report(self) -> SolveReport | None:
        """Its report, with that of the backward pass in it; None where the certificate is missed, and nothing that was
        found may be used.
        """
        with LOCK:
            self.looked = True
            if self._pass is not None:
                self._pass.recording.catch_up()
            if self._backward is not None and self._report is not None:
                behind, self._backward = self._backward.report(), None
                object.__setattr__(self._report, "backward", behind)
            return self._report

    def add(self, backward: Verdict) -> None:
        """What its backward pass has come to; the last one counts."""
        self._backward = backward
        if self.looked:
            self.report()

    def _take_in(self) -> None:
        """Wait for the GPU, and learn. A missed certificate is noted for the next plan."""
        found = self._pass
        if found is None:
            return
        began = self._began if self.took is None else time.perf_counter() - self.took
        numbers, plan = found.recording.read_all(self._turn), found.standing.plan
        self._pass = None
        if numbers is None:  # nobody knows: to be solved anew, where nothing was mended
            if self.took is not None:
                unread = "; ".join(filter(None, (plan.reason, "another replay hid its certificate")))
                self._report = SolveReport.sequential(self._steps, unread, plan.limit, self.took)
            return
        if isinstance(found.standing, StandingNewton):
            self._report = found.standing.report(numbers, found.experience, began, self.took is not None)
            if self._report is not None:
                self._learn(self._report)
            elif found.standing.linear:
                RECORDINGS.discard(found.recording)  # the next one finds out how many sweeps it takes
        else:
            self._report = self._of_sweeps(found.experience, plan, numbers, began)
        if self._report is None and self.took is not None:
            self._report = self._of_what_was_mended(plan, numbers[-1], self.took)

    def _of_sweeps(
        self, experience: Experience, plan: Plan, numbers: Sequence[float], began: float
    ) -> SolveReport | None:
        """The report of the planned sweeps, or else of the retry that the graph made by itself; None if both missed.

        From a retry only the miss before it is learned: the next warm-up grows by that, and another miss is as cheap.
        """
        report = report_of(numbers[0], plan, self._steps, began)
        if report is not None:
            if self._watched is not None and plan.chunk < self._steps:
                experience.trials.note(plan, plan.expected, self._watched.milliseconds())
            self._learn(report)
            return report
        experience.note_miss(plan, numbers[0], over=self.took is not None)
        if plan.retry is None or len(numbers) == 1:
            return None
        report = report_of(numbers[1], plan.retry, self._steps, began)
        if report is None:
            experience.note_miss(plan.retry, numbers[1], over=True)
        return report

    def _of_what_was_mended(self, plan: Plan, missed: float, took: float) -> SolveReport:
        """Of a certificate that was missed, and one chunk in place of what it was of."""
        what = f"chunks of {plan.chunk}" if plan.linearization is None else "so many of Newton's steps"
        why = "; ".join(filter(None, (plan.reason, f"{what} were not enough this time")))
        whole = SolveReport.sequential(self._steps, why, plan.limit, took)
        return replace(whole, residuals=(missed, 0.0), fell_back=True)


class Call:
    """One call of a steady layer, for its backward pass to come back to."""

    __slots__ = ("began", "layer", "resets", "solve", "verdict")

    def __init__(self, layer: SteadyLayer, solve: Callable[[], LayerSolve], resets: Tensor | None = None) -> None:
        self.layer, self.solve, self.resets = layer, solve, resets
        self.began = time.perf_counter()
        self.verdict: Verdict

    def run(self, given: Sequence[Tensor | None]) -> list[Tensor]:
        """Its forward pass: what is wanted, and behind it what is lent; to be used once it is certified."""
        found = self.layer.forward
        with LOCK:
            results, turn, watched = found.run(given)
            self.verdict = Verdict(found, turn, watched, self.layer.steps, self.began, found.experience.learn)
        return results

    def certify(self) -> Verdict | None:
        """See that the outputs may be used, which may take waiting for the certificate; None where they may not."""
        verdict = self.verdict
        return verdict if verdict.wait() else None

    @property
    def report(self) -> SolveReport:
        """What is said of it."""
        report = self.verdict.report()
        assert report is not None
        return report


def replayed_gradients(
    call: Call,
    found: Pass,
    given: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    learn: Callable[[SolveReport], None],
) -> list[Tensor] | None:
    """What a backward pass finds by a replay; None where there is none, or it is not certified. `learn` is told of it.

    `given`: x, the initial state, what the forward pass has lent of its recording, and weights that were made for it.
    """
    began, ground = time.perf_counter(), call.layer.forward.recording
    try:
        with RECORDINGS.lock:
            if not found.stands():
                return None
            if not ground.has(given[2]):  # another call came between, and what was lent is a copy by now
                ground.take_back()
                kept = len(given) - 2 - len(ground.fresh)
                places: list[Any] = [*ground.inputs, *ground.results[:kept], *ground.fresh]
                copy(places, given)
                ground.at_zero = False
            results, turn, watched = found.run([grad for grad in grads if grad is not None])
            verdict = Verdict(found, turn, watched, call.layer.steps, began, learn)
    except Dropped:
        return None
    if not verdict.wait():
        return None
    call.verdict.add(verdict)
    return results
