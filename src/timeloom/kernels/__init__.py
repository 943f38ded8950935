"""Sweeps: run all chunks of a recurrence side by side, forward or adjoint. One signature, one truth, fast twins."""

from timeloom.kernels.cpu.sweeper import CPUSweeper
from timeloom.kernels.gpu.sweeper import GPUSweeper
from timeloom.kernels.gpu.wide import WideSweeper
from timeloom.kernels.reference import AdjointData, ReferenceSweeper
from timeloom.problem import Recurrence


def sweeper(problem: Recurrence) -> ReferenceSweeper:
    """The fastest sweeper that can run this problem."""
    kind = next(kind for kind in (CPUSweeper, GPUSweeper, WideSweeper, ReferenceSweeper) if kind.supports(problem))
    return kind(problem)


__all__ = ["AdjointData", "CPUSweeper", "GPUSweeper", "ReferenceSweeper", "WideSweeper", "sweeper"]
