"""The boundaries of all ranks after an exchange, and the errors and moves that every rank derives from them alike."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from timeloom.scan import linear_scan
from timeloom.scan.elements import Structure
from timeloom.solve.boundaries import before_each
from timeloom.solve.chain import Chain
from timeloom.solve.residual import floors, relative, scales


@dataclass(frozen=True)
class Heard:
    """The results of one exchange between all ranks, in marching order: ends `(R, B, S)`, errors `(R, B)`, moves."""

    ends: Tensor
    prefix: Tensor | None
    """Largest values, part by part, on the ranks before each rank, `(R, B, P)`; None if values do not fade."""
    error: Tensor
    """Upper bound of the relative jumps inside each rank."""
    joint_error: Tensor
    """Relative jump at each rank's start."""
    moved: bool
    """Whether any rank moved a start since the last exchange."""
    shift: Tensor
    """The moves of all ranks' starts, `(R, B, S)`."""

    @property
    def worst(self) -> Tensor:
        return torch.maximum(self.error, self.joint_error)


def errors_of(
    chain: Chain, jump: Tensor, errors: Tensor, starts: Tensor, ends: Tensor, sizes: list[Tensor] | None
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Scale of the ranks before each (None if values do not fade), errors inside and at the start of every rank.

    Every rank computes the same. sizes: the largest values and jumps of each rank, part by part, if values fade. The
    scale on a rank is then at least that of the ranks before it, so its jumps relative to either scale are bounds.
    """
    parts, inside = chain.parts, _no_nan(errors.squeeze(-1))
    floor, prefix = floors(chain.bound, starts[0], parts), None
    if sizes is not None:
        largest, jumps = sizes
        prefix = torch.zeros_like(largest)
        prefix[1:] = _finite(largest).cummax(0).values[:-1]
        inside = torch.minimum(inside, _no_nan((jumps / prefix.clamp(min=torch.finfo(prefix.dtype).tiny)).amax(-1)))
    scale = scales(starts, torch.cat([starts[:1], ends[:-1]]), parts, floor, before=prefix)
    return prefix, inside, _no_nan(relative(jump, scale, parts))


def carried(jump: Tensor, pushed: Tensor, through: Tensor, joints: Tensor) -> Tensor:
    """The moves of all ranks' starts: `δ[r] = P[r−1] δ[r−1] + pushed[r−1] + jump[r]`, with P in `through`."""
    source = torch.zeros_like(jump)
    source[1:] = torch.where(joints[1:].unsqueeze(-1), pushed[:-1] + jump[1:], 0)
    before = torch.where(joints.view(*joints.shape, *[1] * (through.dim() - 2)), before_each(through), 0)
    structure = structure_of(through[0])
    if structure == "block":
        moves = linear_scan(before, source.unflatten(-1, (2, -1)), structure=structure).flatten(-2)
    else:
        moves = linear_scan(before, source, structure=structure)
    return torch.where(moves.isfinite().all(-1, keepdim=True), moves, jump)


def structure_of(element: Tensor) -> Structure:
    """The structure of an element `(B, ...)`."""
    structures: dict[int, Structure] = {2: "diagonal", 3: "dense", 4: "block"}
    return structures[element.dim()]


def _finite(values: Tensor) -> Tensor:
    return torch.where(values.isfinite(), values, 0)


def _no_nan(errors: Tensor) -> Tensor:
    return errors.nan_to_num(nan=torch.inf, posinf=torch.inf)
