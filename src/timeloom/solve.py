"""The driver: sweep, residual, correct, stop, fall back. It knows neither cells nor the direction of time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from timeloom.damping import Damping
from timeloom.linearize import Linearization
from timeloom.memory import all_finite
from timeloom.mgrit.grid import Coarsening
from timeloom.mgrit.propagators import Propagator
from timeloom.problem import Segments
from timeloom.report import SolveReport, contraction
from timeloom.scan import linear_scan
from timeloom.solvers.base import Correction, OnDivergence

Sweep = Callable[[Segments, Tensor, Tensor, bool], tuple[Tensor, Tensor | None]]
"""`sweep(segments, starts, rows, want_leak) -> ends, leak`; `rows` says where the segments stand in the chain."""
Enter = Callable[[Segments, int, Tensor, bool], tuple[Tensor, Tensor, Tensor | None]]
"""`enter(segments, lead, rows, want_leak) -> starts, ends, leak`: a sweep that finds its starts by a warm-up."""

DIAGONAL_WORTH = 1e-3
"""A leak below this over a whole chunk corrects nothing that the next sweep does not correct by itself."""
WORTH_MOVING = 0.1
"""Part of the tolerance up to which a start stays where it is: corrections left out must not add up to a jump."""
SHARE_OF_BOX = 0.1
"""A state that lives in a box is measured against this much at least: its step rounds values of up to 1."""
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
class Chain:
    """Chunks in marching order, forward or backward in time: link p of C starts where link p − 1 ended.

    segments: C·B rows, link by link, sequences side by side.
    first: `(B, S)`, the known state that each sequence's chain starts from.
    neutral: `(B, S)`, the guess where nothing is known.
    anchors: `(C, B)`, whether a link's start is `first` (one link a sequence) rather than an unknown.
    parts: widths of the state's parts, each measured against its own scale.
    """

    segments: Segments
    first: Tensor
    neutral: Tensor
    anchors: Tensor
    parts: tuple[int, ...]
    sweep: Sweep
    enter: Enter
    transfer: Callable[[Segments, Tensor], Tensor]
    """`transfer(segments, starts)`: the dense transfers of all links."""
    finish: Callable[[Tensor, Tensor, Tensor], Tensor]
    """`finish(links, sequences, starts)`: run these sequences sequentially from these links on; returns their ends."""
    bound: Tensor | None = None
    fading: bool = False
    """Whether values fade along the chain, as gradients do away from the loss: jumps are then measured by the largest
    value so far, and otherwise against those beside them."""
    guess: Tensor | None = None
    """`(C, B, S)`, starts to begin with instead of `neutral`."""
    carry: Callable[[Tensor, Tensor, Tensor | None], Tensor] | None = None
    """`carry(jumps, starts, damping)`: what linearised single steps make of the jumps, `(C, B, S)`; see `linearize`."""
    leave: Callable[[Tensor, Tensor], tuple[Tensor, Tensor] | None] | None = None
    """`leave(moves, starts)`: with `carry`, what moves of all starts mean beyond the last link; see `leaving` there."""
    certify: Callable[[Tensor, Tensor], Tensor | float] | None = None
    """`certify(starts, ends)`: a bound of the largest relative jump, a number (on the device), where that is quick."""
    coarsen: Callable[[Coarsening], list[Propagator]] | None = None
    """`coarsen(coarsening)`: coarse steps from link to link, for every coarse level of multigrid."""

    @property
    def links(self) -> int:
        return self.anchors.shape[0]


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
        entered = chain.enter(chain.segments, plan.warmup, torch.arange(len(chain.segments), device="cpu"), want_leak)
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
        rows = state.correct(correction, plan)
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


def capturing(tensor: Tensor) -> bool:
    """Whether what is done with this tensor goes into a CUDA graph, so that no number can be read."""
    if tensor.device.type != "cuda":
        return False
    with torch.cuda.device_of(tensor):
        return torch.cuda.is_current_stream_capturing()


def certified(worst: Tensor | float, plan: Plan, began: float) -> SolveReport | None:
    """The report of the planned sweeps where a quick bound of jumps or errors certifies them; None where it does not.

    While a CUDA graph is captured nothing can be read: the graph holds the sweep, and the report the number to look at.
    """
    captured = isinstance(worst, Tensor) and capturing(worst)
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


class Boundaries:
    """The unknowns: starts and ends of all links, `(C, B, S)`, and what is known about them so far."""

    def __init__(
        self, chain: Chain, entered: tuple[Tensor, Tensor, Tensor | None] | None, damped: bool = False
    ) -> None:
        self.chain = chain
        (batch, size), links = chain.first.shape, chain.links
        self.shape = (links, batch, size)
        device = chain.first.device
        anchors = chain.anchors.to(device)
        alive = (chain.segments.end > chain.segments.begin).view(links, batch)
        self.solvable = alive.reshape(-1).nonzero().squeeze(-1)
        self.unknown = (alive & ~chain.anchors).to(device)
        guess = chain.neutral if chain.guess is None else chain.guess
        self.starts = torch.where(anchors.unsqueeze(-1), chain.first, guess)
        self.ends = self.starts.clone()
        self.leak = torch.ones_like(self.starts)
        self.jump = torch.zeros_like(self.starts)
        self.error = torch.zeros(links, batch, device=device)
        self.scale = torch.ones_like(self.starts)
        self.converged = False
        self._bad = torch.zeros_like(self.unknown)
        self._damping = Damping(batch, device) if damped else None
        if entered is not None:
            starts, ends, leak = (None if value is None else value.view(self.shape) for value in entered)
            assert starts is not None
            assert ends is not None
            inside = alive.to(device).unsqueeze(-1)
            self.starts, self.ends = (torch.where(inside, value, self.starts) for value in (starts, ends))
            self.leak = self.leak if leak is None else leak

    def run(self, rows: Tensor, want_leak: bool) -> None:
        """Sweep these rows from their starts."""
        size = self.shape[2]
        everything = rows.numel() == self.shape[0] * self.shape[1]
        segments = self.chain.segments if everything else self.chain.segments[rows]
        at = slice(None) if everything else rows.to(self.starts.device)
        ends, leak = self.chain.sweep(segments, self.starts.view(-1, size)[at], rows, want_leak)
        self.ends.view(-1, size)[at] = ends
        if leak is not None:
            self.leak.view(-1, size)[at] = leak

    def measure(self, tolerance: float) -> float:
        """The largest relative jump between a link's end and the next one's start; also who is over the tolerance."""
        unknown = self.unknown[1:].unsqueeze(-1)
        self.jump[1:] = torch.where(unknown, self.ends[:-1] - self.starts[1:], 0)
        self.scale = self._scales()
        self.error = (self.jump.abs() / self.scale).amax(-1)
        self._bad = ~(self.error <= tolerance)
        self.converged = not bool(self._bad.any())
        known = torch.where(self.error.isnan(), torch.inf, self.error)
        return float(known.max()) if known.numel() else 0.0

    def demand(self, tolerance: float) -> None:
        """Count what is over another tolerance as unfinished."""
        self._bad = ~(self.error <= tolerance)

    def _scales(self) -> Tensor:
        """Scale of the state at each link, part by part, `(C, B, S)`: the largest value beside it.

        Where values fade, the largest that has come so far along the chain. Never the largest of all: what is nothing
        beside the last state may be all of an early one, and the other way round.
        """
        largest = torch.maximum(self.starts.abs(), self.arriving().abs())
        largest = torch.where(largest.isfinite(), largest, 0)
        widest = [part.amax(-1, keepdim=True).expand_as(part) for part in largest.split(self.chain.parts, -1)]
        scale = torch.cat(widest, -1)
        if self.chain.fading:
            scale = scale.cummax(0).values
        if self.chain.bound is not None:
            scale = torch.maximum(scale, SHARE_OF_BOX * self.chain.bound.isfinite().to(scale.dtype))
        return scale.clamp(min=torch.finfo(scale.dtype).tiny)

    def correct(self, correction: Correction, plan: Plan) -> Tensor:
        """Move the starts by what the jumps mean for them; returns the rows that moved and must be run again."""
        if self._damping is not None:
            self._damping.adapt(self.error, plan.tolerance)
        return self.move(self._carry(correction), plan.tolerance)

    def move(self, delta: Tensor, tolerance: float) -> Tensor:
        """Move the starts by `delta`, unfinished sequences alone; returns the rows that moved and must be run again."""
        moved = (delta.abs() / self.scale).amax(-1) > WORTH_MOVING * tolerance
        moved &= self.unknown & self._unfinished()
        # starts + δ, written so that a start whose predecessor does not move becomes its end to the last bit
        starts = self.arriving() + (delta - self.jump)
        if self.chain.bound is not None:
            starts = torch.clamp(starts, -self.chain.bound, self.chain.bound)
        self.starts = torch.where(moved.unsqueeze(-1), starts, self.starts)
        return moved.reshape(-1).nonzero().squeeze(-1).cpu()

    def rests(self, moved: Tensor) -> bool:
        """Whether there is nothing to run again where these rows have moved."""
        return moved.numel() == 0

    def arriving(self) -> Tensor:
        """What comes to each start from the link before it, `(C, B, S)`; the start itself where nothing does."""
        return torch.cat([self.starts[:1], self.ends[:-1]])

    def _unfinished(self) -> Tensor:
        """Sequences that are worth correcting, `(B,)`."""
        unfinished = self._bad.any(0)
        if not all_finite(self.jump):
            unfinished &= self.jump.isfinite().all(-1).all(0)
        return unfinished

    def _carry(self, correction: Correction) -> Tensor:
        """`δ[p] = A[p−1] δ[p−1] + jump[p]`; plain jumps where A has overflowed."""
        if self.chain.carry is not None:
            strength = None if self._damping is None else self._damping.strength
            return self._or_jump(self.chain.carry(self.jump, self.starts, strength))
        if correction in ("none", "auto"):
            return self.jump
        if correction == "diag":
            transfer = self.leak
        else:
            transfer = self.chain.transfer(self.chain.segments, self.starts.flatten(0, 1)).view(
                *self.shape, self.shape[2]
            )
        before = torch.zeros_like(transfer)
        before[1:] = transfer[:-1]
        delta = linear_scan(before, self.jump)
        return self._or_jump(delta)

    def _or_jump(self, delta: Tensor) -> Tensor:
        if all_finite(delta):
            return delta
        return torch.where(delta.isfinite().all(-1, keepdim=True), delta, self.jump)

    def finish(self, hopeless_only: bool = False) -> None:
        """Keep each sequence's exact prefix and run the rest of it sequentially; or those alone that hold values which
        are not finite, and which no sweep carries on to where a plain run would.
        """
        bad = self._bad & ~self.jump.isfinite().all(-1).all(0) if hopeless_only else self._bad
        sequences = bad.any(0).nonzero().squeeze(-1)
        if sequences.numel() == 0:
            return
        first_bad = bad.to(torch.uint8).argmax(0)[sequences]
        self.chain.finish(first_bad, sequences, self.ends[first_bad - 1, sequences])


def why_stop(residuals: list[float], plan: Plan) -> str:
    """Why it makes no sense to go on, or nothing."""
    if len(residuals) >= plan.max_iters:
        return f"gave up after max_iters={plan.max_iters} sweeps"
    if len(residuals) > plan.patience and not residuals[-1] < 0.5 * residuals[-1 - plan.patience]:
        return f"gave up: {plan.patience} sweeps did not halve the residual"
    return ""


def _choose(plan: Plan, current: Correction, residuals: list[float], state: Boundaries) -> Correction:
    """What `auto` corrects with: the leak where there is one, dense transfers where that is slow and they are cheap."""
    if plan.correction != "auto":
        return plan.correction
    slow = len(residuals) > 2 and residuals[-1] > 0.3 * residuals[-2]
    if current == "newton" or (slow and state.shape[2] <= plan.newton_up_to):
        return "newton"
    return "diag" if plan.leak_is_cheap and float(state.leak.abs().amax()) > DIAGONAL_WORTH else "none"
