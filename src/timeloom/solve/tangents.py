"""Transfers measured in a few directions: small changes of the starts are swept as additional rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from timeloom.problem import Segments
from timeloom.solve.lowrank import LowRank

RANK = 8
"""Default number of directions of each link."""
MOST_COPIED = 2**28
"""Bytes of inputs that sweeps in torch operations may copy for additional rows."""

Map = Callable[[Tensor], Tensor]
"""`map(directions)`: the images of directions `(C, B, S, K)` under the links, in the same shape."""


class Tangents:
    """The transfer of each link on the `rank` directions in which its start is most likely to change.

    These are the jump at its start, and the directions in which the end of the link before is most likely to change.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._images: Tensor | None = None

    def model(self, map_by: Map, jumps: Tensor, decay: Tensor) -> LowRank:
        """The transfers on top of the decay `(C, B, S)`, given the jumps between links `(C, B, S)`.

        The images of one correction are the directions of the next.
        """
        rank = min(self._rank, decay.shape[-1])
        if self._images is None:
            generator = torch.Generator().manual_seed(0)  # any directions will do, except single units
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
    """A map of directions forward in time, by differences of two sweeps, one of them from starts moved by a small step.

    Since a sweep rounds its ends, a step of √eps is the most precise one: to a part in 1,000 in float32.
    `sweep(segments, starts)` returns the ends alone.
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
    """A map of directions backward in time, exact since the adjoint is linear; `sweep` omits the loss's gradient."""

    def tangent(directions: Tensor, starts: Tensor, ends: Tensor, scale: Tensor) -> Tensor:
        return _mapped(lambda rows, along, _: sweep(rows, along), segments, directions, inputs)

    return tangent


Tangent = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""`tangent(directions, starts, ends, scale)`: images of directions `(R, S, K)` under R links that run from `starts` to
`ends` `(R, S)`; `scale` `(R, S)` is that of each unit."""


def _mapped(
    sweep: Callable[[Segments, Tensor, Tensor], Tensor], segments: Segments, directions: Tensor, inputs: Tensor
) -> Tensor:
    """Images of directions `(R, S, K)`, swept as many at once as `MOST_COPIED` allows."""
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
