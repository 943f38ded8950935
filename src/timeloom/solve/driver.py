"""The driver: sweep, residual, correct, stop, fall back. It knows neither cells nor the direction of time."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from itertools import takewhile

import torch
from torch import Tensor

from timeloom.report import SolveReport, contraction
from timeloom.solve.boundaries import Boundaries
from timeloom.solve.chain import Chain
from timeloom.solve.plan import Correction, Plan
from timeloom.solve.residual import certificate, error_estimate, rate_of_warmup
from timeloom.torch_state.streams import capturing

DIAGONAL_WORTH = 1e-3
"""Decay over a whole chunk below which a diagonal correction gains nothing over what the next sweep corrects anyway."""
MOST_LINKS = 2**40
"""More links than any chain has."""
MOST_BY_GAINS = 100.0
"""Limit of the error by accumulated jumps, as a multiple of the error by the series of corrections: gains ignore that
jumps cancel along a long chain."""
SHARE_OF_A_PASS = 0.5
"""Share of the tolerance to aim for if it counts errors, since gradients have those of both passes. Not after a first
sweep: warm-ups are planned by all of it."""
LARGE_MOVE = 0.1
"""Relative move from which a link's gain says nothing about small moves. One more sweep is made if links amplify, or if
links are single steps, whose jumps add up over the network's memory."""
WORTH_MENDING = 2.0
"""Multiple of the tolerance that jumps within it may add up to if the user gave the tolerance of a jump: results may be
off by three tolerances, and estimates by half."""
MENDED = 0.2
"""Largest share of the jumps to aim for if they add up to too much: moves much smaller than the aim are not made."""
UNCERTAIN = 10.0
"""Factor by which the final error estimate may exceed what jumps may add up to, since estimates are not exact; beyond
it a certificate would be worthless, and the rest is run sequentially."""
SLOW = 0.3
"""Contraction factor of a sweep from which `correction="auto"` looks for a stronger correction."""
ROUNDING = {torch.float32: 1e-6, torch.float64: 2e-15}
"""Jumps up to this size that sweeps no longer halve are rounding: runs from different starts stay that far apart."""
ROUNDED_STEP = 1.0
"""Multiple of the dtype's eps up to which jumps of single steps count as rounding if each sweep has halved them."""
STANDS_STILL = 0.8
"""What is left is rounding if at least this share of the jumps, or of what they add up to, remains after as many sweeps
as it took to halve the jumps before."""

REMEMBERED = 6
"""Number of last sweeps that show how many sweeps it takes to halve the jumps: the rate of single sweeps fluctuates."""


def march(chain: Chain, plan: Plan) -> SolveReport:
    """Solve the chain: sweep and correct until the jumps between its links vanish; `chain.sweep` stores the states."""
    began = time.perf_counter()
    if chain.links == 1:
        rows = torch.arange(len(chain.segments), device="cpu")
        chain.sweep(chain.segments, chain.first, rows, False)
        return SolveReport.sequential(plan.chunk, plan.reason, plan.tolerance, time.perf_counter() - began)
    correction: Correction = plan.correction
    want_decay = plan.wants_decay
    entered = chain.entered
    if chain.guess is not None:
        plan = replace(plan, warmup=0)  # the guess replaces it
    if plan.warmup and entered is None:
        entered = chain.enter_all(plan.warmup, want_decay)
        if chain.certify is not None:
            report = certified(chain.certify(*entered[:2]), plan, began)
            if report is not None:
                return report
    state = Boundaries(chain, entered, plan)
    residuals: list[float] = []
    moves: list[float] = []
    estimates: list[float] = []
    rows, demand = state.solvable, plan.tolerance
    given_up, polished = "", False
    while True:
        if residuals or entered is None:
            state.run(rows, want_decay)
        residuals.append(state.measure(plan.tolerance))
        if state.converged or residuals[-1] <= ROUNDING.get(state.starts.dtype, 0.0):
            estimates.append(_estimate(state, plan, residuals, moves))
        stands_still = is_rounding(residuals, plan, state.starts.dtype)
        if stands_still and not _add_up_to_less(plan, residuals, estimates) and not _carries_rounding(plan, moves):
            if not state.converged:
                plan = replace(plan, reason="; ".join(filter(None, (plan.reason, "as near as rounding allows"))))
            state.accept()
            break
        if state.converged:
            aim = most(plan) * (SHARE_OF_A_PASS if plan.counts_errors and moves else 1.0)
            smaller = smaller_demand(state, plan, aim, residuals, moves, estimates, polished)
            if smaller is None or len(residuals) >= plan.max_iters:
                if plan.on_divergence == "sequential":
                    given_up = _why_doubt(state, plan, residuals, moves, estimates[-1], smaller is not None)
                    state.converged = not given_up
                break
            polished, demand = True, smaller
            state.demand(demand)
        given_up = "" if state.converged else why_stop(residuals, plan)
        if given_up:
            break
        correction = _choose(plan, correction, [] if state.converged else residuals, state)
        rows = state.correct(correction, min(demand, plan.tolerance))
        moves.append(state.moved_by)
        if rows.numel() == 0 and state.converged:
            break
        if rows.numel() == 0:
            given_up = "the values are not finite" if not math.isfinite(residuals[-1]) else "the corrections vanished"
            break
    used = "none" if correction == "auto" else correction
    report = conclude(state, plan, plan.name or f"shooting[{used}]", residuals, given_up, began)
    if not state.converged and not report.fell_back:
        estimates.append(_estimate(state, plan, residuals, moves))
    return replace(report, error_estimate=None if report.fell_back else estimates[-1])


