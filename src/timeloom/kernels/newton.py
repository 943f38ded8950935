"""Newton steps on all states of a recurrence at once: the interface of the kernels that `solve.newton` uses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

States = list[Tensor]
"""One tensor `(T + 1, B, part)` for each part of the state."""


class Maps(NamedTuple):
    """The affine maps `v → A v + b` of all links, in marching order: A `(C, B, S, S)` and b `(C, B, S)`."""

    matrices: Tensor
    sources: Tensor


class NewtonSteps(ABC):
    """Newton steps of a problem with sequences of one length and no resets, cut into `links` chunks.

    `solve.newton_reference` defines what each method computes; kernels do the same without Jacobians in memory.
    """

    def __init__(self, steps: int, chunk: int) -> None:
        self.chunk = min(chunk, max(steps, 1))
        self.links = -(-steps // self.chunk)

    @abstractmethod
    def compose(self, states: States | None, residual: Tensor) -> Maps:
        """The maps of the correction δ over all chunks; `residual` `()` receives the states' largest relative residual.

        states: None for the initial state everywhere.
        """

    @abstractmethod
    def chain(self, maps: Maps, first: Tensor | None = None) -> Tensor:
        """The value that each link starts from, `(C, B, S)`; the first starts from `first` `(B, S)`, or zero."""

    @abstractmethod
    def correct(self, maps: Maps, starts: Tensor, ends: Tensor) -> Tensor:
        """Starts `(C, B, S)` of a linear chain, corrected by the jumps from the ends of the links before them."""

    @abstractmethod
    def apply(self, states: States | None, starts: Tensor) -> States:
        """States moved by δ, given its values `starts` before every chunk; clamped to the box, if the cell has one."""

    @abstractmethod
    def finish(self, states: States | None, residual: Tensor) -> States:
        """The states that one evaluation of every step yields from these; `residual` receives their residual."""

    @abstractmethod
    def compose_adjoint(self, states: States, incoming: Tensor | None) -> Maps:
        """The maps of gradients over all chunks, last chunk first; `incoming` `(T, B, n)` or None."""


def newton_steps(kernels: NewtonSteps, steps: int, like: Tensor) -> tuple[States, Tensor]:
    """States after `steps` Newton steps from the initial state and one evaluation more, and the residuals.

    The residuals `(steps + 1,)` are those before each step and after the last, on the device of `like`.
    """
    worst = torch.zeros(steps + 1, dtype=like.dtype, device=like.device)
    states: States | None = None
    for done in range(steps):
        states = kernels.apply(states, kernels.chain(kernels.compose(states, worst[done])))
    return kernels.finish(states, worst[steps]), worst
