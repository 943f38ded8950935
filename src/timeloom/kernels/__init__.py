"""Sweepers, which run all chunks of a recurrence side by side, forward or adjoint: a reference, and fast kernels."""

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
    """The class of the fastest sweeper that can run this problem."""
    return next(kind for kind in KINDS if kind.supports(problem))


def with_tape(problem: Recurrence) -> Recurrence:
    """The problem with a tape, if its sweeper saves anything for the backward pass."""
    width = sweeper_kind(problem).tape_width(problem)
    return replace(problem, tape=empty(problem.steps, problem.batch, width, like=problem.initial)) if width else problem


def in_compiled_code(problem: Recurrence) -> bool:
    """Whether sweeps of this problem run compiled code on a CPU, where a step costs little beside its arithmetic."""
    return CPUSweeper.supports(problem) or FusedSweeper.supports(problem)


def may_be_compiled(problem: Recurrence) -> bool:
    """Whether sweeps of this problem run compiled code on a CPU, or will once kernels are built.

    All ranks get the same answer, though some may have built their kernels and others not yet.
    """
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
