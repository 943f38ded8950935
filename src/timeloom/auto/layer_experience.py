"""What earlier calls have shown of a layer, forward and backward."""

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
    """Forward, of solves that begin at known states: they need shorter warm-ups and fewer sweeps."""

    waits: int | None = None
    """Calls before it is found out what one of them is too short to pay for; None where none was so short."""

    def pays_for(self, calls: int) -> bool:
        """Whether a decision is to be made in this call that takes as long as it is worth after so many like it."""
        self.waits = calls if self.waits is None else max(self.waits - 1, 0)
        return self.waits == 0

    def skip_call(self) -> None:
        """One call less to wait and to rest for."""
        self.waits = self.waits and self.waits - 1
        self.forward.skip_call()
        self.backward.skip_call()

    def beginning(self, known: bool) -> Experience:
        """The experience with forward solves that begin at known states, first of all what is known of the others; or
        with those that do not.
        """
        if known and self.warm is None:
            self.warm = deepcopy(self.forward)
            self.warm.look_below()
        return self.warm if known and self.warm is not None else self.forward

    def forget_known_states(self) -> None:
        """No solves begin at known states any more."""
        self.warm = None

    def learn_backward(self, report: SolveReport) -> None:
        """Take in what a backward solve showed; a gradient that was too far off costs both passes a cycle more."""
        self.backward.learn(report)
        if report.gradient is not None and report.gradient.too_far:
            self.forward.add_cycle()
            self.backward.add_cycle()


def rest_of(known: Sequence[LayerExperience]) -> bool:
    """Whether shooting has turned out not to pay on any layer, and is not to be tried for some calls; counts this
    one.
    """
    rests = bool(known) and all(layer.forward.resting or layer.backward.resting for layer in known)
    for experience in (side for layer in known for side in (layer.forward, layer.backward)) if rests else ():
        experience.skip_call()
    return rests
