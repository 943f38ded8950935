"""The driver: sweep, residual, correct, stop, fall back. It knows neither cells nor the direction of time."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from timeloom.boundaries import Boundaries
from timeloom.linearize import Linearization
from timeloom.links import Chain
from timeloom.report import SolveReport, contraction
from timeloom.solvers.base import Correction, OnDivergence
from timeloom.streams import capturing
from timeloom.sweep.layer import Cutting

DIAGONAL_WORTH = 1e-3
"""A leak below this over a whole chunk corrects nothing that the next sweep does not correct by itself."""
SLOW = 0.3
"""Factor of a sweep from which `correction="auto"` looks for a stronger correction."""
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


@dataclass(frozen=True)
class Plan:
    """How to march: what a solver decided. `reason` is for the report."""

    chunk: int
    correction: Correction
    warmup: int
    tolerance: float
    max_iters: int
    on_divergence: OnDivergence
    reason: str
    leak_is_cheap: bool = True
    """Whether `correction="auto"` may ask for the leak on every sweep."""
    newton_up_to: int = 0
    """Largest state for which `correction="auto"` may pay for dense transfers."""
    linearization: Linearization | None = None
    """How to correct chunks of one step, in place of `correction`."""
    name: str = ""
    """What the report calls the method, in place of `shooting[correction]`."""
    patience: int = GIVE_UP_AFTER
    """Sweeps without halving the residual before it counts as not contracting."""
    sweeps: int = 1
    """Sweeps to make at once, with corrections by the leak between them, before anything is measured."""
    accepts: float = 0.0
    """Largest error of a start to accept behind them, as the next correction tells it: jumps add up over a long memory,
    and errors tell what they add up to."""
    polish: float = math.inf
    """Residual above which a solve that meets the tolerance is corrected and swept once more."""
    check_gradient: bool = False
    """Whether to compare the gradients of a backward solve with the exact ones."""
    gradient_tolerance: float | None = None
    """Largest relative error of the gradient to accept in such a comparison."""

    @property
    def cutting(self) -> Cutting:
        """For kernels that run a whole layer."""
        return Cutting(self.chunk, self.warmup, self.sweeps)

    @property
    def method(self) -> str:
        """What ran where the planned sweeps were enough, for the report."""
        chosen = "none" if self.sweeps == 1 else "diag"
        return f"shooting[{chosen if self.correction == 'auto' else self.correction}]"

    @property
    def limit(self) -> float:
        """What the certificate of the planned sweeps must not exceed: a jump behind one sweep, an error behind more."""
        return self.tolerance if self.sweeps == 1 else self.accepts

    def insisting(self, missed: float) -> Plan | None:
        """A plan that makes more of the same, where that is likely to mend a certificate that is over its limit."""
        if self.sweeps > 1:
            return replace(self, sweeps=self.sweeps + MORE_SWEEPS) if missed <= WORTH_INSISTING * self.limit else None
        warmup = math.ceil(self.warmup * LONGER_WARMUP)
        return replace(self, warmup=warmup) if missed**LONGER_WARMUP <= self.limit else None

    def march(self, chain: Chain) -> SolveReport:
        """Make the chain's links fit together, in this plan's way."""
        return march(chain, self)


def march(chain: Chain, plan: Plan) -> SolveReport:
    """Make the chain's links fit together; the states are where `chain.sweep` puts them."""
    began = time.perf_counter()
    if chain.links == 1:
        rows = torch.arange(len(chain.segments), device="cpu")
        chain.sweep(chain.segments, chain.first, rows, False)
        return SolveReport.sequential(plan.chunk, plan.reason, plan.tolerance, time.perf_counter() - began)
    correction: Correction = plan.correction
    want_leak = correction == "diag" or (correction == "auto" and plan.leak_is_cheap)
    entered = None
    if chain.guess is not None:
        plan = replace(plan, warmup=0)  # the guess takes its place
    if plan.warmup:
        entered = chain.enter_all(plan.warmup, want_leak)
        if chain.certify is not None:
            report = certified(chain.certify(*entered[:2]), plan, began)
            if report is not None:
                return report
    state = Boundaries(chain, entered, plan.linearization is not None and plan.linearization.damped)
    residuals: list[float] = []
    rows = state.solvable
    given_up, polished = "", False
    while True:
        if residuals or entered is None:
            state.run(rows, want_leak)
        residuals.append(state.measure(plan.tolerance))
        if state.converged:
            if polished or residuals[-1] <= plan.polish or len(residuals) >= plan.max_iters:
                break
            polished = True
            state.demand(plan.polish)
        given_up = "" if state.converged else why_stop(residuals, plan)
        if given_up:
            break
        correction = _choose(plan, correction, residuals, state)
        rows = state.correct(correction, plan.tolerance)
        if rows.numel() == 0 and state.converged:
            break
        if rows.numel() == 0:
            given_up = "the values are not finite" if not math.isfinite(residuals[-1]) else "the corrections vanished"
            break
    used = "none" if correction == "auto" else correction
    return conclude(state, plan, plan.name or f"shooting[{used}]", residuals, given_up, began)


