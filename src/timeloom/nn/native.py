"""When torch's own layer is the better answer, and how it is called."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from timeloom.nn.precision import SOLVED, products_in, solved_in
from timeloom.report import SolveReport
from timeloom.solvers.auto import Auto, Experience
from timeloom.solvers.base import TF32_TOLERANCE, Solver
from timeloom.solvers.costs import cost_on_gpu, fewest_to_cut
from timeloom.solvers.sequential import Sequential
from timeloom.streams import capturing
from timeloom.sweep.cpu_layer import MOST_INPUTS, MOST_UNITS
from timeloom.sweep.gpu import has_triton, largest
from timeloom.sweep.native import unavailable
from timeloom.transforms import WHERE, transformed

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
CUDNN_STEP = ((16, 0.95, 0.024), (32, 0.95, 0.042), (64, 1.25, 0.045), (128, 1.75, 0.058))
"""Microseconds of a GRU's step of both passes where cuDNN has one persistent kernel, on an H200: up to so many units,
by itself and for each sequence."""
CUDNN_FORWARD_STEP = ((32, 0.44, 0.0019), (64, 0.58, 0.005), (128, 0.78, 0.007))
"""The same of the forward pass alone, for which many sequences cost cuDNN little."""
CUDNN_SHARE = {"GRU": 1.0, "LSTM": 0.89, "RNN": 0.69}
"""A step's time by the cell, as a share of a GRU's: the smallest that was measured."""
CUDNN_HALF_SHARE = 0.87
"""The same in float16."""
LEAST_CUDNN_TIME, LEAST_CUDNN_FORWARD_TIME = 3800.0, 1600.0
"""Microseconds in cuDNN, of both passes and of the forward pass alone, from which the kernels on a GPU gain: our fixed
cost is well below."""
SHORTEST_BY_STEPS_ON_GPU = 256
"""The same where cuDNN launches kernels for every step: wide layers, and bfloat16."""
SHORTEST_IN_TORCH_ON_GPU = 4096
"""The same for sweeps in plain torch operations on a GPU."""
PERSISTENT = CUDNN_STEP[-1][0]
"""Hidden size up to which cuDNN's float32 layers run in one persistent kernel, out of reach for a step at a time."""
LSTM_BATCH = 8
"""Batch from which oneDNN's fused LSTM fills a CPU by itself."""
LSTM_HIDDEN = 256
"""Hidden size beyond which it does so with a single sequence."""


RESTING = "auto: the network forgets too slowly, and cuDNN is faster than one chunk"
UNSURE = "auto: one sweep may not do, a CUDA graph holds no more, and cuDNN is faster than one chunk"
REHEARSED = "auto: cuDNN runs this call, so that a CUDA graph could hold its layer: one sweep may not do"
PASSING = (RESTING, UNSURE, REHEARSED)
"""Reasons that may be gone by the next call."""
MOST_CUDNN_STEPS = 65535
"""cuDNN refuses longer sequences."""


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
    reason = why_by_size(module, data, steps, batch)
    if reason is not None or data.device.type != "cuda":
        return reason
    if steps > MOST_CUDNN_STEPS:
        return None
    if resting(module):
        return RESTING
    if not _persistent(module, data) or _sure(module):
        return None
    kind = (data.device, products_in(data), torch.is_grad_enabled())
    rehearsed, captures = kind in module._rehearsed, capturing(data.device)
    if rehearsed or captures:  # what cuDNN makes on its first call, no graph can hold
        return UNSURE if rehearsed and captures else None
    module._rehearsed.add(kind)
    return REHEARSED


def why_by_size(module: Recurrent, data: Tensor, steps: int, batch: int) -> str | None:
    """Why torch's own layer is the faster one for any problem of this size, or None. `steps` may be a symbol."""
    missing = ""
    if data.device.type == "cuda":
        if steps > MOST_CUDNN_STEPS:
            return None
        kernels = module.proj_size == 0 and data.dtype != torch.float64 and has_triton()
        persistent = _persistent(module, data)
        if persistent and not kernels:
            return f"auto: cuDNN runs {module.hidden_size} hidden units in one kernel"
        if persistent:
            needed = _longer_than_our_fixed_cost(module, data, int(batch))
        else:
            needed = SHORTEST_BY_STEPS_ON_GPU if kernels else SHORTEST_IN_TORCH_ON_GPU
        if kernels and _one_chunk(module, steps, batch, data.device):
            return f"auto: one chunk is cheapest for T={steps}, B={batch}, and cuDNN is faster at that"
    elif solved_in(data) != torch.float32 or module.proj_size > 0:
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


def _persistent(module: Recurrent, data: Tensor) -> bool:
    """Whether cuDNN runs this layer in one kernel."""
    return module.hidden_size <= PERSISTENT and products_in(data) in (torch.float32, torch.float16)


def _longer_than_our_fixed_cost(module: Recurrent, data: Tensor, batch: int) -> int:
    """Steps that take cuDNN's persistent kernel longer than a call of ours costs at any length."""
    taped = torch.is_grad_enabled()
    by_units, least = (CUDNN_STEP, LEAST_CUDNN_TIME) if taped else (CUDNN_FORWARD_STEP, LEAST_CUDNN_FORWARD_TIME)
    step = next(own + each * batch for units, own, each in by_units if module.hidden_size <= units)
    step *= CUDNN_SHARE[module.mode.split("_")[0]]
    if products_in(data) == torch.float16:
        step *= CUDNN_HALF_SHARE
    return math.ceil(least / step)


def _sure(module: Recurrent) -> bool:
    """Whether every layer's sweeps of this call are likely to be certified as planned, as far as earlier calls have
    shown.
    """
    memories = module.memories()
    sides = [memory.forward for memory in memories]
    if torch.is_grad_enabled():
        sides += [memory.backward for memory in memories]
    return all(side.trusted or side.correcting for side in sides)


def _one_chunk(module: Recurrent, steps: int, batch: int, device: torch.device) -> bool:
    """Whether the GPU's kernels would have nothing to run side by side but the batch."""
    n = module.hidden_size
    cost = cost_on_gpu(n, n > largest(module.mode.lower(), device), device)
    fewest = fewest_to_cut(max(int(batch), 1), Experience().warmup(TF32_TOLERANCE), cost)
    return fewest is None or steps < fewest


def resting(module: Recurrent) -> bool:
    """Whether shooting has turned out not to pay on any layer, and is not to be tried for some calls; counts this
    one.
    """
    memories = module.memories()
    rests = bool(memories) and all(memory.forward.pause > 0 or memory.backward.pause > 0 for memory in memories)
    for experience in (side for memory in memories for side in (memory.forward, memory.backward)) if rests else ():
        experience.pause = max(experience.pause - 1, 0)
    return rests


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
