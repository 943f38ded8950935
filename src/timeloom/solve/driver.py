"""The driver: sweep, residual, correct, stop, fall back. It knows neither cells nor the direction of time."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import torch
from torch import Tensor

from timeloom.report import SolveReport, contraction
from timeloom.solve.boundaries import Boundaries
from timeloom.solve.chain import Chain
from timeloom.solve.plan import Correction, Plan
from timeloom.torch_state.streams import capturing

DIAGONAL_WORTH = 1e-3
"""A decay below this over a whole chunk corrects nothing that the next sweep does not correct by itself."""
MOST_LEFT = 0.99
"""Of a residual, by a sweep that still counts as contracting."""
SLOW = 0.3
"""Factor of a sweep from which `correction="auto"` looks for a stronger correction."""


def march(chain: Chain, plan: Plan) -> SolveReport:
    """Make the chain's links fit together; the states are where `chain.sweep` puts them."""
    began = time.perf_counter()
    if chain.links == 1:
        rows = torch.arange(len(chain.segments), device="cpu")
        chain.sweep(chain.segments, chain.first, rows, False)
        return SolveReport.sequential(plan.chunk, plan.reason, plan.tolerance, time.perf_counter() - began)
    correction: Correction = plan.correction
    want_decay = correction == "diag" or (correction == "auto" and plan.decay_is_cheap)
    entered = chain.entered
    if chain.guess is not None:
        plan = replace(plan, warmup=0)  # the guess takes its place
    if plan.warmup and entered is None:
        entered = chain.enter_all(plan.warmup, want_decay)
        if chain.certify is not None:
            report = certified(chain.certify(*entered[:2]), plan, began)
            if report is not None:
                return report
    state = Boundaries(chain, entered, plan.linearization is not None and plan.linearization.damped)
    residuals: list[float] = []
    rows = state.solvable
    given_up, polished, left = "", False, math.inf
    while True:
        if residuals or entered is None:
            state.run(rows, want_decay)
        residuals.append(state.measure(plan.tolerance))
        if state.converged:
            before, left = left, state.outstanding(_rate(residuals), plan.tolerance) if plan.counts_errors else 0.0
            enough = left <= plan.tolerance or not left < before / 2
            if len(residuals) >= plan.max_iters or (enough and (polished or residuals[-1] <= plan.polish)):
                break
            polished = True
            if enough:
                state.demand(plan.polish)
        given_up = "" if state.converged else why_stop(residuals, plan)
        if given_up:
            break
        correction = _choose(plan, correction, [] if state.converged else residuals, state)
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


def _rate(residuals: list[float]) -> float:
    """What the last sweep left of the residual, as far as there was one before; below 1."""
    return 0.0 if len(residuals) < 2 else min(residuals[-1] / residuals[-2], MOST_LEFT)


def contracts_slowly(residuals: list[float]) -> bool:
    """Whether the last sweep, not counting the first two, shrank the residual by little."""
    return len(residuals) > 2 and residuals[-1] > SLOW * residuals[-2]


def _choose(plan: Plan, current: Correction, residuals: list[float], state: Boundaries) -> Correction:
    """The correction of `auto`: the decay where there is one, dense transfers where that is slow and they are cheap."""
    if plan.correction != "auto":
        return plan.correction
    if current == "newton" or (contracts_slowly(residuals) and state.shape[2] <= plan.newton_up_to):
        return "newton"
    return "diag" if plan.decay_is_cheap and float(state.decay.abs().amax()) > DIAGONAL_WORTH else "none"
