"""The driver over ranks: every rank marches along its own links, and one exchange a sweep fits the ranks together."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from timeloom.distributed.faults import RankError
from timeloom.distributed.span import Line
from timeloom.report import SolveReport
from timeloom.scan import linear_scan
from timeloom.scan.reference import apply, compose
from timeloom.solve import SHARE_OF_BOX, WORTH_MOVING, Boundaries, Chain, Plan, contraction, why_stop
from timeloom.solvers.base import Correction


@dataclass(frozen=True)
class Marched:
    """What a march found beside the states: for each sequence the state that came to this rank from the one before
    (`entry` `(B, S)`), and the one after the last step of all (`final` `(B, S)`).
    """

    report: SolveReport
    entry: Tensor
    final: Tensor


@dataclass(frozen=True)
class _Ranks:
    """What all ranks have said, in marching order: starts, ends `(R, B, S)` and errors `(R, B)`."""

    starts: Tensor
    ends: Tensor
    jump: Tensor
    """From the end of the rank before to the start."""
    prefix: Tensor
    """Largest values, part by part, on the ranks before, `(R, B, S)`."""
    error: Tensor
    """Bound of the relative jumps inside each rank."""
    joint_error: Tensor
    """Relative jump at each rank's start."""
    moved: bool
    """Whether any rank had something to correct since the last exchange."""
    shift: Tensor
    """How far the start of each rank is to move, `(R, B, S)`."""

    @property
    def worst(self) -> Tensor:
        return torch.maximum(self.error, self.joint_error)