def most(plan: Plan) -> float:
    """What jumps within the tolerance may add up to."""
    return plan.tolerance if plan.counts_errors else WORTH_MENDING * plan.tolerance


def _estimate(state: Boundaries, plan: Plan, residuals: list[float], moves: list[float]) -> float:
    """The error of the starts, estimated from the corrections so far."""
    if plan.linearization is None:
        following = float(certificate(state.foreseen()))
    else:  # a scan over all steps costs as much as a sweep: assume the last ratio of move to jumps
        moved = min(moves[-1], 1.0) if moves else 1.0  # a move from a guess near zero may be any multiple of the guess
        following = residuals[-1] * (moved / residuals[-2] if moves and residuals[-2] > 0 else 1.0)
    rate = rate_of_warmup(residuals[0], plan.warmup, plan.chunk)
    return by_links(state, error_estimate([*moves, following], state.chain.links - len(residuals), rate))


def by_links(state: Boundaries, series: float) -> float:
    """The error of the starts: measured by sweeps along it if links amplify, otherwise the larger of two estimates.

    series: the estimate from the series of corrections. The other one accumulates the jumps by the links' gains.
    """
    probed = state.probed()
    if probed is not None:
        return probed
    return max(series, min(float(certificate(state.added_up())), MOST_BY_GAINS * series))


def _add_up_to_less(plan: Plan, residuals: list[float], estimates: list[float]) -> bool:
    """Whether the last sweep still shrank the error estimate, though not the largest jump, which is of small states."""
    if len(estimates) < 2 or estimates[-1] <= plan.tolerance:
        return False
    return estimates[-1] < STANDS_STILL * estimates[-2]


def _carries_rounding(plan: Plan, moves: list[float]) -> bool:
    """Whether an approximate linearisation carries rounding on: its last correction still moved states by too much.

    The network itself forgets the rounding of its steps. A correction that carries jumps on differently from the
    network puts states off by as much again in every sweep.
    """
    how = plan.linearization
    return how is not None and how.elements != "dense" and bool(moves) and moves[-1] > WORTH_MENDING * plan.tolerance


def smaller_demand(
    state: Boundaries, plan: Plan, aim: float,
    residuals: list[float], moves: list[float], estimates: list[float], polished: bool,
) -> float | None:  # fmt: skip
    """The jumps to aim for next if jumps that meet the tolerance add up to more than `aim`, or may do; None to stop.

    None if they do not add up to more, or if what is left is rounding that more sweeps do not reduce: as many sweeps as
    it takes to halve the jumps have left most of it.
    """
    residual, estimate = residuals[-1], estimates[-1]
    rounded = residual <= ROUNDING.get(state.starts.dtype, 0.0)
    may_grow = state.amplifies or (plan.linearization is not None and not rounded)
    unseen = not polished and moves and moves[-1] > LARGE_MOVE and may_grow
    otherwise = 0.5 * residual if unseen else None
    if not polished and residual > plan.polish:
        return plan.polish
    pace = min(_sweeps_to_halve(residuals), plan.patience)
    met_rounding = pace == 1 and residual <= ROUNDED_STEP * torch.finfo(state.starts.dtype).eps
    if estimate <= aim or (plan.linearization is not None and met_rounding):
        return otherwise
    if len(estimates) > pace and not estimate < STANDS_STILL * estimates[-1 - pace]:
        return otherwise
    return residual * min(aim / estimate, MENDED)


