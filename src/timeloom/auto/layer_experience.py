"""What earlier calls have shown about a layer, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field

from timeloom.auto.experience import Experience
from timeloom.report import SolveReport


@dataclass
class LayerExperience:
    """The experience with one layer and direction, forward and backward."""

    forward: Experience = field(default_factory=Experience)
    backward: Experience = field(default_factory=Experience)
    warm: Experience | None = None
    """Experience with forward solves that begin at known states, which need shorter warm-ups and fewer sweeps."""

    waits: int | None = None
    """Calls left before a measurement that is too costly for a single call; None if none was asked for."""

    def pays_for(self, calls: int) -> bool:
        """Whether to make a measurement in this call that only pays after `calls` calls like it; counts the call."""
        self.waits = calls if self.waits is None else max(self.waits - 1, 0)
        return self.waits == 0

    def skip_call(self) -> None:
        """Count a call for which to wait, or for which shooting is suspended."""
        self.waits = self.waits and self.waits - 1
        self.forward.skip_call()
        self.backward.skip_call()

    def beginning(self, known: bool) -> Experience:
        """The experience with forward solves that begin at known states (`known`), or with all others.

        The former starts as a copy of the latter.
        """
        if known and self.warm is None:
            self.warm = deepcopy(self.forward)
            self.warm.look_below()
        return self.warm if known and self.warm is not None else self.forward

    def forget_known_states(self) -> None:
        """Drop the experience with known states, since no solves begin there any more."""
        self.warm = None

    def learn_backward(self, report: SolveReport) -> None:
        """Learn from a backward solve; if its gradient was too far off, both passes make one more cycle."""
        self.backward.learn(report)
        if report.gradient is not None and report.gradient.too_far:
            self.forward.add_cycle()
            self.backward.add_cycle()


def rest_of(known: Sequence[LayerExperience]) -> bool:
    """Whether shooting is suspended on all layers, since it did not pay; counts this call if so."""
    rests = bool(known) and all(layer.forward.resting or layer.backward.resting for layer in known)
    for experience in (side for layer in known for side in (layer.forward, layer.backward)) if rests else ():
        experience.skip_call()
    return rests
