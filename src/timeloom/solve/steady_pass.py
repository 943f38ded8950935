"""One pass under a standing plan: copy in, replay, copy out, check the certificate.

Settled layers (`solve.steady`) and settled cells (`solve.steady_cell`) consist of such passes. If the graph itself
corrects results that miss their certificate, the host does not wait for the check: it is made when somebody asks for
the report, or before the next replay.
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
    """Raised if a recording has just been dropped to free memory."""


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass of a layer, as it was recorded under a standing plan.

    places: the recording's buffers for the inputs that change from call to call.
    wanted: the results that are copied out.
    lent: the number of leading results that are lent: handed out without a copy, in the recording's own memory.
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
        """Whether the next pass of this kind can be this one; learns from the last replay's certificate first."""
        self.recording.catch_up()
        return self.recording.here and self.standing.holds(self.experience)

    def stands_in(self, stream: int, set_as: tuple[bool, bool]) -> bool:
        """`stands`, provided that replays are possible on this stream and with these settings."""
        recording = self.recording
        recording.catch_up()
        return recording.is_of(stream, set_as) and self.standing.holds(self.experience)

    def run(self, given: Sequence[Tensor | None]) -> tuple[list[Tensor], int, Watch | None]:
        """The wanted results followed by the lent ones, the number of the replay, and a stopwatch if it is timed."""
        plan = self.standing.plan
        watched = watch_for(plan, self.experience, self.recording.device)
        found = self.recording.replay_some(self.places, given, self.wanted, self.lent)
        if found is None:
            raise Dropped
        if watched is not None:
            watched.stop()
        self.experience.note_plan(plan.sweeps, plan.dense, plan.stretch)
        return *found, watched


class Verdict:
    """The outcome of one pass, known once its certificate is read, which may mean to wait for the GPU.

    It gives the report and what is learned from it. Must be created while the lock of the replay is still held.
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
        """Whether the report was asked for, so that a later backward report must be added to it at once."""
        self.took: float | None = None
        """Seconds on the host if nobody waits for the GPU, since the graph corrects missed certificates; else None."""
        if found.recording.mended:
            self.took, found.recording.unread = time.perf_counter() - began, self._take_in

    def wait(self) -> bool:
        """Whether the results may be used; waits for the GPU unless the graph corrects missed certificates."""
        if self.took is None:
            self._take_in()
        return self.took is not None or self._report is not None

    def report(self) -> SolveReport | None:
        """The report, with that of the backward pass in it; None if a missed certificate makes the results unusable."""
        with LOCK:
            self.looked = True
            if self._pass is not None:
                self._pass.recording.catch_up()
            if self._backward is not None and self._report is not None:
                behind, self._backward = self._backward.report(), None
                object.__setattr__(self._report, "backward", behind)
            return self._report

    def add(self, backward: Verdict) -> None:
        """Add the verdict on the backward pass; the last one counts."""
        self._backward = backward
        if self.looked:
            self.report()

    def _take_in(self) -> None:
        """Wait for the GPU, read the certificate and learn from it; a miss is noted for the next plan."""
        found = self._pass
        if found is None:
            return
        began = self._began if self.took is None else time.perf_counter() - self.took
        numbers, plan = found.recording.read_all(self._turn), found.standing.plan
        self._pass = None
        if numbers is None:  # unreadable by now: solve anew, unless the graph corrects misses
            if self.took is not None:
                unread = "; ".join(filter(None, (plan.reason, "another replay hid its certificate")))
                self._report = SolveReport.sequential(self._steps, unread, plan.limit, self.took)
            return
        if isinstance(found.standing, StandingNewton):
            self._report = found.standing.report(numbers, found.experience, began, self.took is not None)
            if self._report is not None:
                self._learn(self._report)
            elif found.standing.linear:
                RECORDINGS.discard(found.recording)  # the next call finds out how many sweeps it takes
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
        """The report of a pass that missed its certificate and was replaced by a run in one chunk."""
        what = f"chunks of {plan.chunk}" if plan.linearization is None else "so many of Newton's steps"
        why = "; ".join(filter(None, (plan.reason, f"{what} were not enough this time")))
        whole = SolveReport.sequential(self._steps, why, plan.limit, took)
        return replace(whole, residuals=(missed, 0.0), fell_back=True)


class Call:
    """One call of a steady layer, to which its backward pass refers."""

    __slots__ = ("began", "layer", "resets", "solve", "verdict")

    def __init__(self, layer: SteadyLayer, solve: Callable[[], LayerSolve], resets: Tensor | None = None) -> None:
        self.layer, self.solve, self.resets = layer, solve, resets
        self.began = time.perf_counter()
        self.verdict: Verdict

    def run(self, given: Sequence[Tensor | None]) -> list[Tensor]:
        """Run the forward pass: the wanted results followed by the lent ones, valid once the call is certified."""
        found = self.layer.forward
        with LOCK:
            results, turn, watched = found.run(given)
            self.verdict = Verdict(found, turn, watched, self.layer.steps, self.began, found.experience.learn)
        return results

    def certify(self) -> Verdict | None:
        """The verdict if the outputs may be used, for which the certificate may have to be awaited; else None."""
        verdict = self.verdict
        return verdict if verdict.wait() else None

    @property
    def report(self) -> SolveReport:
        """The report of this call, which is certified."""
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
    """The gradients of a backward pass by a replay; None if it is not possible or not certified.

    given: x, the initial state, the tensors lent by the forward pass's recording, and weights made for this call.
    learn: receives the report.
    """
    began, ground = time.perf_counter(), call.layer.forward.recording
    try:
        with RECORDINGS.lock:
            if not found.stands():
                return None
            if not ground.has(given[2]):  # another call came between, so lent tensors are copies by now
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