def _why_doubt(
    state: Boundaries, plan: Plan,
    residuals: list[float], moves: list[float], estimate: float, cut_off: bool,
) -> str:  # fmt: skip
    """Why jumps that meet the tolerance, and exceed rounding, say too little about the error to stop; empty to stop.

    Each sweep makes one more link exact in any case. If links amplify, as many sweeps as three quarters of the links
    were made, and the jumps halfway were as large as states, then sweeps did nothing but that, and little is known
    about the remaining links.

    cut_off: whether more sweeps would have reduced the jumps, which are then no rounding, but `max_iters` is reached.
    """
    if cut_off and plan.counts_errors and estimate > plan.tolerance:
        return f"gave up after max_iters={plan.max_iters} sweeps: the jumps left may add up to {estimate:.1e}"
    if residuals[-1] <= ROUNDING.get(state.starts.dtype, 0.0) and not _carries_rounding(plan, moves):
        return ""
    if estimate > UNCERTAIN * most(plan):
        return f"gave up: the jumps left may add up to {estimate:.1e}, and sweeps no longer help"
    sweeps, links = len(residuals), state.chain.links
    if state.amplifies and 4 * sweeps >= 3 * links and residuals[sweeps // 2] > LARGE_MOVE:
        return f"gave up: {sweeps} sweeps for {links} chunks that amplify"
    return ""


def conclude(
    state: Boundaries, plan: Plan, method: str, residuals: list[float], given_up: str, began: float
) -> SolveReport:
    """Finish what did not converge as the plan says, and return the report; `given_up` is why it did not converge."""
    fell_back = not state.converged and plan.on_divergence == "sequential"
    if fell_back:  # without contraction any jump left grows into an error
        state.demand(0.0)
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
    """The report of the planned sweeps if `worst`, an upper bound of jumps or errors, certifies them; else None.

    While a CUDA graph is captured nothing can be read: the report then holds the bound, to be read after a replay.
    """
    captured = isinstance(worst, Tensor) and capturing(worst.device)
    residual, limit = math.nan if captured else float(worst), plan.limit
    if not captured and not residual <= limit:
        return None
    unread = "captured in a CUDA graph: look at `certified` after a replay"
    error = residual  # after several sweeps the bound is already one of the error
    if plan.sweeps == 1:
        error = error_estimate([residual], MOST_LINKS, rate_of_warmup(residual, plan.warmup, plan.chunk))
    return SolveReport(
        solver=plan.method,
        chunk=plan.chunk,
        iterations=plan.sweeps,
        residuals=(residual,),
        tolerance=limit,
        converged=not captured,
        fell_back=False,
        contraction=None,
        seconds=time.perf_counter() - began,
        reason="; ".join(filter(None, (plan.reason, unread))) if captured else plan.reason,
        warmup=plan.warmup,
        error_estimate=None if captured else error,
        certificate=worst if captured and isinstance(worst, Tensor) else None,
    )


def why_stop(residuals: list[float], plan: Plan) -> str:
    """Why to give up, or an empty string to go on."""
    if len(residuals) >= plan.max_iters:
        return f"gave up after max_iters={plan.max_iters} sweeps"
    if len(residuals) > plan.patience and not residuals[-1] < 0.5 * residuals[-1 - plan.patience]:
        return f"gave up: {plan.patience} sweeps did not halve the residual"
    return ""


def is_rounding(residuals: list[float], plan: Plan, dtype: torch.dtype) -> bool:
    """Whether the remaining jumps are rounding, which more sweeps do not reduce.

    They are if as many sweeps as it took to halve the jumps on the way there have left most of them.
    """
    level = ROUNDING.get(dtype, 0.0)
    small = sum(1 for _ in takewhile(lambda residual: residual <= level, reversed(residuals)))
    if small < 2:
        return False
    pace = _sweeps_to_halve(residuals[: len(residuals) - small + 1])
    left = STANDS_STILL if pace <= plan.patience else 0.5
    pace = min(pace, plan.patience)
    return small > pace and left * residuals[-1 - pace] <= residuals[-1]


def _sweeps_to_halve(residuals: list[float]) -> int:
    """The most sweeps that it took to halve the residual, over the last sweeps; 1 if nothing is known yet."""
    paces = [1]
    for index in range(max(1, len(residuals) - REMEMBERED), len(residuals)):
        halved = (k for k in range(1, index + 1) if residuals[index] <= 0.5 * residuals[index - k])
        paces.append(next(halved, index))
    return max(paces)


def contracts_slowly(residuals: list[float]) -> bool:
    """Whether the last sweep, if it is at least the third, barely shrank the residual."""
    return len(residuals) > 2 and residuals[-1] > SLOW * residuals[-2]


def _choose(plan: Plan, current: Correction, residuals: list[float], state: Boundaries) -> Correction:
    """The correction of `auto`: dense transfers if sweeps contract slowly and the state is small, else by the decay."""
    if plan.correction != "auto":
        return plan.correction
    if current == "newton" or (contracts_slowly(residuals) and state.shape[2] <= plan.newton_up_to):
        return "newton"
    return "diag" if plan.decay_is_cheap and float(state.decay.abs().amax()) > DIAGONAL_WORTH else "none"
