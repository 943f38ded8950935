"""ELK and quasi-ELK: Newton's method on all states at once, damped if it overshoots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from timeloom.cells.base import Cell
from timeloom.solve.linearize import Linearization
from timeloom.solvers.newton import Structure, check_structure, quasi_elements
from timeloom.solvers.stepwise import Stepwise


@dataclass(frozen=True)
class ELK(Stepwise):
    """DEER with the damping of Levenberg and Marquardt, as a parallel Kalman filter (Gonzalez et al. 2024).

    The filter treats the swept states as observations of the states that it estimates. With much damping this is
    Jacobi, without damping it is DEER, and in either case every sweep makes at least one more state exact. The damping
    adapts for every sequence of the batch: none at first, ten times as much after a sweep that did not help, a tenth
    after one that did. If Newton's method converges directly, this is DEER, sweep by sweep.
    """

    name: ClassVar[str] = "elk"

    def linearization(self, cell: Cell) -> Linearization:
        return Linearization("dense", damped=True)


@dataclass(frozen=True)
class QuasiELK(Stepwise):
    """Quasi-DEER with the damping of ELK: the same filter for every unit separately, n memory and work for a step.

    structure, probes: as for `QuasiDEER`.
    """

    name: ClassVar[str] = "quasi-elk"
    structure: Structure = "auto"
    probes: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_structure(self.structure, self.probes)

    def linearization(self, cell: Cell) -> Linearization:
        return Linearization(quasi_elements(self.structure, self.probes, cell), self.probes, damped=True)
