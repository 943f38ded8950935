"""When torch's own layer is the better answer, and how it is called."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from timeloom.auto import cudnn
from timeloom.kernels.cpu.build import unavailable
from timeloom.kernels.cpu.layer import MOST_INPUTS, MOST_UNITS
from timeloom.nn.precision import SOLVED, solved_in
from timeloom.report import SolveReport
from timeloom.solvers.auto import Auto
from timeloom.solvers.base import Solver
from timeloom.solvers.sequential import Sequential
from timeloom.torch_state.transforms import WHERE, transformed

if TYPE_CHECKING:
    from timeloom.nn.base import Recurrent

SHORTEST = {"GRU": (12, 32), "RNN": (40, 64)}
"""Steps from which compiled sweeps beat torch's layer on a CPU, with and without gradients: below, our fixed cost per
call exceeds torch's whole run."""
SHORTEST_LSTM = ((4096, 64), (256, 256), (0, 512))
"""The same for an LSTM with gradients, by the units of all sequences together: oneDNN's has a small fixed cost."""
SHORTEST_LSTM_FORWARD = 1024
"""The same without gradients."""
SHORTEST_IN_TORCH = 2048
"""The same for sweeps in plain torch operations (float64, a projected LSTM, no compiler)."""
LSTM_BATCH = 8
"""Batch from which oneDNN's fused LSTM fills a CPU by itself."""
LSTM_HIDDEN = 256
"""Hidden size beyond which it does so with a single sequence."""


def obstacle(data: Tensor) -> str | None:
    """What timeloom's sweeps cannot run on or inside of, or None."""
    if data.device.type not in ("cpu", "cuda"):
        return f"no sweeps on {data.device.type}"
    if data.dtype not in SOLVED:
        return f"no sweeps for {data.dtype}"
    if type(data) not in (Tensor, nn.Parameter) or data.is_nested or data.layout != torch.strided:
        return f"no sweeps for a {type(data).__name__} of layout {data.layout}"
    if torch._C._get_tracing_state() is not None:
        return "no sweeps inside torch.jit.trace"
    if transformed():
        return f"no sweeps {WHERE}"
    return None


def why(module: Recurrent, solver: Solver, input: Tensor | PackedSequence) -> str | None:
    """Why torch's own layer is to run, or None where timeloom's sweeps are."""
    data = input.data if isinstance(input, PackedSequence) else input
    if not module.has_torch_twin:
        return None
    if isinstance(solver, Sequential):
        return "sequential, as asked for"
    if data.numel() == 0 or data.dim() not in (2, 3):
        return "nothing to solve"
    if not isinstance(solver, Auto):
        return None
    steps, batch = size(module, input)
    return _why_faster(module, data, steps, batch)


def _why_faster(module: Recurrent, data: Tensor, steps: int, batch: int) -> str | None:
    """Why torch's own layer is the faster one, or None."""
    if data.device.type == "cuda":
        return cudnn.why(module, data, steps, batch)
    return _why_on_cpu(module, data, steps, batch)


def why_by_size(module: Recurrent, data: Tensor, steps: int, batch: int) -> str | None:
    """Why torch's own layer is the faster one for any problem of this size, or None. `steps` may be a symbol."""
    if data.device.type == "cuda":
        return cudnn.why_by_size(module, data, steps, batch)
    return _why_on_cpu(module, data, steps, batch)


def _why_on_cpu(module: Recurrent, data: Tensor, steps: int, batch: int) -> str | None:
    missing = ""
    if solved_in(data) != torch.float32 or module.proj_size > 0:
        needed = SHORTEST_IN_TORCH
    elif unavailable() is not None:
        needed, missing = SHORTEST_IN_TORCH, f" without compiled kernels ({unavailable()})"
    elif module.mode == "LSTM" and _fills_the_cpu(module.hidden_size, module.input_size, batch):
        return f"auto: {batch} × {module.hidden_size} units fill the CPU in torch's fused LSTM"
    elif module.mode == "LSTM":
        by_units = (steps for units, steps in SHORTEST_LSTM if batch * module.hidden_size >= units)
        needed = next(by_units) if torch.is_grad_enabled() else SHORTEST_LSTM_FORWARD
    else:
        needed = SHORTEST[module.mode.split("_")[0]][0 if torch.is_grad_enabled() else 1]
    return f"auto: {steps} steps are too few to gain{missing}" if steps < needed else None


def _fills_the_cpu(hidden: int, inputs: int, batch: int) -> bool:
    """Whether oneDNN's fused LSTM leaves nothing to gain. A layer in one call of ours gains at any batch."""
    if hidden <= MOST_UNITS and inputs <= MOST_INPUTS:
        return False
    return batch >= LSTM_BATCH or hidden > LSTM_HIDDEN


def call(module: Recurrent, input: Tensor | PackedSequence, hx: Any) -> Any:
    """Torch's forward pass."""
    if hx is not None:
        module._check_given(hx)
    return layer(module).forward(module, input, hx)


def layer(module: Recurrent) -> Any:
    """The torch class that a module stands in for, or has the parameters of."""
    return {"GRU": nn.GRU, "LSTM": nn.LSTM}.get(module.mode, nn.RNN)


def report(module: Recurrent, input: Tensor | PackedSequence, reason: str) -> SolveReport:
    steps, _ = size(module, input)
    return SolveReport.sequential(steps, f"{reason}; run by torch's own layer")


def size(module: Recurrent, input: Tensor | PackedSequence) -> tuple[int, int]:
    """Steps and batch of an input."""
    if isinstance(input, PackedSequence):
        return len(input.batch_sizes), int(input.batch_sizes[0])
    if input.dim() != 3:
        return (len(input) if input.dim() else 0), 1
    return (input.shape[1], input.shape[0]) if module.batch_first else (input.shape[0], input.shape[1])
