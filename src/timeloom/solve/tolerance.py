"""Default tolerances of solutions, by dtype, device, cell and direction."""

from __future__ import annotations

import torch

from timeloom.problem import Recurrence
from timeloom.solve.plan import Direction
from timeloom.torch_state import tf32

TOLERANCE = {torch.float64: 2e-15, torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}
"""Default relative tolerance by dtype: the largest that keeps the error within twice that of torch's own layer."""
ONE_SIGN = 0.25
"""Share of the tolerance to aim for if jumps of one sign add up, as they do in the gradients of weights."""
ADJOINT_TOLERANCE = TOLERANCE | {torch.float32: ONE_SIGN * TOLERANCE[torch.float32]}
"""Default tolerance of the backward pass. In float64 that share would be below rounding: there, one more sweep or
cycle is made instead."""

TF32_TOLERANCE = 2e-4
"""Default tolerance for a user's cell on a GPU if torch's own products are set to round to tf32: runs from different
starts then stay some 4e-5 apart. The kernels of GRU, LSTM and RNN never round to tf32.
"""
UNGATED_TF32_TOLERANCE, UNGATED_TF32_ADJOINT_TOLERANCE = 5e-4, 1e-3
"""The same for a cell without gates, forward and backward: every step rounds all of the state, by up to 5e-4, so that
two runs stay up to 3e-4 apart, and small gradients up to 8e-4; cuDNN's error is near 1e-3.
"""


OWN_ADJOINT_TOLERANCE = 5e-7
"""Default tolerance of the backward pass in float32 for a user's cell, whose gradients may be rounded more than a
GRU's: two runs through a LayerNorm stay 3e-7 apart, and gradients by a plain loop are off by 5e-7 and more."""


def default_tolerance(problem: Recurrence, direction: Direction) -> float:
    """Largest relative jump between chunks to accept."""
    rounded, forward = problem.rounded, direction == "forward"
    if rounded.device.type == "cuda" and rounded.dtype == torch.float32:
        in_tf32 = not problem.cell.in_cudnn and tf32.matmul_rounds()
        if in_tf32 and problem.cell.gated:
            return TF32_TOLERANCE
        if in_tf32:
            return UNGATED_TF32_TOLERANCE if forward else UNGATED_TF32_ADJOINT_TOLERANCE
    if not forward and rounded.dtype == torch.float32 and problem.cell.whole_state_out:
        return OWN_ADJOINT_TOLERANCE
    return (TOLERANCE if forward else ADJOINT_TOLERANCE)[rounded.dtype]