class RankBoundaries(Boundaries):
    """The unknowns of one rank. Its entry, where the rank before ends, is known inside the rank and unknown in line."""

    def __init__(self, chain: Chain, entered: tuple[Tensor, Tensor, Tensor | None] | None, line: Line) -> None:
        super().__init__(chain, entered)
        device, links = chain.first.device, chain.links
        alive = (chain.segments.end > chain.segments.begin).view(links, -1)
        self.line = line
        self.joint = line.joints.to(device)
        self.sequences = torch.arange(chain.first.shape[0], device=device)
        self.entry_link = (alive & chain.anchors).to(torch.uint8).argmax(0).to(device)
        self.last_link = (links - 1 - alive.flip(0).to(torch.uint8).argmax(0)).to(device)
        self.starts[self.entry_link, self.sequences] = chain.first
        self.moved = True

    def at_entry(self, values: Tensor) -> Tensor:
        return values[self.entry_link, self.sequences]

    def last_ends(self) -> Tensor:
        return self.ends[self.last_link, self.sequences]

    def transfers(self, correction: Correction) -> Tensor | None:
        """`A[p]` of each link, diagonal `(C, B, S)` or dense `(C, B, S, S)`."""
        if correction == "diag":
            return self.leak
        if correction == "newton":
            return self.chain.transfer(self.chain.segments).view(*self.shape, self.shape[2])
        return None

    def exchange(self, transfers: Tensor | None, tolerance: float) -> _Ranks:
        """Tell all ranks about this one's boundaries and hear about theirs: one collective."""
        self.measure(tolerance)
        parts = self.chain.parts
        largest = torch.maximum(self.starts.abs(), self.ends.abs()).amax(0)
        batch = len(largest)
        notes = largest.new_tensor([self.line.tag, self.moved]).expand(batch, 2)
        told = [notes, self.error.amax(0).unsqueeze(-1)]
        told += [by_part(values, parts) for values in (largest, self.jump.abs().amax(0))]
        told += [self.at_entry(self.starts), self.last_ends()]
        if transfers is not None:
            pushed, through = self._through(transfers)
            told += [pushed, through.flatten(1)]
        widths = [part.shape[1] for part in told]
        heard = self.line.gather(torch.cat(told, -1)).split(widths, -1)
        tags = heard[0][:, 0, 0]
        if bool((tags != self.line.tag).any()):
            raise RankError(f"the time ranks are at different solves of a call: {tags.tolist()}")
        _, errors, largest, jumps, starts, ends, *transfer = heard
        return self._fit(bool(heard[0][:, :, 1].any()), errors.squeeze(-1), largest, jumps, starts, ends, transfer)

    def _fit(
        self, moved: bool, errors: Tensor, largest: Tensor, jumps: Tensor, starts: Tensor, ends: Tensor,
        transfer: list[Tensor],
    ) -> _Ranks:  # fmt: skip
        """Errors and moves of all ranks; every rank computes the same."""
        parts, joint = self.chain.parts, self.joint.unsqueeze(-1)
        jump = torch.zeros_like(starts)
        jump[1:] = torch.where(joint[1:], ends[:-1] - starts[1:], 0)
        seen = torch.where(largest.isfinite(), largest, 0)
        prefix = torch.zeros_like(seen)
        prefix[1:] = seen.cummax(0).values[:-1]
        tiny = torch.finfo(prefix.dtype).tiny
        floor = torch.full_like(prefix[0], tiny)
        if self.chain.bound is not None:
            box = torch.where(self.chain.bound.isfinite(), self.chain.bound, 0)
            floor = torch.maximum(floor, SHARE_OF_BOX * by_part(box, parts))
        # A rank's scale is at least that of the ranks before: either way of measuring its jumps is a bound.
        inside = torch.minimum(_no_nan(errors), _no_nan((jumps / torch.maximum(prefix, floor)).amax(-1)))
        arrived = by_part(torch.maximum(starts[1:].abs(), ends[:-1].abs()), parts)
        scale = prefix.clone()
        scale[1:] = torch.maximum(scale[1:], torch.where(arrived.isfinite(), arrived, 0))
        return _Ranks(
            starts=starts,
            ends=ends,
            jump=jump,
            prefix=_by_unit(prefix, parts),
            error=inside,
            joint_error=_no_nan((by_part(jump.abs(), parts) / torch.maximum(scale, floor)).amax(-1)),
            moved=moved,
            shift=_carry(jump, transfer, joint),
        )

    def _through(self, transfers: Tensor) -> tuple[Tensor, Tensor]:
        """How this rank's own jumps move the state that it ends with, and how a move of its entry does."""
        dense = transfers.dim() > self.jump.dim()
        moves = linear_scan(_before(transfers), self.jump)
        through = transfers[0]
        for transfer in transfers[1:].unbind(0):
            through = compose(transfer, through, dense)
        return apply(transfers[-1], moves[-1], dense), through

    def shift(self, ranks: _Ranks, transfers: Tensor | None, tolerance: float) -> Tensor:
        """Move the starts by what all jumps, here and on ranks before, mean for them; returns the rows that moved."""
        place = self.line.place
        into, joint = ranks.shift[place], self.joint[place]
        jump = self.jump.index_put((self.entry_link, self.sequences), into)
        moves = jump if transfers is None else linear_scan(_before(transfers), jump)
        moves = torch.where(moves.isfinite().all(-1, keepdim=True), moves, jump)
        scale = torch.maximum(self.scale, ranks.prefix[place])
        hopeless = ~ranks.worst.isfinite().all(0)
        unfinished = ~(ranks.worst <= tolerance).all(0) & ~hopeless
        movable = self.unknown.index_put((self.entry_link, self.sequences), joint)
        moved = ((moves.abs() / scale).amax(-1) > WORTH_MOVING * tolerance) & movable & unfinished
        # As in Boundaries.correct: where nothing moves before it, a start becomes the end before it to the last bit.
        arriving = torch.cat([self.starts[:1], self.ends[:-1]])
        known = self.jump.clone()
        if place > 0:
            arriving[self.entry_link, self.sequences] = ranks.ends[place - 1]
            known[self.entry_link, self.sequences] = ranks.jump[place]
        starts = arriving + (moves - known)
        if self.chain.bound is not None:
            starts = torch.clamp(starts, -self.chain.bound, self.chain.bound)
        self.starts = torch.where(moved.unsqueeze(-1), starts, self.starts)
        self.moved = bool(moved.any())
        return moved.reshape(-1).nonzero().squeeze(-1).cpu()


