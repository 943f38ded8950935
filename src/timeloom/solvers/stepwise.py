"""What solvers over single steps share: all states are unknowns, corrected by one linear recurrence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from timeloom.cells.base import Cell
from timeloom.solve.linearize import Linearization
from timeloom.solvers.base import Solver


@dataclass(frozen=True)
class Stepwise(Solver):
    """One step to a chunk: evaluate all steps at once, and let a linear recurrence carry the jumps between them.

    The residual is that of the plain recurrence whatever the method, so all of them end at the same states; they
    differ in what carries a jump on, and so in how many sweeps they take. If `max_iters` is given it is the only limit;
    otherwise sweeps also end where 20 of them did not halve the residual. The adjoint is linear: `adjoint="same"`
    solves it with the full Jacobian in one correction, so gradients are exact in every method.
    """

    name: ClassVar[str] = ""

    def linearization(self, cell: Cell) -> Linearization:
        """What stands for the Jacobian of a step of this cell."""
        raise NotImplementedError
