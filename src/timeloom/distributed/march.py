"""The driver over ranks: every rank sweeps its own links, and one exchange per sweep corrects across ranks."""

from __future__ import annotations

import math
import time

import torch

from timeloom.distributed.boundaries import Check, Marched, RankBoundaries, Settle, over_ranks
from timeloom.distributed.span import Line
from timeloom.report import SolveReport
from timeloom.solve.chain import Chain
from timeloom.solve.driver import conclude, contracts_slowly, why_stop
from timeloom.solve.plan import Correction, Plan


def pipeline_over_ranks(
    chain: Chain, plan: Plan, line: Line, settle: Settle, check: Check, lead: int = 0, reenter: bool = False
) -> Marched:
    """Run all sequences sequentially, rank after rank; `lead` and `reenter` are unused, since there is no warm-up."""
    began = time.perf_counter()
    state = RankBoundaries(chain, None, line, settle, check)
    nobody = len(line.alive)
    state.run_in_order(torch.where(line.alive.any(0), line.heads.to(torch.uint8).argmax(0), nobody))
    if not state.finite:
        check()
    report = SolveReport.sequential(plan.chunk, plan.reason, plan.tolerance, time.perf_counter() - began)
    return state.marched(report)


def march_over_ranks(
    chain: Chain, plan: Plan, line: Line, settle: Settle, check: Check, lead: int, reenter: bool
) -> Marched:
    """Solve the chains of all ranks together; the report is the same on all ranks, apart from the chunk.

    chain.first: `(B, S)`, the state to enter this rank with: known at the head of a sequence, a guess elsewhere.
    lead: steps of the warm-up that produced this guess.
    reenter: whether `chain.enter` does not start the first chunk from `chain.first`, so that it must be run again.
    """
    began = time.perf_counter()
    correction: Correction = plan.correction
    if correction == "auto":
        correction = "diag" if plan.decay_is_cheap else "none"
    state, rows = RankBoundaries.entering(chain, plan, plan.wants_decay, reenter, line, settle, check)
    residuals: list[float] = []
    polished = False
    while True:
        if rows.numel():
            state.run(rows, plan.wants_decay)
        state.correction = correction
        residuals.append(state.measure(plan.tolerance))
        given_up = "" if state.converged else _why_stop(residuals, plan, state.heard.moved)
        if state.converged:
            if polished or residuals[-1] <= plan.polish or len(residuals) >= plan.max_iters:
                break
            polished = True
            state.demand(plan.polish)
        if given_up:
            break
        rows = state.correct(correction, plan.tolerance)
        correction = _next_correction(plan, correction, residuals, state.shape[2])
    report = conclude(state, plan, plan.name or f"shooting[{correction}]", residuals, given_up, began)
    return state.marched(over_ranks(report, line, lead))


def _why_stop(residuals: list[float], plan: Plan, moved: bool) -> str:
    """Why to give up, or an empty string to go on; `moved`: whether the last correction moved anything on any rank."""
    given_up = why_stop(residuals, plan)
    if not given_up and not math.isfinite(residuals[-1]):
        return "the values are not finite"
    return given_up or ("" if moved else "the corrections vanished")


def _next_correction(plan: Plan, current: Correction, residuals: list[float], size: int) -> Correction:
    """The correction of `auto` from the next sweep on, chosen by what all ranks know, since they must choose alike."""
    worth_it = contracts_slowly(residuals) and size <= plan.newton_up_to
    return "newton" if plan.correction == "auto" and worth_it else current
