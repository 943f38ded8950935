"""The driver: sweep, residual, correct, stop, fall back. It knows neither cells nor the direction of time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from timeloom.problem import Segments
from timeloom.report import SolveReport
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
"""A state that lives in a box is measured against this part of the box at least: its step rounds at the box's scale."""
GIVE_UP_AFTER = 5
"""Sweeps without halving the residual before it counts as not contracting."""
MOST_SWEEPS = 40
"""Sweeps at most, unless told otherwise."""


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
    transfer: Callable[[Segments], Tensor]
    finish: Callable[[Tensor, Tensor, Tensor], Tensor]
    """`finish(links, sequences, starts)`: run these sequences sequentially from these links on; returns their ends."""
    bound: Tensor | None = None
    certify: Callable[[Tensor, Tensor], Tensor | float] | None = None
    """`certify(starts, ends)`: a bound of the largest relative jump, a number (on the device), where that is quick."""

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
    if plan.warmup:
        entered = chain.enter(chain.segments, plan.warmup, torch.arange(len(chain.segments), device="cpu"), want_leak)
        if chain.certify is not None:
            report = certified(chain.certify(*entered[:2]), plan, began)
            if report is not None:
                return report
    state = Boundaries(chain, entered)
    residuals: list[float] = []
    rows = state.solvable
    given_up = ""
    while True:
        if residuals or entered is None:
            state.run(rows, want_leak)
        residuals.append(state.measure(plan.tolerance))
        if state.converged:
            break
        given_up = why_stop(residuals, plan)
        if given_up:
            break
        correction = _choose(plan, correction, residuals, state)
        rows = state.correct(correction, plan.tolerance)
        if rows.numel() == 0:
            given_up = "the values are not finite" if not math.isfinite(residuals[-1]) else "the corrections vanished"
            break
    fell_back = False
    if not state.converged and plan.on_divergence == "sequential":
        state.finish()
        fell_back = True
    used = "none" if correction == "auto" else correction
    return SolveReport(
        solver=f"shooting[{used}]",
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
    """The report of a warm-up and one sweep that a quick bound of all jumps certifies; None where it does not.

    While a CUDA graph is captured nothing can be read: the graph holds the sweep, and the report the number to look at.
    """
    on_gpu = isinstance(worst, Tensor) and worst.device.type == "cuda"
    captured = on_gpu and torch.cuda.is_current_stream_capturing()
    residual = math.nan if captured else float(worst)
    if not captured and not residual <= plan.tolerance:
        return None
    unread = "captured in a CUDA graph: read `certificate` after a replay"
    return SolveReport(
        solver="shooting[none]",
        chunk=plan.chunk,
        iterations=1,
        residuals=(residual,),
        tolerance=plan.tolerance,
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

    def __init__(self, chain: Chain, entered: tuple[Tensor, Tensor, Tensor | None] | None) -> None:
        self.chain = chain
        (batch, size), links = chain.first.shape, chain.links
        self.shape = (links, batch, size)
        device = chain.first.device
        anchors = chain.anchors.to(device)
        alive = (chain.segments.end > chain.segments.begin).view(links, batch)
        self.solvable = alive.reshape(-1).nonzero().squeeze(-1)
        self.unknown = (alive & ~chain.anchors).to(device)
        self.starts = torch.where(anchors.unsqueeze(-1), chain.first, chain.neutral)
        self.ends = self.starts.clone()
        self.leak = torch.ones_like(self.starts)
        self.jump = torch.zeros_like(self.starts)
        self.error = torch.zeros(links, batch, device=device)
        self.scale = torch.ones_like(self.starts)
        self.converged = False
        self._bad = torch.zeros_like(self.unknown)
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
        finite = self.error.nan_to_num(nan=torch.inf)
        return float(finite.max()) if finite.numel() else 0.0

    def _scales(self) -> Tensor:
        """Scale of the state at each link, part by part, `(C, B, S)`: the largest value that has come so far along
        the chain.

        Not the largest of all: where states grow, what is nothing beside the last state may be all of an early one.
        """
        largest = self.starts.abs()
        largest[1:] = torch.maximum(largest[1:], self.ends[:-1].abs())
        largest = torch.where(largest.isfinite(), largest, 0)
        widest = [part.amax(-1, keepdim=True).expand_as(part) for part in largest.split(self.chain.parts, -1)]
        scale = torch.cat(widest, -1).cummax(0).values
        if self.chain.bound is not None:
            scale = torch.maximum(scale, SHARE_OF_BOX * torch.where(self.chain.bound.isfinite(), self.chain.bound, 0))
        return scale.clamp(min=torch.finfo(scale.dtype).tiny)

    def correct(self, correction: Correction, tolerance: float) -> Tensor:
        """Move the starts by what the jumps mean for them; returns the rows that moved and must be run again."""
        delta = self._carry(correction)
        hopeless = ~(self.jump.isfinite().all(-1).all(0))
        unfinished = self._bad.any(0) & ~hopeless
        moved = ((delta.abs() / self.scale).amax(-1) > WORTH_MOVING * tolerance) & self.unknown & unfinished
        # starts + δ, written so that a start whose predecessor does not move becomes its end to the last bit
        starts = torch.cat([self.starts[:1], self.ends[:-1]]) + (delta - self.jump)
        if self.chain.bound is not None:
            starts = torch.clamp(starts, -self.chain.bound, self.chain.bound)
        self.starts = torch.where(moved.unsqueeze(-1), starts, self.starts)
        return moved.reshape(-1).nonzero().squeeze(-1).cpu()

    def _carry(self, correction: Correction) -> Tensor:
        """`δ[p] = A[p−1] δ[p−1] + jump[p]`; plain jumps where A has overflowed."""
        if correction in ("none", "auto"):
            return self.jump
        if correction == "diag":
            transfer = self.leak
        else:
            transfer = self.chain.transfer(self.chain.segments).view(*self.shape, self.shape[2])
        before = torch.zeros_like(transfer)
        before[1:] = transfer[:-1]
        delta = linear_scan(before, self.jump)
        return torch.where(delta.isfinite().all(-1, keepdim=True), delta, self.jump)

    def finish(self) -> None:
        """Keep each sequence's exact prefix and run the rest of it sequentially."""
        sequences = self._bad.any(0).nonzero().squeeze(-1)
        first_bad = self._bad.to(torch.uint8).argmax(0)[sequences]
        self.chain.finish(first_bad, sequences, self.ends[first_bad - 1, sequences])


def why_stop(residuals: list[float], plan: Plan) -> str:
    """Why it makes no sense to go on, or nothing."""
    if len(residuals) >= plan.max_iters:
        return f"gave up after max_iters={plan.max_iters} sweeps"
    if len(residuals) > GIVE_UP_AFTER and not residuals[-1] < 0.5 * residuals[-1 - GIVE_UP_AFTER]:
        return f"gave up: {GIVE_UP_AFTER} sweeps did not halve the residual"
    return ""


def _choose(plan: Plan, current: Correction, residuals: list[float], state: Boundaries) -> Correction:
    """What `auto` corrects with: the leak where there is one, dense transfers where that is slow and they are cheap."""
    if plan.correction != "auto":
        return plan.correction
    slow = len(residuals) > 2 and residuals[-1] > 0.3 * residuals[-2]
    if current == "newton" or (slow and state.shape[2] <= plan.newton_up_to):
        return "newton"
    return "diag" if plan.leak_is_cheap and float(state.leak.abs().amax()) > DIAGONAL_WORTH else "none"


def contraction(residuals: list[float]) -> float | None:
    if len(residuals) < 2 or not residuals[-2] > 0:
        return None
    return residuals[-1] / residuals[-2]
