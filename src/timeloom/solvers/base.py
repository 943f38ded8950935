"""What all solvers share: their options, the default tolerances, and how a name or an object becomes a solver."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import torch

from timeloom.options import check_choice, check_count, check_number
from timeloom.problem import Recurrence
from timeloom.solve.plan import Adjoint, OnDivergence
from timeloom.torch_state import tf32

TOLERANCE = {torch.float64: 2e-15, torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}
"""Default relative tolerance by dtype: the largest that keeps the error within twice that of torch's own layer."""
ADJOINT_TOLERANCE = TOLERANCE | {torch.float32: 2.5e-7}
"""The same for the backward pass, where jumps of one sign add up in the gradients of the weights."""

TF32_TOLERANCE = 2e-4
"""The same on a GPU where products are rounded to tf32: for cells that cuDNN has, where torch lets it do so, as by
default; for others, where torch's own products are. Two runs that begin apart then stay some 4e-5 apart, and cuDNN's
error is near 6e-4.
"""
UNGATED_TF32_TOLERANCE, UNGATED_TF32_ADJOINT_TOLERANCE = 5e-4, 1e-3
"""The same for a cell without gates, forward and backward: every step rounds all of the state, by up to 5e-4, so that
two runs stay up to 3e-4 apart, and their gradients 8e-4 where these are small; cuDNN's error is near 1e-3.
"""


@dataclass(frozen=True)
class Solver:
    """Options of every solver.

    adjoint: how the backward pass solves for the gradients: the same way as the forward pass, by a scan over the
        transposed Jacobians of all steps (BPPSA), by multigrid, or sequentially.
    tol: largest relative jump between chunks to accept; None takes the dtype's default.
    max_iters: sweeps after which to give up; None leaves it to the solver.
    adjoint_levels: with `adjoint="scan"`, levels of the scan's tree that multiply matrices; the roots above them are
        run one after the other. None chooses: no level on a CPU, where matrix-vector products in order are fastest (a
        compiled sweep does them without forming Jacobians), all levels on a GPU.
    on_divergence: what to do when the sweeps do not converge: finish sequentially after the exact prefix, raise
        `ConvergenceError`, or return what there is (the report then says `converged=False`).
    """

    adjoint: Adjoint = "same"
    tol: float | None = None
    max_iters: int | None = None
    on_divergence: OnDivergence = "sequential"
    adjoint_levels: int | None = None

    def __post_init__(self) -> None:
        check_choice("adjoint", self.adjoint, get_args(Adjoint))
        check_choice("on_divergence", self.on_divergence, get_args(OnDivergence))
        check_number("tol", self.tol)
        check_count("max_iters", self.max_iters)
        check_count("adjoint_levels", self.adjoint_levels, least=0)
        if self.adjoint_levels is not None and self.adjoint != "scan":
            raise ValueError(f"adjoint_levels goes with adjoint='scan'; adjoint is {self.adjoint!r}")

    def tolerance(self, problem: Recurrence) -> float:
        """The tolerance for the states of a problem."""
        return self._tolerance(problem, TOLERANCE, UNGATED_TF32_TOLERANCE)

    def adjoint_tolerance(self, problem: Recurrence) -> float:
        """The tolerance for the gradients of a problem."""
        return self._tolerance(problem, ADJOINT_TOLERANCE, UNGATED_TF32_ADJOINT_TOLERANCE)

    def _tolerance(self, problem: Recurrence, defaults: dict[torch.dtype, float], ungated: float) -> float:
        if self.tol is not None:
            return self.tol
        rounded = problem.rounded
        if rounded.device.type == "cuda" and rounded.dtype == torch.float32:
            in_tf32 = tf32.cudnn_rounds() if problem.cell.in_cudnn else tf32.matmul_rounds()
            if in_tf32:
                return TF32_TOLERANCE if problem.cell.gated else ungated
            return defaults[torch.float32]
        return defaults[rounded.dtype]
