"""Solvers: frozen dataclasses of options; one file each."""

from timeloom.solvers.auto import Auto
from timeloom.solvers.base import Solver
from timeloom.solvers.elk import ELK, QuasiELK
from timeloom.solvers.mgrit import MGRIT
from timeloom.solvers.newton import DEER, QuasiDEER
from timeloom.solvers.picard import Jacobi, Picard
from timeloom.solvers.sequential import Sequential
from timeloom.solvers.shooting import Shooting

__all__ = [
    "DEER",
    "ELK",
    "MGRIT",
    "Auto",
    "Jacobi",
    "Picard",
    "QuasiDEER",
    "QuasiELK",
    "Sequential",
    "Shooting",
    "Solver",
]
