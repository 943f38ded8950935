"""Sweeps: run all chunks of a recurrence side by side, forward or adjoint. One signature, one truth, fast twins."""

from timeloom.kernels.cpu.sweeper import CPUSweeper
from timeloom.kernels.cuda.sweeper import CUDASweeper
from timeloom.kernels.gpu.sweeper import GPUSweeper
from timeloom.kernels.gpu.wide import WideSweeper
from timeloom.kernels.reference import AdjointData, ReferenceSweeper
from timeloom.problem import Recurrence


def sweeper(problem: Recurrence) -> ReferenceSweeper:
    """The fastest sweeper that can run this problem."""
    kinds = (CPUSweeper, CUDASweeper, GPUSweeper, WideSweeper, ReferenceSweeper)
    return next(kind for kind in kinds if kind.supports(problem))(problem)


__all__ = ["AdjointData", "CPUSweeper", "CUDASweeper", "GPUSweeper", "ReferenceSweeper", "WideSweeper", "sweeper"]
