"""The residual: the one definition of a jump, of the scale it is measured against, and of the certificate.

A jump is the end that arrives from the link before, minus the start. It is measured for each part of the state (h, c)
relative to the part's own scale: its largest value on both sides of the jump. If values fade along the chain, as
gradients do away from the loss, the scale is the largest value so far along the chain. It is never the largest value of
the whole chain: a jump that is negligible beside the last state may be as large as an early one, and vice versa. If a
part lives in a box, its scale is at least a share of the box, since it may cross zero, or a share of the largest state
that follows, if that is less. The certificate is the largest relative jump; a value that is not finite makes it
infinite.

Jumps are not errors: over a long memory they add up. The error of a start is the sum of all corrections that it would
still get. It is estimated from the size of the next one, which carries the jumps along by the best known transfers, and
from the rate at which corrections have shrunk so far, assuming that later ones shrink at the same rate. If only the
decay of a link is known, jumps are also accumulated by the gains that the links have shown (`gains`): the larger of the
two counts. If a link amplifies, both are guesses, and small changes of all starts are swept along the error (`probes`).

Boundaries, on one process and over ranks, call this file. The kernels compute the same numbers by themselves (C
`timeloom_jump`, Triton `jumps_kernel`): tests/test_residual.py compares them with it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

SHARE_OF_BOX = 0.1
"""Smallest scale of a state that lives in a box, as a share of the box, or of the largest state that follows if that is
less: steps round values of that size."""

LAST = 4
"""Number of last links that are taken together for the states that follow: in one or two, all units may cross zero."""

SMOOTHED = 3
"""Number of last corrections whose mean rate predicts the rate of later ones: single rates fluctuate."""


def by_part(values: Tensor, parts: tuple[int, ...]) -> Tensor:
    """The largest value of each part of the state: `(..., S)` to `(..., P)`."""
    return torch.stack([part.amax(-1) for part in values.split(parts, -1)], -1)


def by_unit(values: Tensor, parts: tuple[int, ...]) -> Tensor:
    """Repeat the number of each part for all of its units: `(..., P)` to `(..., S)`."""
    return torch.cat([values[..., i : i + 1].expand(*values.shape[:-1], width) for i, width in enumerate(parts)], -1)


def floors(bound: Tensor | None, like: Tensor, parts: tuple[int, ...], share_of_box: float = SHARE_OF_BOX) -> Tensor:
    """Lower bounds of the scales, `(B, P)`, for states like `(B, S)` that use all of their box; zero without a box."""
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
    """The scales of jumps, `(C, B, P)`, from starts and the ends that arrive at them, `(C, B, S)` each.

    floor: lower bounds of the scales, `(B, P)`.
    before: the largest values of links before these, `(B, P)` or `(C, B, P)`, if values fade.
    joint: whether all parts share the largest scale.
    whole_box: whether `floor` holds even if the states use little of their box.
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
    """The largest value from each link on, with the last few links taken together: `(C, B, P)` to `(C, B, P)`."""
    behind = largest.flip(0).cummax(0).values.flip(0)
    return torch.maximum(behind, largest[-LAST:].amax(0))


def relative(jumps: Tensor, scale: Tensor, parts: tuple[int, ...]) -> Tensor:
    """The largest relative entry of each jump `(C, B, S)` by its scale `(C, B, P)`: `(C, B)`; NaN stays NaN."""
    return (by_part(jumps.abs(), parts) / scale).amax(-1)


def certificate(errors: Tensor) -> Tensor:
    """The largest relative jump as a number on the device: infinite if one is not finite, zero if there are none."""
    if errors.numel() == 0:
        return errors.new_zeros(())
    return errors.nan_to_num(nan=torch.inf, posinf=torch.inf).max()


def error_estimate(moves: Sequence[float], most: int, rate: float = 0.0) -> float:
    """The error of starts, relative to their scale, as the sum of a geometric series of the corrections to come.

    moves: the sizes of the corrections so far, followed by that of the next one, which is not made yet.
    most: largest number of terms of the series, since that many corrections make every start exact.
    rate: the rate at which corrections shrink, used if only one is known.
    """
    *before, following = moves
    last = before[-SMOOTHED:]
    if last and last[0] > 0:
        rate = (following / last[0]) ** (1 / len(last))
    if not rate < 1:
        return following * max(most, 1)
    return following * (1 - rate ** max(most, 1)) / (1 - rate)


def rate_of_warmup(jump: float, warmup: int, chunk: int) -> float:
    """The factor by which a chunk shrinks a difference, if a warm-up from a neutral state has left this jump."""
    return min(jump, 1.0) ** (chunk / warmup) if warmup else 0.0
