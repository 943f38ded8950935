"""How a recurrence is to be solved: the decisions of a solver for one problem and direction."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple, Protocol

from timeloom.auto.experience import Basis, Experience, Shown
from timeloom.kernels.layer import Cutting
from timeloom.problem import Recurrence
from timeloom.report import SolveReport
from timeloom.solve.chain import Chain
from timeloom.solve.linearize import Linearization
from timeloom.solve.tangents import RANK

Direction = Literal["forward", "backward"]
OnDivergence = Literal["sequential", "raise", "ignore"]
Adjoint = Literal["same", "scan", "mgrit", "sequential"]
Correction = Literal["auto", "none", "diag", "secant", "lowrank", "newton"]
Driver = Callable[[Chain, "Plan"], SolveReport]
"""Solves a chain as a plan says: `solve.driver.march`, or a method's own loop."""
GIVE_UP_AFTER = 5
"""Default number of sweeps that may fail to halve the residual before the solve counts as not contracting."""
MOST_SWEEPS = 40
"""Default of the largest number of sweeps."""
MORE_SWEEPS = 3
"""Additional corrected sweeps to try if the planned ones were not quite enough."""
WORTH_INSISTING = 64
"""Factor by which these additional sweeps are likely to reduce an error."""
LONGER_WARMUP = 1.5
"""Factor by which a warm-up that was not quite enough is lengthened."""


@dataclass(frozen=True, kw_only=True)
class Plan(Cutting):
    """How to solve a chain, as a solver decided; kernels read nothing but its `Cutting`.

    sweeps: number of sweeps in one call, with corrections by the decay between them, before anything is measured.
    """

    driver: Driver
    tolerance: float
    max_iters: int
    on_divergence: OnDivergence
    correction: Correction = "none"
    rank: int = RANK
    """Number of directions of each link for `correction="lowrank"`."""
    reason: str = ""
    """The reasons for these decisions, for the report."""
    decay_is_cheap: bool = True
    """Whether `correction="auto"` may compute the decay in every sweep."""
    newton_up_to: int = 0
    """Largest state size for which `correction="auto"` may use dense transfers."""
    linearization: Linearization | None = None
    """How to correct chunks of one step, in place of `correction`."""
    name: str = ""
    """Name of the method in the report, in place of `shooting[correction]`."""
    patience: int = GIVE_UP_AFTER
    """Number of sweeps that may fail to halve the residual before the solve counts as not contracting."""
    accepts: float = 0.0
    """Largest error of a chunk start to accept after all planned sweeps. The error is measured as the size of the next
    correction: over a long memory jumps add up, and a correction is their sum."""
    counts_errors: bool = False
    """Whether the tolerance holds for what jumps add up to, not for each jump; False if the user gave the tolerance of
    a jump."""
    stretch: int = 1
    """Factor by which the chunks of several sweeps are longer than the ones with the fastest sweeps."""
    expected: float = 0.0
    """Expected time of its sweeps on the device in microseconds, if known."""
    polish: float = math.inf
    """Residual above which a solve that meets the tolerance is still corrected and swept once more."""
    retry: Plan | None = None
    check_gradient: bool = False
    """Whether to compare the gradients of a backward solve with the exact ones."""
    gradient_tolerance: float | None = None
    """Largest relative error of the gradient to accept in such a comparison."""

    @property
    def wants_decay(self) -> bool:
        """Whether sweeps compute the decay: if the correction consists of it, or uses it and it is cheap."""
        return self.correction == "diag" or (self.correction in ("auto", "secant", "lowrank") and self.decay_is_cheap)

    @property
    def learns_gains(self) -> bool:
        """Whether to record the gains of links, since the correction does not know their transfers in all directions.

        Secants only know the directions in which starts have moved, tangents only those that were swept.
        """
        return self.linearization is None and self.correction != "newton"

    @property
    def damped(self) -> bool:
        return self.linearization is not None and self.linearization.damped

    @cached_property
    def method(self) -> str:
        """Name of the method for the report, if the planned sweeps are enough."""
        chosen = "none" if self.sweeps == 1 else "diag"
        return f"shooting[{chosen if self.correction == 'auto' else self.correction}]"

    @cached_property
    def limit(self) -> float:
        """Upper limit of the certificate of the planned sweeps: of a jump after one sweep, of an error after several.

        If a warm-up of w steps reduces errors to the tolerance, then c steps reduce them to the share tolerance^(c/w).
        This share of an error does not show as a jump between chunks of c steps. The accepted error is the tolerance,
        or `accepts` if that is larger: rounding adds up over a long memory.
        """
        if self.sweeps > 1:
            return self.accepts
        if not self.counts_errors or self.warmup <= self.chunk:
            return self.tolerance
        hidden: float = self.tolerance ** (self.chunk / self.warmup)
        return min(self.tolerance, max(self.tolerance, self.accepts) * (1.0 - hidden))

    def insisting(self, missed: float) -> Plan | None:
        """A plan with more sweeps or a longer warm-up, if that is likely to meet a certificate that was missed."""
        if self.sweeps > 1:
            return replace(self, sweeps=self.sweeps + MORE_SWEEPS) if missed <= WORTH_INSISTING * self.limit else None
        warmup = math.ceil(self.warmup * LONGER_WARMUP)
        return replace(self, warmup=warmup) if missed**LONGER_WARMUP <= self.limit else None

    def march(self, chain: Chain) -> SolveReport:
        """Solve the chain by this plan's driver."""
        return self.driver(chain, self)


@dataclass(frozen=True)
class RankPlan:
    """How to solve over ranks. Chunk and warm-up inside a rank are its own; all else is the same on every rank."""

    inside: Plan
    lead: int = 0
    """Steps at the end of each rank's slice that are run first, to guess the next rank's start."""
    way: Literal["sweeps", "cycles", "in order"] = "sweeps"
    """Whether ranks sweep side by side, cycle through levels, or run one after the other."""


class StandingPlan(NamedTuple):
    """A plan with the knowledge that it was made from: it stands (stays valid) as long as that is the same."""

    plan: Plan
    tolerance: float
    linear: bool
    """Whether it is a plan for gradients."""
    shown: Shown
    basis: Basis
    """What `shown` was derived from: as long as it is the same, so is `shown`."""

    @property
    def cutting(self) -> Cutting:
        """The part of the plan that kernels read."""
        return self.plan

    def holds(self, experience: Experience) -> bool:
        """Whether the plan is valid for the next call, too."""
        if experience.pause or experience.looking:
            return False
        same = experience.basis == self.basis
        return same or experience.shown(self.tolerance, self.linear) == self.shown


class Planner(Protocol):
    """What a solve needs from a solver."""

    @property
    def on_divergence(self) -> OnDivergence:
        """What to do if the sweeps do not converge."""

    @property
    def adapts(self) -> bool:
        """Whether it makes another plan if a sweep shows that the first one is not enough."""

    @property
    def on_tape(self) -> bool:
        """Whether it is the plain loop over steps on autograd's tape, used if there are no lengths and no resets."""

    def plan(self, problem: Recurrence, experience: Experience, direction: Direction = "forward") -> Plan:
        """The plan to solve for the states, or for the gradients."""

    def standing(self, problem: Recurrence, experience: Experience, direction: Direction) -> StandingPlan | None:
        """The plan that `plan` would return, if it was made before; else None."""

    def plan_over_ranks(
        self, problem: Recurrence, experience: Experience, sizes: tuple[int, ...], direction: Direction = "forward"
    ) -> RankPlan:
        """The plan over ranks: `problem` is this rank's slice, `sizes` the number of steps that each rank holds."""
