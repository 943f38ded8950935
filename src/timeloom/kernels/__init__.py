"""Sweeps: run all chunks of a recurrence side by side, forward or adjoint. One signature, one truth, fast twins."""

from dataclasses import replace

from timeloom.buffers import empty
from timeloom.kernels.cpu import build
from timeloom.kernels.cpu.fused import FusedSweeper
from timeloom.kernels.cpu.sweeper import CPUSweeper
from timeloom.kernels.cuda.fused import FusedCUDASweeper
from timeloom.kernels.cuda.sweeper import CUDASweeper
from timeloom.kernels.reference import AdjointData, ReferenceSweeper
from timeloom.problem import Recurrence

KINDS: tuple[type[ReferenceSweeper], ...] = (CPUSweeper, FusedSweeper, CUDASweeper, FusedCUDASweeper, ReferenceSweeper)


def sweeper(problem: Recurrence) -> ReferenceSweeper:
    """The fastest sweeper that can run this problem."""
    return sweeper_kind(problem)(problem)


def sweeper_kind(problem: Recurrence) -> type[ReferenceSweeper]:
    """Its class."""
    return next(kind for kind in KINDS if kind.supports(problem))


def with_tape(problem: Recurrence) -> Recurrence:
    """The problem with room for what its sweeps keep for the backward pass, where they keep something."""
    width = sweeper_kind(problem).tape_width(problem)
    return replace(problem, tape=empty(problem.steps, problem.batch, width, like=problem.initial)) if width else problem


def in_compiled_code(problem: Recurrence) -> bool:
    """Whether sweeps of this problem are compiled code on a CPU: a step then costs little beside its arithmetic."""
    return CPUSweeper.supports(problem) or FusedSweeper.supports(problem)


def may_be_compiled(problem: Recurrence) -> bool:
    """Whether they are or will be: the same on all ranks, of which some may have made kernels and others not yet."""
    makes = problem.cell.generated and problem.u.device.type == "cpu" and build.unavailable() is None
    return makes or in_compiled_code(problem)


__all__ = [
    "AdjointData",
    "CPUSweeper",
    "CUDASweeper",
    "FusedCUDASweeper",
    "FusedSweeper",
    "ReferenceSweeper",
    "in_compiled_code",
    "may_be_compiled",
    "sweeper",
    "sweeper_kind",
    "with_tape",
]
