"""Solvers: frozen dataclasses of options; one file each."""

from timeloom.solvers.auto import Auto
from timeloom.solvers.base import Solver
from timeloom.solvers.mgrit import MGRIT
from timeloom.solvers.sequential import Sequential
from timeloom.solvers.shooting import Shooting

__all__ = ["MGRIT", "Auto", "Sequential", "Shooting", "Solver"]
