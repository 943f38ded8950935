"""Transfers measured in a few directions: small changes of the starts are swept beside them, as more rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from timeloom.problem import Segments
from timeloom.solve.lowrank import LowRank

RANK = 8
"""Directions of each link, unless told otherwise."""
MOST_COPIED = 2**28
"""Bytes of inputs that sweeps in torch operations may copy for the rows that are swept beside each other."""

Map = Callable[[Tensor], Tensor]
"""`map(directions)`: what the links make of directions `(C, B, S, K)`, of the same shape."""


class Tangents:
    """The transfer of each link on the `rank` directions in which its start is most likely to change: along the jump
    there, and along those in which the link before ends, whatever it starts from.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._images: Tensor | None = None

    def model(self, map_by: Map, jumps: Tensor, decay: Tensor) -> LowRank:
        """Transfers over the decay `(C, B, S)`, of links between which there are these jumps `(C, B, S)`. The images of
        one correction are the directions of the next.
        """
        rank = min(self._rank, decay.shape[-1])
        if self._images is None:
            generator = torch.Generator().manual_seed(0)  # any directions will do, but for those of single units
            drawn = torch.randn(*decay.shape, rank, generator=generator).to(decay)
            self._images = map_by(drawn / decay.shape[-1] ** 0.5)
        arriving = torch.cat([torch.zeros_like(self._images[:1]), self._images[:-1]])
        arriving = torch.cat([jumps.unsqueeze(-1), arriving[..., : rank - 1]], -1)
        sizes = torch.linalg.vector_norm(arriving, dim=-2, keepdim=True)
        directions = _orthonormal((arriving / sizes.clamp(min=torch.finfo(sizes.dtype).tiny)).nan_to_num())
        self._images = map_by(directions).nan_to_num(posinf=0, neginf=0)
        return LowRank(decay, self._images - decay.unsqueeze(-1) * directions, directions)


def _orthonormal(columns: Tensor) -> Tensor:
    """Directions `(C, B, S, K)` that span the columns."""
    wide = columns.float() if columns.itemsize < 4 else columns  # torch factorises nothing in half precision
    found: Tensor = torch.linalg.qr(wide)[0]
    return found.to(columns.dtype)


def by_differences(sweep: Callable[[Segments, Tensor], Tensor], segments: Segments, inputs: Tensor) -> Tangent:
    """What maps directions forward in time: differences of two sweeps, one of them from starts a small step aside.

    A sweep rounds its ends, so a step of the square root of that is as precise as it gets: to a part in 1,000 in
    float32. `sweep(segments, starts)` returns the ends alone.
    """

    def tangent(directions: Tensor, starts: Tensor, ends: Tensor, scale: Tensor) -> Tensor:
        step = torch.finfo(starts.dtype).eps ** 0.5 * scale.amax(-1, keepdim=True)
        return _mapped(
            lambda rows, aside, at: (sweep(rows, starts[at] + step[at] * aside) - ends[at]) / step[at],
            segments,
            directions,
            inputs,
        )

    return tangent


def by_adjoint(sweep: Callable[[Segments, Tensor], Tensor], segments: Segments, inputs: Tensor) -> Tangent:
    """What maps directions backward in time, exactly: the adjoint is linear. `sweep` leaves out the loss's gradient."""

    def tangent(directions: Tensor, starts: Tensor, ends: Tensor, scale: Tensor) -> Tensor:
        return _mapped(lambda rows, along, _: sweep(rows, along), segments, directions, inputs)

    return tangent


Tangent = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""`tangent(directions, starts, ends, scale)`: images of directions `(R, S, K)` of R links that run from `starts` to
`ends` `(R, S)`, whose units are of this scale `(R, S)`."""


def _mapped(
    sweep: Callable[[Segments, Tensor, Tensor], Tensor], segments: Segments, directions: Tensor, inputs: Tensor
) -> Tensor:
    """Images of directions `(R, S, K)`, of as many directions at once as inputs may be copied for."""
    rows, _, count = directions.shape
    together = max(1, min(count, MOST_COPIED // max(1, inputs.nbytes)))
    images = torch.empty_like(directions)
    for first in range(0, count, together):
        some = directions[..., first : first + together]
        width = some.shape[-1]
        sequence, begin, end = (column.repeat(width) for column in segments.columns)
        repeated = Segments(sequence, begin, end)
        at = torch.arange(rows, device=directions.device).repeat(width)
        swept = sweep(repeated, some.permute(2, 0, 1).reshape(width * rows, -1), at)
        images[..., first : first + together] = swept.view(width, rows, -1).permute(1, 2, 0)
    return images
