"""One pass under a plan that stands: copy in, one replay, copy out, a look at the certificate.

What settled layers (`solve.steady`) and settled cells (`solve.steady_cell`) are made of.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from timeloom.auto.experience import Experience
from timeloom.kernels.recording import Recording, copy
from timeloom.kernels.replay import RECORDINGS
from timeloom.report import SolveReport
from timeloom.solve.first_sweep import report_of, watch_for
from timeloom.solve.newton import StandingNewton
from timeloom.solve.plan import StandingPlan
from timeloom.torch_state.streams import Watch

if TYPE_CHECKING:
    from timeloom.solve.steady import SteadyLayer
    from timeloom.solve.trunk import LayerSolve


class Dropped(Exception):
    """A recording has just been dropped to make room."""


class Turn(NamedTuple):
    """Which replay of a recording a pass was, and a watch where it is timed."""

    number: int
    watched: Watch | None = None


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
        """Whether the next pass of its kind is to be this one."""
        return self.recording.here and self.standing.holds(self.experience)

    def run(self, given: Sequence[Tensor | None]) -> tuple[list[Tensor], Turn]:
        """What is wanted, and behind it what is lent; and which replay it was."""
        plan = self.standing.plan
        watched = watch_for(plan, self.experience, self.recording.device)
        found = self.recording.replay_some(self.places, given, self.wanted, self.lent)
        if found is None:
            raise Dropped
        if watched is not None:
            watched.stop()
        self.experience.note_plan(plan.sweeps, plan.dense)
        return found[0], Turn(found[1], watched)

    def report(self, turn: Turn, steps: int, began: float) -> SolveReport | None:
        """Waits for the GPU. There is none where the certificate is missed: that is noted for the next plan."""
        numbers, plan = self.recording.read_all(turn.number), self.standing.plan
        if numbers is None:  # nobody knows: to be solved anew
            return None
        if isinstance(self.standing, StandingNewton):
            return self.standing.report(numbers, self.experience, began)
        (error,) = numbers
        report = report_of(error, plan, steps, began)
        if report is None:
            self.experience.note_miss(plan, error)
        elif turn.watched is not None and plan.chunk < steps:
            self.experience.trials.note(plan, plan.expected, turn.watched.milliseconds())
        return report


class Call:
    """One call of a steady layer, for its backward pass to come back to."""

    __slots__ = ("began", "layer", "report", "resets", "solve", "turn")

    def __init__(self, layer: SteadyLayer, solve: Callable[[], LayerSolve], resets: Tensor | None = None) -> None:
        self.layer, self.solve, self.resets = layer, solve, resets
        self.began = time.perf_counter()
        self.turn = Turn(0)
        self.report: SolveReport | None = None

    def certify(self) -> SolveReport | None:
        """Wait for the certificate; None where it is missed, and the outputs are not to be used."""
        layer = self.layer
        self.report = report = layer.forward.report(self.turn, layer.steps, self.began)
        if report is not None:
            layer.forward.experience.learn(report)
        return report


def replayed_gradients(
    found: Pass, ground: Recording, steps: int, given: Sequence[Tensor], grads: Sequence[Tensor | None]
) -> tuple[list[Tensor] | None, SolveReport | None]:
    """What a backward pass finds by a replay, and its report; None where there is none, or it is not certified.

    `given`: x, the initial state, what the forward pass has lent of its recording, the `ground`, and weights that were
    made for it.
    """
    began = time.perf_counter()
    try:
        with RECORDINGS.lock:
            if not found.stands():
                return None, None
            if not ground.has(given[2]):  # another call came between, and what was lent is a copy by now
                ground.take_back()
                kept = len(given) - 2 - len(ground.fresh)
                places: list[Any] = [*ground.inputs, *ground.results[:kept], *ground.fresh]
                copy(places, given)
                ground.at_zero = False
            results, turn = found.run([grad for grad in grads if grad is not None])
    except Dropped:
        return None, None
    report = found.report(turn, steps, began)
    return (None, None) if report is None else (results, report)
