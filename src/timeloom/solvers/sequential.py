"""One step after the other."""

from __future__ import annotations

from dataclasses import dataclass

from timeloom.solvers.base import Solver


@dataclass(frozen=True)
class Sequential(Solver):
    """The plain recurrence: torch's own layer (cuDNN, oneDNN, ATen) in the modules, a loop over steps in `unroll`.

    The truth that the others are held against. Its options have nothing to do: there is nothing to converge.
    """
