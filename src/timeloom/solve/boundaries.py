"""The unknowns of a chain: starts and ends of its links, the jumps between them, and how jumps correct the starts."""

from __future__ import annotations

import torch
from torch import Tensor

from timeloom.buffers import all_finite
from timeloom.scan import linear_scan
from timeloom.solve.chain import Chain, Entered
from timeloom.solve.damping import Damping
from timeloom.solve.gains import Gains
from timeloom.solve.lowrank import LowRank
from timeloom.solve.plan import Correction, Plan
from timeloom.solve.probes import first_order_error
from timeloom.solve.residual import by_unit, certificate, floors, relative, scales
from timeloom.solve.secant import Secants
from timeloom.solve.tangents import RANK, Tangents

WORTH_MOVING = 0.1
"""Share of the tolerance up to which a correction is skipped: skipped corrections must not add up to a jump."""


class Boundaries:
    """The unknowns: starts and ends of all links, `(C, B, S)`, and what sweeps have shown about the links so far."""

    def __init__(self, chain: Chain, entered: Entered | None, plan: Plan | None = None) -> None:
        """`plan` decides what is recorded for its corrections."""
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
        self.decay = torch.ones_like(self.starts)
        self.jump = torch.zeros_like(self.starts)
        self.error = torch.zeros(links, batch, device=device)
        self.scale = torch.ones_like(self.starts)
        self.converged = False
        self._bad = torch.zeros_like(self.unknown)
        self._damping = Damping(batch, device) if plan is not None and plan.damped else None
        self._secants = Secants(chain.fading) if plan is not None and plan.correction == "secant" else None
        self._tangents = Tangents(RANK if plan is None else plan.rank)
        self._gains = Gains(self.starts) if plan is not None and plan.learns_gains else None
        self._has_decay = False
        self._known: Tensor | LowRank | None = None
        """The transfers that the last correction used."""
        self.moved_by = 0.0
        """The largest relative move of the last correction."""
        if entered is not None:
            starts, ends, decay = (None if value is None else value.view(self.shape) for value in entered)
            assert starts is not None
            assert ends is not None
            inside = alive.to(device).unsqueeze(-1)
            self.starts, self.ends = (torch.where(inside, value, self.starts) for value in (starts, ends))
            # Without a decay no jump is carried on: each moves only the start right behind it.
            self.decay = torch.zeros_like(self.starts) if decay is None else decay
            self._has_decay = decay is not None
            self._note_sweep()

    def run(self, rows: Tensor, want_decay: bool) -> None:
        """Sweep these rows from their starts."""
        size = self.shape[2]
        everything = rows.numel() == self.shape[0] * self.shape[1]
        segments = self.chain.segments if everything else self.chain.segments[rows]
        at = slice(None) if everything else rows.to(self.starts.device)
        ends, decay = self.chain.sweep(segments, self.starts.view(-1, size)[at], rows, want_decay)
        self.ends.view(-1, size)[at] = ends
        if decay is not None:
            self.decay.view(-1, size)[at] = decay
        elif everything:
            self.decay.zero_()
        self._has_decay = decay is not None
        self._note_sweep()

    def _note_sweep(self) -> None:
        if self._secants is not None:
            self._secants.note(self.starts, self.ends, self.decay)

    def measure(self, tolerance: float) -> float:
        """The largest relative jump between a link's end and the next start; marks the links over the tolerance."""
        unknown = self.unknown[1:].unsqueeze(-1)
        self.jump[1:] = torch.where(unknown, self.ends[:-1] - self.starts[1:], 0)
        self._measure_by(self._scales())
        self._bad = ~(self.error <= tolerance)
        self.converged = not bool(self._bad.any())
        if self._gains is not None:
            self._gains.note(self.starts, self.ends, self.scale)
        return float(certificate(self.error))

    def _measure_by(self, scale: Tensor) -> None:
        """Compute the relative jumps by these scales, `(C, B, P)`."""
        self.error = relative(self.jump, scale, self.chain.parts)
        self.scale = by_unit(scale, self.chain.parts)

    def accept(self) -> None:
        """Accept the jumps as they are as converged."""
        self._bad, self.converged = torch.zeros_like(self._bad), True

    def demand(self, tolerance: float) -> None:
        """Mark the links whose jump is over this tolerance as unfinished."""
        self._bad = ~(self.error <= tolerance)

    def _scales(self, before: Tensor | None = None) -> Tensor:
        """Scale of the state at each link, part by part, `(C, B, P)`; `before`: the scale before the first link."""
        chain = self.chain
        floor = floors(chain.bound, chain.first, chain.parts)
        return scales(self.starts, self.arriving(), chain.parts, floor, chain.fading, before)

    def correct(self, correction: Correction, tolerance: float) -> Tensor:
        """Correct the starts for the jumps; returns the rows whose start moved, which must be swept again."""
        if self._damping is not None:
            self._damping.adapt(self.error, tolerance)
        if self._secants is not None:
            self._secants.doubt(self.error, tolerance)
        rows = self.move(self._carry(correction), tolerance)
        if rows.numel() == 0 and isinstance(self._known, LowRank):  # its moves cancelled, though jumps are left
            rows = self.move(self.jump, tolerance)
        return rows

    def move(self, delta: Tensor, tolerance: float) -> Tensor:
        """Move the starts of unfinished sequences by `delta`; returns the rows that moved and must be swept again."""
        moves = self._relative(delta)
        self.moved_by = float(certificate(moves))
        moved = moves > WORTH_MOVING * tolerance
        moved &= self.unknown & self._unfinished()
        # starts + δ, written so that a start whose predecessor does not move becomes its end to the last bit
        starts = self.arriving() + (delta - self.jump)
        if self.chain.bound is not None:
            starts = torch.clamp(starts, -self.chain.bound, self.chain.bound)
        self.starts = torch.where(moved.unsqueeze(-1), starts, self.starts)
        return moved.reshape(-1).nonzero().squeeze(-1).cpu()

    def moved_from(self, starts: Tensor) -> float:
        """The largest relative distance of the starts from where they were."""
        return float(certificate(self._relative(self.starts - starts)))

    def foreseen(self) -> Tensor:
        """The relative size of the next correction, `(C, B)`, predicted by the best known transfers without a sweep."""
        return self._relative(self._next_move())

    def _next_move(self) -> Tensor:
        known = self._known
        if self._secants is not None:
            known = self._secants.model(self.decay)
        elif known is None or known is self.decay:
            known = self.decay if self._has_decay else None
        return self.jump if known is None else self._or_jump(carried(known, self.jump))

    def added_up(self) -> Tensor:
        """The relative jumps accumulated by the gains of the links, `(C, B)`.

        The jumps themselves if no gains are recorded, or if the dense transfers are known, which say more than gains.
        """
        return self.error if self._gains is None or self._knows_all else self._gains.add_up(self.error)

    def probed(self) -> float | None:
        """The largest relative error of a start, measured by sweeps along it where links amplify and gains say little.

        None if no link amplifies, if there is no jump, or if the dense transfers are known.
        """
        if self._gains is None or self._knows_all or not self.amplifies or not bool(self.jump.any()):
            return None
        decay = self.decay if self._has_decay else torch.zeros_like(self.decay)
        guess, images = self._next_move(), self._gains.images
        return first_order_error(self._along, self.jump, decay, guess, images, self._relative)

    @property
    def _knows_all(self) -> bool:
        """Whether the last correction was by dense transfers."""
        return isinstance(self._known, Tensor) and self._known.dim() > 3

    @property
    def amplifies(self) -> bool:
        """Whether a link has shown a gain above one."""
        return self._gains is not None and bool((self._gains.values > 1).any())

    def _relative(self, moves: Tensor) -> Tensor:
        return (moves.abs() / self.scale).amax(-1)

    def rests(self, moved: Tensor) -> bool:
        """Whether nothing is left to sweep, given the rows that moved."""
        return moved.numel() == 0

    def arriving(self) -> Tensor:
        """The end of the link before each start, `(C, B, S)`; for the first link its own start."""
        return torch.cat([self.starts[:1], self.ends[:-1]])

    def _unfinished(self) -> Tensor:
        """Whether a sequence is to be corrected, `(B,)`: some jump is over the tolerance, and all are finite."""
        unfinished = self._bad.any(0)
        if not all_finite(self.jump):
            unfinished &= self.jump.isfinite().all(-1).all(0)
        return unfinished

    def _carry(self, correction: Correction) -> Tensor:
        """The corrections `δ[p] = A[p−1] δ[p−1] + jump[p]`; plain jumps where δ is not finite."""
        if self.chain.carry is not None:
            strength = None if self._damping is None else self._damping.strength
            return self._or_jump(self.chain.carry(self.jump, self.starts, strength))
        if correction in ("none", "auto"):
            return self.jump
        self._known = self._transfers_by(correction)
        return self._or_jump(carried(self._known, self.jump))

    def _transfers_by(self, correction: Correction) -> Tensor | LowRank:
        """`A[p]` of each link: diagonal `(C, B, S)`, dense `(C, B, S, S)` or low-rank."""
        if correction == "diag":
            return self.decay
        if correction == "secant":
            assert self._secants is not None
            return self._secants.model(self.decay)
        if correction == "lowrank":
            return self._tangents.model(self._along, self.jump, self.decay)
        return self.chain.transfer(self.chain.segments, self.starts.flatten(0, 1)).view(*self.shape, self.shape[2])

    def _along(self, directions: Tensor) -> Tensor:
        """The images of directions `(C, B, S, K)` under the transfers of all links."""
        starts, ends, scale = (values.flatten(0, 1) for values in (self.starts, self.ends, self.scale))
        return self.chain.tangent(directions.flatten(0, 1), starts, ends, scale).view_as(directions)

    def _or_jump(self, delta: Tensor) -> Tensor:
        if all_finite(delta):
            return delta
        return torch.where(delta.isfinite().all(-1, keepdim=True), delta, self.jump)

    def finish(self, hopeless_only: bool = False) -> None:
        """Keep each sequence's exact prefix and run the rest of it sequentially.

        hopeless_only: only sequences with values that are not finite, which no sweep carries on as a plain run would.
        """
        bad = self._bad & ~self.jump.isfinite().all(-1).all(0) if hopeless_only else self._bad
        sequences = bad.any(0).nonzero().squeeze(-1)
        if sequences.numel() == 0:
            return
        first_bad = bad.to(torch.uint8).argmax(0)[sequences]
        self.chain.finish(first_bad, sequences, self.ends[first_bad - 1, sequences])


def carried(transfers: Tensor | LowRank, jumps: Tensor) -> Tensor:
    """`δ[p] = A[p−1] δ[p−1] + jump[p]`, `(C, B, S)`."""
    if isinstance(transfers, LowRank):
        return transfers.carry(jumps)
    return linear_scan(before_each(transfers), jumps)


def before_each(transfers: Tensor) -> Tensor:
    """The transfer of the link before each one; zero before the first."""
    before = torch.zeros_like(transfers)
    before[1:] = transfers[:-1]
    return before