Settle = Callable[[Tensor], None]
"""Told the state `(B, S)` that this rank is entered with, whenever it changes."""
Check = Callable[[], None]
"""Called by all ranks together where values are not finite, to find out whose fault that is."""


def pipeline_over_ranks(chain: Chain, plan: Plan, line: Line, settle: Settle, check: Check) -> Marched:
    """Run all sequences one step after the other, rank after rank."""
    began = time.perf_counter()
    state = RankBoundaries(chain, None, line)
    nobody = len(line.alive)
    ends = _pipeline(state, torch.where(line.alive.any(0), line.heads.to(torch.uint8).argmax(0), nobody))
    if not bool(ends.isfinite().all()):
        check()
    report = SolveReport.sequential(plan.chunk, plan.reason, plan.tolerance, time.perf_counter() - began)
    return _finished(state, ends, report, settle)


def march_over_ranks(
    chain: Chain, plan: Plan, line: Line, settle: Settle, check: Check, lead: int, reenter: bool
) -> Marched:
    """Make the links of all ranks fit together; the same report on all ranks, but for the chunk.

    chain.first: `(B, S)`, the state to enter this rank with: known at the head of a sequence, a guess elsewhere.
    lead: steps of the warm-up that found it.
    reenter: whether `chain.enter` does not know of `chain.first`.
    """
    began = time.perf_counter()
    correction: Correction = plan.correction
    if correction == "auto":
        correction = "diag" if plan.leak_is_cheap else "none"
    entered = None
    if plan.warmup and chain.links > 1:
        everything = torch.arange(len(chain.segments), device="cpu")
        entered = chain.enter(chain.segments, plan.warmup, everything, correction == "diag")
    state = RankBoundaries(chain, entered, line)
    rows = state.solvable
    if entered is not None:
        rows = rows[rows < len(chain.first)] if reenter else rows[:0]
    residuals: list[float] = []
    while True:
        if rows.numel():
            state.run(rows, correction == "diag")
        transfers = state.transfers(correction)
        ranks = state.exchange(transfers, plan.tolerance)
        residuals.append(float(ranks.worst.max()))
        converged = bool((ranks.worst <= plan.tolerance).all())
        given_up = "" if converged else why_stop(residuals, plan)
        if not ranks.worst.isfinite().all():
            check()
            given_up = given_up or "the values are not finite"
        if not (converged or given_up or ranks.moved):
            given_up = "the corrections vanished"
        if converged or given_up:
            break
        rows = state.shift(ranks, transfers, plan.tolerance)
        settle(state.at_entry(state.starts))
        correction = _next_correction(plan, correction, residuals, state.shape[2])
    ends, fell_back = ranks.ends, False
    if not converged and plan.on_divergence == "sequential":
        bad = ~(ranks.worst <= plan.tolerance)
        first_bad = torch.where(bad.any(0), bad.to(torch.uint8).argmax(0), len(bad)).cpu()
        ends, fell_back = _pipeline(state, first_bad, ranks, plan.tolerance), True
    report = SolveReport(
        solver=f"shooting[{correction}] over {len(line.alive)} ranks",
        chunk=plan.chunk,
        iterations=len(residuals),
        residuals=tuple(residuals),
        tolerance=plan.tolerance,
        converged=converged or fell_back,
        fell_back=fell_back,
        contraction=contraction(residuals),
        seconds=time.perf_counter() - began,
        reason="; ".join(filter(None, (plan.reason, given_up))),
        warmup=lead,
    )
    return _finished(state, ends, report, settle)


def _finished(state: RankBoundaries, ends: Tensor, report: SolveReport, settle: Settle) -> Marched:
    """`ends` `(R, B, S)` are those of all ranks."""
    line, first = state.line, state.chain.first
    entry = first
    if line.place > 0:
        entry = torch.where(state.joint[line.place].unsqueeze(-1), ends[line.place - 1], first)
    settle(entry)
    return Marched(report, entry, line.last(ends, first))