def conclude(
    state: Boundaries, plan: Plan, method: str, residuals: list[float], given_up: str, began: float
) -> SolveReport:
    """Finish what did not converge, as the plan says, and report; `given_up` says why it did not."""
    fell_back = not state.converged and plan.on_divergence == "sequential"
    if not state.converged:
        state.finish(hopeless_only=not fell_back)
    return SolveReport(
        solver=method,
        chunk=plan.chunk,
        iterations=len(residuals),
        residuals=tuple(residuals),
        tolerance=plan.tolerance,
        converged=state.converged or fell_back,
        fell_back=fell_back,
        contraction=contraction(residuals),
        seconds=time.perf_counter() - began,
        reason="; ".join(filter(None, (plan.reason, given_up))),
        warmup=plan.warmup,
    )


def certified(worst: Tensor | float, plan: Plan, began: float) -> SolveReport | None:
    """The report of the planned sweeps where a quick bound of jumps or errors certifies them; None where it does not.

    While a CUDA graph is captured nothing can be read: the graph holds the sweep, and the report the number to look at.
    """
    captured = isinstance(worst, Tensor) and capturing(worst.device)
    residual = math.nan if captured else float(worst)
    if not captured and not residual <= plan.limit:
        return None
    unread = "captured in a CUDA graph: look at `certified` after a replay"
    return SolveReport(
        solver=plan.method,
        chunk=plan.chunk,
        iterations=plan.sweeps,
        residuals=(residual,),
        tolerance=plan.limit,
        converged=not captured,
        fell_back=False,
        contraction=None,
        seconds=time.perf_counter() - began,
        reason="; ".join(filter(None, (plan.reason, unread if captured else ""))),
        warmup=plan.warmup,
        certificate=worst if captured and isinstance(worst, Tensor) else None,
    )


def why_stop(residuals: list[float], plan: Plan) -> str:
    """Why it makes no sense to go on, or nothing."""
    if len(residuals) >= plan.max_iters:
        return f"gave up after max_iters={plan.max_iters} sweeps"
    if len(residuals) > plan.patience and not residuals[-1] < 0.5 * residuals[-1 - plan.patience]:
        return f"gave up: {plan.patience} sweeps did not halve the residual"
    return ""


def contracts_slowly(residuals: list[float]) -> bool:
    """Whether the last sweep, not counting the first two, shrank the residual by little."""
    return len(residuals) > 2 and residuals[-1] > SLOW * residuals[-2]


def _choose(plan: Plan, current: Correction, residuals: list[float], state: Boundaries) -> Correction:
    """What `auto` corrects with: the leak where there is one, dense transfers where that is slow and they are cheap."""
    if plan.correction != "auto":
        return plan.correction
    if current == "newton" or (contracts_slowly(residuals) and state.shape[2] <= plan.newton_up_to):
        return "newton"
    return "diag" if plan.leak_is_cheap and float(state.leak.abs().amax()) > DIAGONAL_WORTH else "none"
