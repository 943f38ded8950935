"""Sweeps: run all chunks of a recurrence side by side, forward or adjoint. One signature, one truth, fast twins."""

from timeloom.problem import Recurrence
from timeloom.sweep.cpu import CPUSweeper
from timeloom.sweep.gpu import GPUSweeper
from timeloom.sweep.reference import AdjointData, ReferenceSweeper
from timeloom.sweep.wide import WideSweeper


def sweeper(problem: Recurrence) -> ReferenceSweeper:
    """The fastest sweeper that can run this problem."""
    kind = next(kind for kind in (CPUSweeper, GPUSweeper, WideSweeper, ReferenceSweeper) if kind.supports(problem))
    return kind(problem)


__all__ = ["AdjointData", "CPUSweeper", "GPUSweeper", "ReferenceSweeper", "WideSweeper", "sweeper"]
