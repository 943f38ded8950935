"""What all ranks must know before they solve together: the length of each slice, and that the problem is the same."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from timeloom.auto.layer_experience import LayerExperience
from timeloom.distributed.faults import RankError
from timeloom.distributed.group import TimeGroup
from timeloom.solvers.base import Solver


@dataclass(frozen=True)
class Span:
    """A sequence over ranks, with the number of steps that each holds, in time order."""

    group: TimeGroup
    sizes: tuple[int, ...]
    lengths: Tensor | None
    """Lengths `(B,)` of whole sequences, on the CPU."""

    @property
    def steps(self) -> int:
        return sum(self.sizes)

    def lengths_on(self, rank: int) -> Tensor | None:
        """The number of steps of each sequence on a rank, `(B,)`; None if all sequences have the same length."""
        if self.lengths is None:
            return None
        return (self.lengths - sum(self.sizes[:rank])).clamp(0, self.sizes[rank])

    def following(self, first: Tensor) -> Tensor:
        """The next rank's `first`; zeros on the last rank."""
        gathered = self.group.gather(first.to(torch.uint8)).to(first.dtype)
        last = self.group.rank == self.group.size - 1
        return torch.zeros_like(first) if last else gathered[self.group.rank + 1]

    def line(self, backwards: bool, batch: int, tag: int) -> Line:
        """The ranks in marching order."""
        alive = torch.ones(self.group.size, batch, dtype=torch.bool, device="cpu")
        if self.lengths is not None:
            begins = torch.tensor([sum(self.sizes[:rank]) for rank in range(self.group.size)], device="cpu")
            alive = self.lengths > begins[:, None]
        return Line(self.group, backwards, alive.flip(0) if backwards else alive, tag)


@dataclass(frozen=True)
class Line:
    """The ranks in marching order: each starts from the end of the one before.

    alive: `(R, B)`, whether a rank holds steps of a sequence; the ranks that do are consecutive.
    tag: identifies the solve within a call.
    """

    group: TimeGroup
    backwards: bool
    alive: Tensor
    tag: int

    @property
    def place(self) -> int:
        """This rank's index in line."""
        return self._at(self.group.rank)

    @property
    def goes_on(self) -> bool:
        """Whether there is a rank after this one in line."""
        return self.place + 1 < self.group.size

    def _at(self, place: int) -> int:
        """The index in line of a rank in time order, and vice versa."""
        return self.group.size - 1 - place if self.backwards else place

    @property
    def heads(self) -> Tensor:
        """`(R, B)`, whether a rank is the first that holds steps of a sequence, so that its start is known."""
        return self.alive & (self.alive.cumsum(0) == 1)

    @property
    def joints(self) -> Tensor:
        """`(R, B)`, whether a sequence comes to a rank from the one before it."""
        return self.alive & ~self.heads

    def gather(self, tensor: Tensor) -> Tensor:
        """Every rank's tensor in marching order, `(R, ...)`."""
        gathered = self.group.gather(tensor)
        return gathered.flip(0) if self.backwards else gathered

    def send(self, tensor: Tensor) -> None:
        """Send to the next rank in line."""
        self.group.send(tensor, self._at(self.place + 1))

    def receive(self, like: Tensor) -> Tensor:
        """Receive from the previous rank in line."""
        return self.group.receive(like, self._at(self.place - 1))

    def last(self, values: Tensor, otherwise: Tensor) -> Tensor:
        """From `values` `(R, B, ·)` in marching order, those of the last rank that holds steps of each sequence."""
        size = self.alive.shape[0]
        at = (size - 1 - self.alive.flip(0).to(torch.uint8).argmax(0)).to(values.device)
        found = values[at, torch.arange(len(at), device=values.device)]
        return torch.where(self.alive.any(0).to(values.device).unsqueeze(-1), found, otherwise)


def agree(
    group: TimeGroup, x: Tensor, lengths: Tensor | None, resets: Tensor | None, network: str, taped: bool,
    solver: Solver, known: dict[int, LayerExperience],
) -> Span:  # fmt: skip
    """Exchange how many steps of x `(T_local, B, ...)` each rank holds; raises on all ranks if their calls differ.

    lengths: of the whole sequences, `(B,)`. network: a description of the network. taped: whether a backward pass may
    follow.
    """
    facts: dict[str, int | str] = {
        "the batch size": x.shape[1],
        "the input's size": math.prod(x.shape[2:]),
        "the input's dtype": str(x.dtype),
        "lengths": "none" if lengths is None else str(lengths.tolist()),
        "whether there are resets": "yes" if resets is not None else "no",
        "whether gradients are wanted": "yes" if taped else "no",
        "the network": network,
        "the solver": repr(solver),
    }
    learned = zlib.crc32(str(sorted(known.items())).encode())
    sizes, seen = zip(*same_on_all_ranks(group, facts, x.device, len(x), learned), strict=True)
    if len(set(seen)) > 1:
        known.clear()  # the ranks have seen different calls: all learn anew
    if min(sizes) < 1:
        raise RankError(
            f"rank {sizes.index(min(sizes))} has no time steps (the ranks have {list(sizes)}): each needs one at "
            "least; use fewer time ranks"
        )
    return Span(group, sizes, lengths)


def same_on_all_ranks(
    group: TimeGroup, facts: dict[str, int | str], device: torch.device, *own: int
) -> list[tuple[int, ...]]:
    """Raise on all ranks if a fact differs on one of them, with the fact's name; returns each rank's `own` numbers."""
    numbers = [value if isinstance(value, int) else zlib.crc32(value.encode()) for value in facts.values()]
    gathered = group.gather(torch.tensor([*own, *numbers], device=device)).cpu()
    for (name, value), column in zip(facts.items(), gathered[:, len(own) :].unbind(1), strict=True):
        found = column.tolist()
        if len(set(found)) > 1:
            odd = next(rank for rank, number in enumerate(found) if number != found[0])
            shown = f"{found[0]} on rank 0, {found[odd]} on rank {odd}" if isinstance(value, int) else f"{value} here"
            raise RankError(f"the time ranks do not agree on {name}: rank {odd} differs from rank 0 ({shown})")
    return [tuple(row) for row in gathered[:, : len(own)].tolist()]
