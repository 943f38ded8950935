"""Which rank holds which steps, and sums over the steps of all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from timeloom.distributed.group import TimeGroup
from timeloom.distributed.mesh import group_of


def slice_of(steps: int, mesh: DeviceMesh) -> slice:
    """This rank's slice of a sequence of `steps` steps, for a Dataset that reads no more than it needs.

    Slices differ by at most one step; the longer ones come first.
    """
    group = group_of(mesh)
    if steps < group.size:
        raise ValueError(f"{steps} steps cannot be split over {group.size} time ranks: every rank needs one at least")
    begin, end = (rank * (steps // group.size) + min(rank, steps % group.size) for rank in (group.rank, group.rank + 1))
    return slice(begin, end)


def shard(tensor: Tensor, mesh: DeviceMesh, dim: int = 0) -> Tensor:
    """This rank's steps of a whole sequence, as a copy; `dim` is the time dimension."""
    local = slice_of(tensor.shape[dim], mesh)
    return tensor.narrow(dim, local.start, local.stop - local.start).clone()


def sum_over_time(value: Tensor, mesh: DeviceMesh) -> Tensor:
    """The sum of every time rank's `value`, the same on all of them; differentiable."""
    total: Tensor = _Sum.apply(value, group_of(mesh))
    return total


def mean_over_time(values: Tensor, mesh: DeviceMesh, dim: int = 0) -> Tensor:
    """The mean over all steps of the sequence, the same on all time ranks; differentiable.

    values: this rank's steps, `(T_local, ...)`, reduced to `(...)`; for a loss, also take the mean over the rest:
        `.mean()`.
    """
    group = group_of(mesh)
    steps = float(group.sum(torch.tensor(float(values.shape[dim]), dtype=torch.float64, device=values.device)))
    return sum_over_time(values.sum(dim), mesh) / steps


def last_over_time(values: Tensor, mesh: DeviceMesh, dim: int = 0) -> Tensor:
    """The last step of the sequence, `(T_local, ...)` to `(...)`, the same on all time ranks; differentiable."""
    group = group_of(mesh)
    elsewhere = torch.tensor(group.rank < group.size - 1, device=values.device)
    return sum_over_time(values.select(dim, -1).masked_fill(elsewhere, 0), mesh)


class _Sum(torch.autograd.Function):
    """The sum over ranks; backward, too, gradients are summed, since the total loss is the sum of the ranks' losses."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: TimeGroup) -> Tensor:
        ctx.group = group
        return group.sum(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.group.sum(grads[0]), None
