"""What all ranks have told of their boundaries, and what follows from it, on every rank the same: errors and moves."""

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
    """What all ranks have said, in marching order: starts, ends `(R, B, S)` and errors `(R, B)`."""

    ends: Tensor
    prefix: Tensor | None
    """Largest values, part by part, on the ranks before, `(R, B, P)`."""
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


def errors_of(
    chain: Chain, jump: Tensor, errors: Tensor, starts: Tensor, ends: Tensor, sizes: list[Tensor] | None
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Scale of the ranks before (None where values do not fade), errors inside and at the start of every rank;
    every rank computes the same.

    sizes: the largest values and jumps of each rank, part by part, where values fade. Its scale is then at least
    that of the ranks before: either way of measuring its jumps is a bound.
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
    """Moves of all ranks' starts: `δ[r] = P[r−1] δ[r−1] + pushed[r−1] + jump[r]`."""
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
    """Of an element `(B, ...)`."""
    structures: dict[int, Structure] = {2: "diagonal", 3: "dense", 4: "block"}
    return structures[element.dim()]


def _finite(values: Tensor) -> Tensor:
    return torch.where(values.isfinite(), values, 0)


def _no_nan(errors: Tensor) -> Tensor:
    return errors.nan_to_num(nan=torch.inf, posinf=torch.inf)
