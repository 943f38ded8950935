"""The residual: the one definition of a jump, of the scale it is measured against, and of the certificate.

A jump is what is missing at a start: the end that arrives there from the link before, less the start. It is measured
part by part (h, c), each against its own scale: the largest value of that part beside the jump. Where values fade along
the chain, as gradients do away from the loss, the scale is the largest value that has come so far. Never the largest of
all: what is nothing beside the last state may be all of an early one, and the other way round. A part that lives in a
box counts as a share of the box at least, since it may cross zero; where the states that follow make use of less of the
box, as a share of that. The certificate is the largest relative jump; what is not finite is infinite.

Jumps are not errors: over a long memory they add up. A start is off by all corrections that it would still get, so the
error is estimated by the size of the next one, which carries the jumps along by the best transfers that are known, and
by the rate at which corrections have shrunk so far, at which those behind it will. Where no more than the decay of a
link is known, jumps are added up by the gains that it has shown, too (`gains`): the larger of the two counts. Where a
link amplifies, both are guesses, and small changes of all starts are swept along the error itself (`probes`).

Boundaries, on one process and over ranks, call this file. The kernels compute the same numbers by themselves (C
`timeloom_jump`, Triton `jumps_kernel`): tests/test_residual.py holds them against it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

SHARE_OF_BOX = 0.1
"""A state that lives in a box is measured against this much at least, or against this much of the largest state that
follows, where that is less: steps round values of that size."""

LAST = 4
"""Links at the end that count as following each other: of one or two, all units may cross zero at once."""

SMOOTHED = 3
"""Corrections whose mean rate tells that of those to come: from one to the next it goes up and down."""


def by_part(values: Tensor, parts: tuple[int, ...]) -> Tensor:
    """The largest value of each part of the state: `(..., S)` to `(..., P)`."""
    return torch.stack([part.amax(-1) for part in values.split(parts, -1)], -1)


def by_unit(values: Tensor, parts: tuple[int, ...]) -> Tensor:
    """A number of each part for all units of it: `(..., P)` to `(..., S)`."""
    return torch.cat([values[..., i : i + 1].expand(*values.shape[:-1], width) for i, width in enumerate(parts)], -1)


def floors(bound: Tensor | None, like: Tensor, parts: tuple[int, ...], share_of_box: float = SHARE_OF_BOX) -> Tensor:
    """The smallest scales of states like `(B, S)` that make use of all of their box, `(B, P)`: none without a box."""
    floor = torch.zeros_like(like) if bound is None else share_of_box * bound.isfinite().to(like.dtype)
    return by_part(floor, parts)


def scales(
    starts: Tensor,
    arriving: Tensor,
    parts: tuple[int, ...],
    floor: Tensor,
    fading: bool = False,
    before: Tensor | None = None,
    joint: bool = False,
    whole_box: bool = False,
) -> Tensor:
    """What jumps are measured against, `(C, B, P)`, from starts and what arrives at them, `(C, B, S)` each.

    floor: `(B, P)`; before: `(B, P)` or `(C, B, P)`, the largest values of links before these, where values fade;
    joint: whether all parts are measured against the largest of them; whole_box: whether all of a box counts, though
    the states make use of little.
    """
    largest = by_part(torch.maximum(starts.abs(), arriving.abs()).nan_to_num(nan=0, posinf=0), parts)
    if not whole_box:
        floor = floor * following(largest).clamp(max=1)
    if fading:
        largest = largest.cummax(0).values
    if before is not None:
        largest = torch.maximum(largest, before)
    if joint:
        largest = largest.amax(-1, keepdim=True).expand_as(largest)
    return torch.maximum(largest, floor).clamp(min=torch.finfo(largest.dtype).tiny)


def following(largest: Tensor) -> Tensor:
    """The largest of all links from each one on, the last few of them together: `(C, B, P)` of the same."""
    behind = largest.flip(0).cummax(0).values.flip(0)
    return torch.maximum(behind, largest[-LAST:].amax(0))


def relative(jumps: Tensor, scale: Tensor, parts: tuple[int, ...]) -> Tensor:
    """The largest relative entry of each jump `(C, B, S)` by its scale `(C, B, P)`: `(C, B)`; NaN stays NaN."""
    return (by_part(jumps.abs(), parts) / scale).amax(-1)


def certificate(errors: Tensor) -> Tensor:
    """The largest relative jump as a number on the device; what is not finite is infinite, no jump is zero."""
    if errors.numel() == 0:
        return errors.new_zeros(())
    return errors.nan_to_num(nan=torch.inf, posinf=torch.inf).max()


def error_estimate(moves: Sequence[float], most: int, rate: float = 0.0) -> float:
    """How far starts are off, relative to their scale, from the sizes of the corrections so far, `moves`, the last of
    which is the next one: not made yet. All corrections that would follow are a geometric series of at most `most`
    terms, since so many make every start exact.

    rate: by which corrections shrink, where only one is known.
    """
    *before, following = moves
    last = before[-SMOOTHED:]
    if last and last[0] > 0:
        rate = (following / last[0]) ** (1 / len(last))
    if not rate < 1:
        return following * max(most, 1)
    return following * (1 - rate ** max(most, 1)) / (1 - rate)


def rate_of_warmup(jump: float, warmup: int, chunk: int) -> float:
    """The factor by which a chunk shrinks a difference, where a warm-up from a neutral state has left this jump."""
    return min(jump, 1.0) ** (chunk / warmup) if warmup else 0.0
