"""The unknowns of one rank, and the exchange per sweep that connects them with those of all other ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from timeloom.distributed.exchange import Heard, carried, errors_of, structure_of
from timeloom.distributed.faults import RankError
from timeloom.distributed.span import Line
from timeloom.report import SolveReport
from timeloom.scan import linear_scan
from timeloom.scan.elements import apply, compose
from timeloom.solve.boundaries import Boundaries, before_each
from timeloom.solve.chain import Chain, Entered
from timeloom.solve.lowrank import LowRank
from timeloom.solve.plan import Correction, Plan
from timeloom.solve.residual import by_part

Settle = Callable[[Tensor], None]
"""Receives the state `(B, S)` at this rank's entry, whenever it changes."""
Check = Callable[[], None]
"""Called by all ranks together if values are not finite, to find the rank that causes it."""


@dataclass(frozen=True)
class Marched:
    """The results of a march apart from this rank's states.

    entry: for each sequence, the state that this rank was entered with, from the rank before, `(B, S)`.
    final: the state after the last step on all ranks, `(B, S)`.
    """

    report: SolveReport
    entry: Tensor
    final: Tensor


def over_ranks(report: SolveReport, line: Line, lead: int) -> SolveReport:
    """This rank's report as one of all ranks, each of which was entered by a warm-up of `lead` steps."""
    return replace(report, solver=f"{report.solver} over {len(line.alive)} ranks", warmup=lead)


