"""DEER and quasi-DEER: Newton's method on all states at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from timeloom.cells.base import Cell
from timeloom.options import check_choice, check_count
from timeloom.solve.linearize import Elements, Linearization, Precision
from timeloom.solvers.stepwise import Stepwise

Structure = Literal["auto", "diagonal", "block"]


@dataclass(frozen=True)
class DEER(Stepwise):
    """Newton's method (Lim et al. 2024): jumps are carried by the Jacobian of every step, `(n, n)`.

    It needs few sweeps, n² memory for each step of a window and n² (on a CPU) to n³ (on a GPU) work. Time is cut into
    windows if the Jacobians of all steps would not fit into memory; the result is the same.

    precision: `float32`, `bfloat16` or, on a GPU, `tf32` rounds Jacobians and scan; the residual stays exact, and so
        does the result, at the cost of a few more sweeps. `full` rounds nothing.
    """

    name: ClassVar[str] = "deer"
    precision: Precision = "full"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("precision", self.precision, get_args(Precision))

    def linearization(self, cell: Cell) -> Linearization:
        return Linearization("dense", precision=self.precision)


@dataclass(frozen=True)
class QuasiDEER(DEER):
    """Newton's method with the diagonal of every step's Jacobian (Gonzalez et al. 2024): n memory and work for a step.

    structure: `diagonal`; `block`, for an LSTM: the 2 × 2 blocks of h and c of each unit; `auto`: block if the cell has
        such.
    probes: number of random sign vectors that estimate the diagonal by Hutchinson's method, with one product Jᵀv each;
        None computes it exactly, which costs n such products for a cell given as a function.
    """

    name: ClassVar[str] = "quasi-deer"
    structure: Structure = "auto"
    probes: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_structure(self.structure, self.probes)

    def linearization(self, cell: Cell) -> Linearization:
        return Linearization(quasi_elements(self.structure, self.probes, cell), self.probes, precision=self.precision)


def check_structure(structure: str, probes: int | None) -> None:
    check_choice("structure", structure, get_args(Structure))
    check_count("probes", probes)
    if probes is not None and structure == "block":
        raise ValueError("probes estimate a diagonal: they do not go with structure='block'; use 'diagonal' or 'auto'")


def quasi_elements(structure: Structure, probes: int | None, cell: Cell) -> Elements:
    """The part of this cell's Jacobian that a quasi method uses."""
    if structure == "block" and not cell.has_blocks:
        raise ValueError(
            f"structure='block' is for cells with one h and one c for each unit, as the LSTM without a projection; the "
            f"state here has parts of widths {cell.parts}: use 'diagonal' or 'auto'"
        )
    return "block" if structure != "diagonal" and probes is None and cell.has_blocks else "diagonal"
