"""Sweeps: run all chunks of a recurrence side by side, forward or adjoint. One signature, one truth, fast twins."""

from timeloom.problem import Recurrence
from timeloom.sweep.cpu import CPUSweeper
from timeloom.sweep.reference import ReferenceSweeper


def sweeper(problem: Recurrence) -> ReferenceSweeper:
    """The fastest sweeper that can run this problem."""
    return CPUSweeper(problem) if CPUSweeper.supports(problem) else ReferenceSweeper(problem)


__all__ = ["CPUSweeper", "ReferenceSweeper", "sweeper"]
