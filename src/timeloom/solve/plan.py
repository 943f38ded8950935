"""How a recurrence is to be solved: what a solver decided for one problem and direction."""

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
"""Makes a chain's links fit together as a plan says: `solve.driver.march`, or a loop of a method's own."""
GIVE_UP_AFTER = 5
"""Sweeps without halving the residual before it counts as not contracting."""
MOST_SWEEPS = 40
"""Sweeps at most, unless told otherwise."""
MORE_SWEEPS = 3
"""Corrected sweeps more than planned that are tried where the planned ones were not quite enough."""
WORTH_INSISTING = 64
"""Factor by which so many more sweeps are likely to reduce an error."""
LONGER_WARMUP = 1.5
"""A warm-up that was not quite enough is tried this much longer."""


@dataclass(frozen=True, kw_only=True)
class Plan(Cutting):
    """How to march: what a solver decided. Kernels read the cutting of it alone.

    sweeps: those to make at once, with corrections by the decay between them, before anything is measured.
    """

    driver: Driver
    tolerance: float
    max_iters: int
    on_divergence: OnDivergence
    correction: Correction = "none"
    rank: int = RANK
    """Directions of each link that `correction="lowrank"` looks at."""
    reason: str = ""
    """For the report."""
    decay_is_cheap: bool = True
    """Whether `correction="auto"` may ask for the decay on every sweep."""
    newton_up_to: int = 0
    """Largest state for which `correction="auto"` may pay for dense transfers."""
    linearization: Linearization | None = None
    """How to correct chunks of one step, in place of `correction`."""
    name: str = ""
    """What the report calls the method, in place of `shooting[correction]`."""
    patience: int = GIVE_UP_AFTER
    """Sweeps without halving the residual before it counts as not contracting."""
    accepts: float = 0.0
    """Largest error of a chunk's start to accept behind all planned sweeps. The error is the size of the next
    correction: over a long memory jumps add up, and a correction is their sum."""
    counts_errors: bool = False
    """Whether what jumps add up to must be within the tolerance, not each of them alone: not where a user has said how
    large a jump may be."""
    expected: float = 0.0
    """Microseconds that its sweeps should take on the device, where that is known."""
    polish: float = math.inf
    """Residual above which a solve that meets the tolerance is corrected and swept once more."""
    retry: Plan | None = None
    check_gradient: bool = False
    """Whether to compare the gradients of a backward solve with the exact ones."""
    gradient_tolerance: float | None = None
    """Largest relative error of the gradient to accept in such a comparison."""

    @property
    def wants_decay(self) -> bool:
        """Whether sweeps are to tell the decay: where it alone corrects, and beside others where it is cheap."""
        return self.correction == "diag" or (self.correction in ("auto", "secant", "lowrank") and self.decay_is_cheap)

    @property
    def learns_gains(self) -> bool:
        """Whether links are to show how much they amplify, since no transfers of all directions tell: secants know
        those alone that the starts have moved along, tangents those that they were asked for.
        """
        return self.linearization is None and self.correction != "newton"

    @property
    def damped(self) -> bool:
        return self.linearization is not None and self.linearization.damped

    @cached_property
    def method(self) -> str:
        """What ran where the planned sweeps were enough, for the report."""
        chosen = "none" if self.sweeps == 1 else "diag"
        return f"shooting[{chosen if self.correction == 'auto' else self.correction}]"

    @cached_property
    def limit(self) -> float:
        """What the certificate of the planned sweeps must not exceed: a jump behind one sweep, an error behind more.

        A warm-up of w steps that leaves errors of the tolerance leaves the share tolerance^(c/w) of them over c steps:
        so much of an error does not show as a jump between chunks of c steps. The error that is granted is the
        tolerance, or what is accepted behind several sweeps where that is more: rounding adds up over a long memory.
        """
        if self.sweeps > 1:
            return self.accepts
        if not self.counts_errors or self.warmup <= self.chunk:
            return self.tolerance
        hidden: float = self.tolerance ** (self.chunk / self.warmup)
        return min(self.tolerance, max(self.tolerance, self.accepts) * (1.0 - hidden))

    def insisting(self, missed: float) -> Plan | None:
        """A plan that makes more of the same, where that is likely to mend a certificate that is over its limit."""
        if self.sweeps > 1:
            return replace(self, sweeps=self.sweeps + MORE_SWEEPS) if missed <= WORTH_INSISTING * self.limit else None
        warmup = math.ceil(self.warmup * LONGER_WARMUP)
        return replace(self, warmup=warmup) if missed**LONGER_WARMUP <= self.limit else None

    def march(self, chain: Chain) -> SolveReport:
        """Make the chain's links fit together, in this plan's way."""
        return self.driver(chain, self)


@dataclass(frozen=True)
class RankPlan:
    """How to march over ranks. The chunk and warm-up inside a rank are its own; all else is the same on every rank."""

    inside: Plan
    lead: int = 0
    """Steps at the end of each rank that are run first, to guess what the next rank starts from."""
    way: Literal["sweeps", "cycles", "in order"] = "sweeps"
    """Whether ranks sweep side by side, cycle through levels, or run one after the other."""


class StandingPlan(NamedTuple):
    """A plan, and what was known when it was made: it stands while that is the same."""

    plan: Plan
    tolerance: float
    linear: bool
    """Whether it is for gradients."""
    shown: Shown
    basis: Basis
    """What that was made from: while it is the same, so is all else."""

    @property
    def cutting(self) -> Cutting:
        """What kernels read of it."""
        return self.plan

    def holds(self, experience: Experience) -> bool:
        """Whether it is the plan for the next call, too."""
        if experience.pause or experience.looking:
            return False
        same = experience.basis == self.basis
        return same or experience.shown(self.tolerance, self.linear) == self.shown


class Planner(Protocol):
    """What a solve asks of a solver."""

    @property
    def on_divergence(self) -> OnDivergence:
        """What to do where the sweeps do not converge."""

    @property
    def adapts(self) -> bool:
        """Whether it makes another plan where a sweep has shown that the first will not do."""

    @property
    def on_tape(self) -> bool:
        """Whether it is the plain loop over steps, on autograd's tape, where nothing is marked."""

    def plan(self, problem: Recurrence, experience: Experience, direction: Direction = "forward") -> Plan:
        """How to solve for the states, or for the gradients."""

    def standing(self, problem: Recurrence, experience: Experience, direction: Direction) -> StandingPlan | None:
        """What `plan` would return, where that was made before."""

    def plan_over_ranks(
        self, problem: Recurrence, experience: Experience, sizes: tuple[int, ...], direction: Direction = "forward"
    ) -> RankPlan:
        """The same over ranks: `problem` is this rank's slice, `sizes` the steps that each rank holds."""
