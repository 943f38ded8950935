"""When torch's own layer is the better answer, and how it is called."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from timeloom.report import SolveReport
from timeloom.solvers.auto import Auto
from timeloom.solvers.base import Solver
from timeloom.solvers.sequential import Sequential

if TYPE_CHECKING:
    from timeloom.nn.base import Recurrent

HALF = (torch.float16, torch.bfloat16)
SHORTEST = 8
"""Sequences shorter than this leave nothing to run in parallel."""


def why(module: Recurrent, solver: Solver, input: Tensor | PackedSequence) -> str | None:
    """Why torch's own layer is to run, or None where timeloom's sweeps are."""
    data = input.data if isinstance(input, PackedSequence) else input
    if isinstance(solver, Sequential):
        return "sequential, as asked for"
    if data.numel() == 0 or data.dim() not in (2, 3):
        return "nothing to solve"
    if data.device.type not in ("cpu", "cuda"):
        return f"no sweeps for {data.device.type}"
    if not isinstance(solver, Auto):
        return None
    steps = len(input.batch_sizes) if isinstance(input, PackedSequence) else _steps(module, data)
    if steps < SHORTEST:
        return f"auto: {steps} steps leave nothing to run in parallel"
    return None


def call(module: Recurrent, input: Tensor | PackedSequence, hx: Any) -> Any:
    """Torch's forward pass on the module's present weights (parametrizations included)."""
    module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]
    base: Any = next(cls for cls in (nn.GRU, nn.LSTM, nn.RNN) if isinstance(module, cls))
    return base.forward(module, input, hx)


def report(module: Recurrent, input: Tensor | PackedSequence, reason: str) -> SolveReport:
    steps = len(input.batch_sizes) if isinstance(input, PackedSequence) else _steps(module, input)
    return SolveReport(
        solver="sequential",
        chunk=steps,
        iterations=1,
        residuals=(),
        tolerance=0.0,
        converged=True,
        fell_back=False,
        contraction=None,
        seconds=0.0,
        reason=f"{reason}; run by torch's own layer",
    )


def dtypes(module: Recurrent, x: Tensor) -> tuple[torch.dtype, torch.dtype]:
    """The dtype to solve in and the dtype torch would return: half precision is solved in float32 and rounded once."""
    returned = x.dtype
    if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
        returned = torch.get_autocast_dtype(x.device.type)
    return (torch.float32 if returned in HALF else returned), returned


def _steps(module: Recurrent, data: Tensor) -> int:
    if data.dim() != 3:
        return len(data)
    return data.shape[1] if module.batch_first else data.shape[0]