class RankBoundaries(Boundaries):
    """The unknowns of one rank.

    Its entry, the end of the rank before, is also an unknown for every sequence that comes from there. Everything that
    is measured and decided is the same on all ranks.
    """

    def __init__(
        self,
        chain: Chain,
        entered: Entered | None,
        line: Line,
        settle: Settle,
        check: Check,
        plan: Plan | None = None,
    ) -> None:
        super().__init__(chain, entered, plan)
        self._gains = None  # a rank knows those of its own links only
        device, links = chain.first.device, chain.links
        alive = (chain.segments.end > chain.segments.begin).view(links, -1)
        self.line, self._settle, self._check = line, settle, check
        self.joints = line.joints.to(device)
        self.joint = self.joints[line.place]
        self.sequences = torch.arange(chain.first.shape[0], device=device)
        self.entry_link = (alive & chain.anchors).to(torch.uint8).argmax(0).to(device)
        self.last_link = (links - 1 - alive.flip(0).to(torch.uint8).argmax(0)).to(device)
        self.starts[self._entry] = chain.first
        self._inside = self.unknown
        self.unknown = self._inside.index_put(self._entry, self.joint)
        self.correction: Correction = "none"
        """The kind of transfers that the next exchange sends."""
        self._transfers: Tensor | None = None
        self._moves: Tensor | None = None
        """The moves of all starts here, if the first one does not move."""
        self._heard: Heard | None = None
        self._tolerance = 0.0
        self._moved = True
        self._final_ends: Tensor | None = None
        self._arrived: Tensor | None = None
        self._open = torch.ones_like(self.joint)

    @classmethod
    def entering(
        cls, chain: Chain, plan: Plan, want_decay: bool, reenter: bool, line: Line, settle: Settle, check: Check
    ) -> tuple[RankBoundaries, Tensor]:
        """Boundaries after a warm-up, if there is one, and the rows that are left to run.

        reenter: whether `chain.enter` does not start the first chunk from `chain.first`, so that it must be run again.
        """
        entered = chain.enter_all(plan.warmup, want_decay) if plan.warmup and chain.links > 1 else None
        state = cls(chain, entered, line, settle, check, plan)
        if entered is None:
            return state, state.solvable
        first = state.solvable[state.solvable < len(chain.first)]
        return state, first if reenter else first[:0]

    @property
    def heard(self) -> Heard:
        """The results of the last exchange."""
        assert self._heard is not None
        return self._heard

    @property
    def _entry(self) -> tuple[Tensor, Tensor]:
        return self.entry_link, self.sequences

    def at_entry(self, values: Tensor) -> Tensor:
        return values[self._entry]

    def last_ends(self) -> Tensor:
        return self.ends[self.last_link, self.sequences]

    def arriving(self) -> Tensor:
        entry = self.at_entry(self.starts)
        if self._arrived is not None:
            entry = torch.where(self.joint.unsqueeze(-1), self._arrived, entry)
        return super().arriving().index_put(self._entry, entry)

    def measure(self, tolerance: float) -> float:
        """The largest relative jump inside and between all ranks: one collective."""
        self._arrived = None
        self.jump[0] = 0
        everything, self.unknown = self.unknown, self._inside
        super().measure(tolerance)
        self.unknown = everything
        self._heard = self._exchange()
        place = self.line.place
        if place > 0:
            self._arrived = self.heard.ends[place - 1]
            jump = torch.where(self.joint.unsqueeze(-1), self._arrived - self.at_entry(self.starts), 0)
            self.jump[self._entry] = jump
            self._measure_by(self._scales(None if self.heard.prefix is None else self.heard.prefix[place]))
        self.demand(tolerance)
        self.converged = bool((self.heard.worst <= tolerance).all())
        residual = float(self.heard.worst.max())
        if not math.isfinite(residual):
            self._check()
        return residual

    def demand(self, tolerance: float) -> None:
        super().demand(tolerance)
        self._tolerance = tolerance
        worst = self.heard.worst
        self._open = ~(worst <= tolerance).all(0) & worst.isfinite().all(0)

    def _unfinished(self) -> Tensor:
        return self._open

    def move(self, delta: Tensor, tolerance: float) -> Tensor:
        rows = super().move(delta, tolerance)
        self._moved = rows.numel() > 0
        self._settle(self.at_entry(self.starts))
        return rows

    def moved_from(self, starts: Tensor) -> float:
        """The largest relative move over all ranks: one collective."""
        return float(self.line.gather(self.starts.new_full((1,), super().moved_from(starts))).max())

    def rests(self, moved: Tensor) -> bool:
        """False: other ranks may have something to run."""
        return False

    def finish(self, hopeless_only: bool = False) -> None:
        bad = ~(self.heard.worst <= self._tolerance)
        if hopeless_only:
            bad = bad & ~self.heard.worst.isfinite().all(0)
        if bool(bad.any()):
            self.run_in_order(torch.where(bad.any(0), bad.to(torch.uint8).argmax(0), len(bad)).cpu())

    def run_in_order(self, first_bad: Tensor) -> None:
        """Run each sequence sequentially, from the first rank with a jump over the tolerance on, `first_bad` `(B,)`.

        Sequences are pipelined in groups: a rank works on one group while the next rank works on the group before.
        """
        line, chain, place = self.line, self.chain, self.line.place
        ends = self.last_ends()
        link, start = self._first_to_run()
        for group in torch.arange(len(first_bad), device="cpu").split(-(-len(first_bad) // len(line.alive))):
            comes = line.joints[:, group] & (first_bad[group] < torch.arange(len(line.alive), device="cpu")[:, None])
            if bool(comes[place].any()):
                arrived = line.receive(ends[group])
                mine = comes[place].to(ends.device).unsqueeze(-1)
                start[group] = torch.where(mine, arrived, start[group])
                link[group] = torch.where(mine.squeeze(-1), self.entry_link[group], link[group])
            run = group[(comes[place] | (first_bad[group] == place)).cpu()].to(ends.device)
            if run.numel():
                ends[run] = chain.finish(link[run], run, start[run])
            if place + 1 < len(line.alive) and bool(comes[place + 1].any()):
                line.send(ends[group])
        self._final_ends = line.gather(ends)

    def _first_to_run(self) -> tuple[Tensor, Tensor]:
        """The first link of each sequence here whose jump is over the tolerance, and the state to run it from."""
        link, start = self.entry_link.clone(), self.at_entry(self.starts).clone()
        if self._heard is None:
            return link, start
        at_once = self.at_entry(self._bad)
        start = torch.where(at_once.unsqueeze(-1), self.at_entry(self.arriving()), start)
        first_link = self._bad.to(torch.uint8).argmax(0)
        later = ~at_once & self._bad.any(0)
        link = torch.where(later, first_link, link)
        return link, torch.where(later.unsqueeze(-1), self.ends[first_link - 1, self.sequences], start)

    def marched(self, report: SolveReport) -> Marched:
        """The results of a march, after telling `settle` the final entry."""
        ends = self._final_ends if self._final_ends is not None else self.heard.ends
        entry = self.chain.first
        if self.line.place > 0:
            entry = torch.where(self.joint.unsqueeze(-1), ends[self.line.place - 1], entry)
        self._settle(entry)
        return Marched(report, entry, self.line.last(ends, self.chain.first))

    @property
    def finite(self) -> bool:
        """Whether all ranks end with finite values."""
        ends = self._final_ends if self._final_ends is not None else self.heard.ends
        return bool(ends.isfinite().all())

    def _exchange(self) -> Heard:
        """Exchange boundaries with all ranks."""
        parts, fading = self.chain.parts, self.chain.fading
        batch = len(self.joint)
        told = [self.starts.new_tensor([self.line.tag, self._moved]).expand(batch, 2), self.error.amax(0).unsqueeze(-1)]
        told += [self.at_entry(self.starts), self.last_ends()]
        if fading:
            largest = torch.maximum(self.starts.abs(), self.ends.abs()).amax(0)
            told += [by_part(values, parts) for values in (largest, self.jump.abs().amax(0))]
        leaving = self._leaving()
        if leaving is not None:
            told += [leaving[0], leaving[1].flatten(1)]
        widths = [part.shape[1] for part in told]
        heard = self.line.gather(torch.cat([part.to(self.starts.dtype) for part in told], -1)).split(widths, -1)
        tags = heard[0][:, 0, 0]
        if bool((tags != self.line.tag).any()):
            raise RankError(f"the time ranks are at different solves of a call: {tags.tolist()}")
        moved, rest = bool(heard[0][:, :, 1].any()), list(heard[4:])
        sizes = [rest.pop(0), rest.pop(0)] if fading else None
        jump = torch.zeros_like(heard[2])
        jump[1:] = torch.where(self.joints[1:].unsqueeze(-1), heard[3][:-1] - heard[2][1:], 0)
        errors, starts, ends = heard[1:4]
        prefix, error, joint_error = errors_of(self.chain, jump, errors, starts, ends, sizes)
        shift = jump
        if leaving is not None:
            shift = carried(jump, rest[0], rest[1].unflatten(-1, leaving[1].shape[1:]), self.joints)
        return Heard(ends, prefix, error, joint_error, moved, shift)

    def _leaving(self) -> tuple[Tensor, Tensor] | None:
        """The move of this rank's end by its own jumps, and the transfer from its entry to its end.

        None if jumps are not carried on.
        """
        if self.chain.carry is not None and self.chain.leave is not None:
            self._moves = self.chain.carry(self.jump, self.starts, None)
            return self.chain.leave(self._moves, self.starts)
        if self.correction == "none":
            return None
        known = self._transfers_by(self.correction)
        transfers = self._transfers = known.dense() if isinstance(known, LowRank) else known
        structure = structure_of(transfers[0])
        moves = linear_scan(before_each(transfers), self.jump)
        through = transfers[0]
        for transfer in transfers[1:].unbind(0):
            through = compose(transfer, through, structure)
        return apply(transfers[-1], moves[-1], structure), through

    def _carry(self, correction: Correction) -> Tensor:
        """The moves of all starts here, for the jumps on this rank and on the ranks before it."""
        shift = torch.where(self.joint.unsqueeze(-1), self.heard.shift[self.line.place], 0)
        jump = self.jump.index_put(self._entry, shift)
        if self.chain.carry is not None:
            if self._moves is not None and not bool(self.joint.any()):
                return self._or_jump(self._moves)
            return self._or_jump(self.chain.carry(jump, self.starts, None))
        if self._transfers is None or correction == "none":
            return jump
        return self._or_jump(linear_scan(before_each(self._transfers), jump))
