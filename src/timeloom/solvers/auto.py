"""`auto`, as a solver."""

from __future__ import annotations

from dataclasses import dataclass

from timeloom.solvers.base import Solver


@dataclass(frozen=True)
class Auto(Solver):
    """Sequential or shooting, the chunk length and the warm-up, chosen for each call.

    It learns from each call how fast the network forgets. A network that does not contract is run sequentially and
    looked at again after 8 calls, then 16, 32, … since training changes weights.
    """
