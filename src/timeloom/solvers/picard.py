"""Picard and Jacobi: fixed-point iterations on all states at once, without derivatives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from timeloom.cells.base import Cell
from timeloom.solve.linearize import Linearization
from timeloom.solvers.stepwise import Stepwise


@dataclass(frozen=True)
class Picard(Stepwise):
    """A jump is carried on unchanged: `h[t] ← h[0] + Σ (f(h[s-1], x[s]) − h[s-1])`, the sum over all s ≤ t.

    This is Picard's iteration for the differential equation of which the recurrence is an Euler step. It suits networks
    whose steps change the state little, and ignores the forgetting of a gated network.
    """

    name: ClassVar[str] = "picard"

    def linearization(self, cell: Cell) -> Linearization:
        return Linearization("identity")


@dataclass(frozen=True)
class Jacobi(Stepwise):
    """A jump is not carried on: `h[t] ← f(h[t-1], x[t])` for all t at once. Corrections move one step per sweep."""

    name: ClassVar[str] = "jacobi"

    def linearization(self, cell: Cell) -> Linearization:
        return Linearization("zero")
