"""Solvers: frozen dataclasses of options that plan how to solve a problem; one file each, and one line here."""

from timeloom.solvers.auto import Auto
from timeloom.solvers.base import Solver, register
from timeloom.solvers.elk import ELK, QuasiELK
from timeloom.solvers.mgrit import MGRIT
from timeloom.solvers.newton import DEER, QuasiDEER
from timeloom.solvers.picard import Jacobi, Picard
from timeloom.solvers.sequential import Sequential
from timeloom.solvers.shooting import Shooting

for kind in (Auto, Sequential, Shooting, MGRIT, DEER, QuasiDEER, ELK, QuasiELK, Picard, Jacobi):
    register(kind)

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
