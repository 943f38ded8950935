"""Sweeps: run all chunks of a recurrence side by side, forward or adjoint. One signature, one truth, fast twins."""

from timeloom.kernels.cpu.fused import FusedSweeper
from timeloom.kernels.cpu.sweeper import CPUSweeper
from timeloom.kernels.cuda.sweeper import CUDASweeper
from timeloom.kernels.reference import AdjointData, ReferenceSweeper
from timeloom.problem import Recurrence


def sweeper(problem: Recurrence) -> ReferenceSweeper:
    """The fastest sweeper that can run this problem."""
    kinds = (CPUSweeper, FusedSweeper, CUDASweeper, ReferenceSweeper)
    return next(kind for kind in kinds if kind.supports(problem))(problem)


def in_compiled_code(problem: Recurrence) -> bool:
    """Whether sweeps of this problem are compiled code on a CPU: a step then costs little beside its arithmetic."""
    return CPUSweeper.supports(problem) or FusedSweeper.supports(problem)


__all__ = [
    "AdjointData",
    "CPUSweeper",
    "CUDASweeper",
    "FusedSweeper",
    "ReferenceSweeper",
    "in_compiled_code",
    "sweeper",
]
