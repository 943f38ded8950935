"""A chain of links, which are chunks in marching order: the driver's only view of a problem."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from timeloom.mgrit.recorded import Coarsen
from timeloom.problem import Segments
from timeloom.solve.tangents import Tangent

Sweep = Callable[[Segments, Tensor, Tensor, bool], tuple[Tensor, Tensor | None]]
"""`sweep(segments, starts, rows, want_decay) -> ends, decay`; `rows` says where the segments stand in the chain."""
Entered = tuple[Tensor, Tensor, Tensor | None]
"""Starts, ends and, if wanted, the decay of links that were entered by a warm-up."""
Enter = Callable[[Segments, int, Tensor, bool], Entered]
"""`enter(segments, lead, rows, want_decay)`: a sweep that finds its starts by a warm-up."""


@dataclass(frozen=True)
class Chain:
    """Chunks in marching order, forward or backward in time: link p of C starts where link p − 1 ended.

    segments: C·B rows, link by link, sequences side by side.
    first: `(B, S)`, the known state that each sequence's chain starts from.
    neutral: `(B, S)`, the initial guess of a start if nothing is known.
    anchors: `(C, B)`, whether a link's start is `first` (one link for each sequence) rather than an unknown.
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
    tangent: Tangent
    """`tangent(directions, starts, ends, scale)`: products of these transfers with a few directions of each link."""
    finish: Callable[[Tensor, Tensor, Tensor], Tensor]
    """`finish(links, sequences, starts)`: run these sequences sequentially from these links on; returns their ends."""
    bound: Tensor | None = None
    fading: bool = False
    """Whether values fade along the chain, as gradients do away from the loss. Jumps are then relative to the largest
    value so far along the chain, otherwise to the values beside them."""
    guess: Tensor | None = None
    """`(C, B, S)`, the initial guess of the starts, instead of `neutral`."""
    entered: Entered | None = None
    """The result of a first sweep over all links that was not certified; the driver continues from it."""
    carry: Callable[[Tensor, Tensor, Tensor | None], Tensor] | None = None
    """`carry(jumps, starts, damping)`: the corrections `(C, B, S)` by linearised single steps; see `linearize`."""
    leave: Callable[[Tensor, Tensor], tuple[Tensor, Tensor] | None] | None = None
    """`leave(moves, starts)`: with `carry`, the effect of moves of the starts behind the last link; see `leaving` in
    `linearize`."""
    certify: Callable[[Tensor, Tensor], Tensor | float] | None = None
    """`certify(starts, ends)`: an upper bound of the largest relative jump, as a number (on the device); None if there
    is no fast way to compute one."""
    coarsen: Coarsen | None = None
    """`coarsen(coarsening)`: coarse steps from link to link, for every coarse level of multigrid."""

    @property
    def links(self) -> int:
        return self.anchors.shape[0]

    def enter_all(self, lead: int, want_decay: bool) -> Entered:
        """Enter every link by a warm-up of `lead` steps."""
        return self.enter(self.segments, lead, torch.arange(len(self.segments), device="cpu"), want_decay)
