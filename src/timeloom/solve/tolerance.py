"""How precise a solution is to be, unless the user says: by dtype, device, cell and direction."""

from __future__ import annotations

import torch

from timeloom.problem import Recurrence
from timeloom.solve.plan import Direction
from timeloom.torch_state import tf32

TOLERANCE = {torch.float64: 2e-15, torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}
"""Default relative tolerance by dtype: the largest that keeps the error within twice that of torch's own layer."""
ONE_SIGN = 0.25
"""Share of a tolerance that jumps are to stay below where those of one sign add up, as in the gradients of weights."""
ADJOINT_TOLERANCE = TOLERANCE | {torch.float32: ONE_SIGN * TOLERANCE[torch.float32]}
"""The same for the backward pass. In float64 that would be rounding: cycles are polished once for it."""

TF32_TOLERANCE = 2e-4
"""The same for a user's cell on a GPU where torch's own products are rounded to tf32, not the default: two runs that
begin apart then stay some 4e-5 apart. The kernels of GRU, LSTM and RNN never round so.
"""
UNGATED_TF32_TOLERANCE, UNGATED_TF32_ADJOINT_TOLERANCE = 5e-4, 1e-3
"""The same for a cell without gates, forward and backward: every step rounds all of the state, by up to 5e-4, so that
two runs stay up to 3e-4 apart, and their gradients 8e-4 where these are small; cuDNN's error is near 1e-3.
"""


OWN_ADJOINT_TOLERANCE = 5e-7
"""The same as the backward pass's in float32 for a user's cell, whose gradients may be rounded more than a GRU's: two
runs through a LayerNorm stay 3e-7 apart, and the gradients of its loop are off by 5e-7 and more."""


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
