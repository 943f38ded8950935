"""Steps of Newton's method on all states of a recurrence at once, as kernels offer them to `solve.newton`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

States = list[Tensor]
"""One `(T + 1, B, part)` for each part of the state."""


class Maps(NamedTuple):
    """`v → A v + b` of every link, in marching order: `(C, B, S, S)` and `(C, B, S)`."""

    matrices: Tensor
    sources: Tensor


class NewtonSteps(ABC):
    """A problem of sequences of one length, without resets, cut into `links` chunks. `solve.newton_reference` says what
    each of these computes; kernels do the same without Jacobians in memory.
    """

    def __init__(self, steps: int, chunk: int) -> None:
        self.chunk = min(chunk, max(steps, 1))
        self.links = -(-steps // self.chunk)

    @abstractmethod
    def compose(self, states: States | None, residual: Tensor) -> Maps:
        """The maps of δ over all chunks; `residual` `()` receives the largest relative one of these states. None: the
        initial state everywhere.
        """

    @abstractmethod
    def chain(self, maps: Maps, first: Tensor | None = None) -> Tensor:
        """What each link starts from, `(C, B, S)`, where the first one starts from `first` `(B, S)` or zero."""

    @abstractmethod
    def correct(self, maps: Maps, starts: Tensor, ends: Tensor) -> Tensor:
        """Starts `(C, B, S)` of a linear chain, moved by what they lack of what the links before them ended with."""

    @abstractmethod
    def apply(self, states: States | None, starts: Tensor) -> States:
        """States moved by δ, of which `starts` are those before every chunk; inside the box, if the cell has one."""

    @abstractmethod
    def finish(self, states: States | None, residual: Tensor) -> States:
        """Every step evaluated once more: what follows these states, and their residual."""

    @abstractmethod
    def compose_adjoint(self, states: States, incoming: Tensor | None) -> Maps:
        """The maps of gradients over all chunks, last one first; `incoming` `(T, B, n)` or nothing."""


def newton_steps(kernels: NewtonSteps, steps: int, like: Tensor) -> tuple[States, Tensor]:
    """What follows the states that so many steps from the initial one have led to, and the residuals `(steps + 1,)`
    before each of them and behind the last, on the device of `like`.
    """
    worst = torch.zeros(steps + 1, dtype=like.dtype, device=like.device)
    states: States | None = None
    for done in range(steps):
        states = kernels.apply(states, kernels.chain(kernels.compose(states, worst[done])))
    return kernels.finish(states, worst[steps]), worst