def _pipeline(state: RankBoundaries, first_bad: Tensor, ranks: _Ranks | None = None, tolerance: float = 0.0) -> Tensor:
    """Run each sequence one step after the other from the first rank on that does not fit (`first_bad` `(B,)`).

    Sequences go in groups, so that a rank works on one while the next rank works on the one before. Returns the ends of
    all ranks.
    """
    line, chain, place = state.line, state.chain, state.line.place
    ends = state.last_ends()
    link, start = state.entry_link.clone(), state.at_entry(state.starts).clone()
    if ranks is not None:
        joint_bad = ~(ranks.joint_error[place] <= tolerance)
        if place > 0:
            start = torch.where(joint_bad.unsqueeze(-1), ranks.ends[place - 1], start)
        inside = ~(state.error <= tolerance) if state.chain.links > 1 else torch.zeros_like(state.unknown)
        first_link = inside.to(torch.uint8).argmax(0)
        later = ~joint_bad & inside.any(0)
        link = torch.where(later, first_link, link)
        start = torch.where(later.unsqueeze(-1), state.ends[first_link - 1, state.sequences], start)
    for group in torch.arange(len(first_bad), device="cpu").split(-(-len(first_bad) // len(line.alive))):
        comes = line.joints[:, group] & (first_bad[group] < torch.arange(len(line.alive), device="cpu")[:, None])
        if bool(comes[place].any()):
            arrived = line.receive(ends[group])
            mine = comes[place].to(ends.device).unsqueeze(-1)
            start[group] = torch.where(mine, arrived, start[group])
            link[group] = torch.where(mine.squeeze(-1), state.entry_link[group], link[group])
        run = group[(comes[place] | (first_bad[group] == place)).cpu()].to(ends.device)
        if run.numel():
            ends[run] = chain.finish(link[run], run, start[run])
        if place + 1 < len(line.alive) and bool(comes[place + 1].any()):
            line.send(ends[group])
    return line.gather(ends)


def _next_correction(plan: Plan, current: Correction, residuals: list[float], size: int) -> Correction:
    """What `auto` corrects with from the next sweep on: all ranks must choose alike, so by what all of them know."""
    slow = len(residuals) > 2 and residuals[-1] > 0.3 * residuals[-2]
    return "newton" if plan.correction == "auto" and slow and size <= plan.newton_up_to else current


def _carry(jump: Tensor, transfer: list[Tensor], joint: Tensor) -> Tensor:
    """Moves of all ranks' starts: `δ[r] = P[r−1] δ[r−1] + pushed[r−1] + jump[r]`."""
    if not transfer:
        return jump
    pushed, through = transfer
    through = through.unflatten(-1, (-1, jump.shape[-1])) if through.shape != jump.shape else through
    source = torch.zeros_like(jump)
    source[1:] = torch.where(joint[1:], pushed[:-1] + jump[1:], 0)
    before = torch.where(joint if through.dim() == jump.dim() else joint.unsqueeze(-1), _before(through), 0)
    moves = linear_scan(before, source)
    return torch.where(moves.isfinite().all(-1, keepdim=True), moves, jump)


def _before(transfers: Tensor) -> Tensor:
    """The transfer of the link before each one; zero before the first."""
    before = torch.zeros_like(transfers)
    before[1:] = transfers[:-1]
    return before


def by_part(values: Tensor, parts: tuple[int, ...]) -> Tensor:
    """The largest value of each part of the state: `(..., S)` to `(..., parts)`."""
    return torch.stack([part.amax(-1) for part in values.split(parts, -1)], -1)


def _by_unit(values: Tensor, parts: tuple[int, ...]) -> Tensor:
    """The reverse: each part's value at all of its units."""
    return values.repeat_interleave(torch.tensor(parts, device=values.device), -1)


def _no_nan(errors: Tensor) -> Tensor:
    return errors.nan_to_num(nan=torch.inf, posinf=torch.inf)
