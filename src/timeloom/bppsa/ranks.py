"""The independent products of a scan's level, shared by processes: each computes some and broadcasts them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from timeloom.bppsa.matrices import Dense, Matrix, Sparse, csr

Value = Tensor | Matrix
Each = Callable[[Sequence[Callable[[], Value]]], list[Value]]
"""Runs tasks that do not depend on each other, and returns the results of all."""

KINDS = ("vector", "dense", "sparse")


def alone(tasks: Sequence[Callable[[], Value]]) -> list[Value]:
    """Run all tasks here, one after the other."""
    return [task() for task in tasks]


class Shared:
    """Runs task i on rank i mod R of a process group; every rank must pass the same tasks in the same order."""

    def __init__(self, group: dist.ProcessGroup, like: Tensor) -> None:
        self.group, self.like = group, like
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.made = 0
        """Number of tasks that this rank has run."""

    def __call__(self, tasks: Sequence[Callable[[], Value]]) -> list[Value]:
        if len(tasks) == 1:  # nothing to share: its result is small, or needed by all at once
            return alone(tasks)
        mine = {i: task() for i, task in enumerate(tasks) if i % self.size == self.rank}
        self.made += len(mine)
        return [self._tell(mine.get(i), i % self.size) for i in range(len(tasks))]

    def same(self, value: Tensor) -> bool:
        """Whether all ranks have the same value, as they must if they hold the same model and batch."""
        told = value.detach().clone()
        self._send(told, 0)
        differs = (told != value.detach()).float()
        dist.all_reduce(differs, group=self.group)
        return not bool(differs)

    def _tell(self, value: Value | None, rank: int) -> Value:
        """Broadcast the value of one rank to all: first its kind and sizes, then its numbers."""
        header = torch.zeros(5, dtype=torch.int64, device=self.like.device)
        if value is not None:
            header.copy_(torch.tensor(_described(value)))
        self._send(header, rank)
        kind, batch, rows, columns, stored = header.tolist()
        if KINDS[kind] == "sparse":
            matrix = value.matrix if isinstance(value, Sparse) else None
            begins, places, numbers = (
                (matrix.crow_indices(), matrix.col_indices(), matrix.values()) if matrix is not None else (None,) * 3
            )
            parts = (
                self._tensor(begins, (rows + 1,), rank, torch.int64),
                self._tensor(places, (stored,), rank, torch.int64),
                self._tensor(numbers, (stored,), rank, self.like.dtype),
            )
            return Sparse(csr(*parts, (rows, columns)), batch)
        if KINDS[kind] == "dense":
            values = value.values if isinstance(value, Dense) else None
            return Dense(self._tensor(values, (batch, rows, columns), rank, self.like.dtype))
        vector = value if isinstance(value, Tensor) else None
        return self._tensor(vector, (batch, columns), rank, self.like.dtype)

    def _tensor(self, given: Tensor | None, shape: tuple[int, ...], rank: int, dtype: torch.dtype) -> Tensor:
        held = (
            torch.empty(shape, dtype=dtype, device=self.like.device) if given is None else given.to(dtype).contiguous()
        )
        self._send(held, rank)
        return held

    def _send(self, tensor: Tensor, rank: int) -> None:
        dist.broadcast(tensor, dist.get_global_rank(self.group, rank), group=self.group)


def _described(value: Value) -> list[int]:
    """Kind, batch, rows, columns and stored entries; those of a sparse matrix are for the whole batch."""
    if isinstance(value, Sparse):
        return [KINDS.index("sparse"), value.batch, *value.matrix.shape, value.stored]
    if isinstance(value, Dense):
        return [KINDS.index("dense"), *value.values.shape, 0]
    return [KINDS.index("vector"), len(value), 1, value.shape[1], 0]
