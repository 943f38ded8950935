"""When cuDNN's layer is the better answer on a GPU."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from timeloom.auto.costs import cost_on_gpu, fewest_to_cut
from timeloom.auto.decide import assumed_warmup
from timeloom.kernels.gpu.sweeper import has_triton, largest
from timeloom.nn.precision import products_in
from timeloom.solvers.base import TF32_TOLERANCE
from timeloom.torch_state.streams import capturing

if TYPE_CHECKING:
    from timeloom.nn.base import Recurrent

STEP = ((16, 0.95, 0.024), (32, 0.95, 0.042), (64, 1.25, 0.045), (128, 1.75, 0.058))
"""Microseconds of a GRU's step of both passes where cuDNN has one persistent kernel, on an H200: up to so many units,
by itself and for each sequence."""
FORWARD_STEP = ((32, 0.44, 0.0019), (64, 0.58, 0.005), (128, 0.78, 0.007))
"""The same of the forward pass alone, for which many sequences cost cuDNN little."""
SHARE = {"GRU": 1.0, "LSTM": 0.89, "RNN": 0.69}
"""A step's time by the cell, as a share of a GRU's: the smallest that was measured."""
HALF_SHARE = 0.87
"""The same in float16."""
LEAST_TIME, LEAST_FORWARD_TIME = 3800.0, 1600.0
"""Microseconds in cuDNN, of both passes and of the forward pass alone, from which the kernels on a GPU gain: our fixed
cost is well below."""
PERSISTENT = STEP[-1][0]
"""Hidden size up to which cuDNN's float32 layers run in one persistent kernel, out of reach for a step at a time."""
SHORTEST_BY_STEPS = 256
"""Steps from which they gain where cuDNN launches kernels for every step: wide layers, and bfloat16."""
SHORTEST_IN_TORCH = 4096
"""Steps from which sweeps in plain torch operations gain."""
MOST_STEPS = 65535
"""cuDNN refuses longer sequences."""

RESTING = "auto: the network forgets too slowly, and cuDNN is faster than one chunk"
UNSURE = "auto: one sweep may not do, a CUDA graph holds no more, and cuDNN is faster than one chunk"
REHEARSED = "auto: cuDNN runs this call, so that a CUDA graph could hold its layer: one sweep may not do"
PASSING = (RESTING, UNSURE, REHEARSED)
"""Reasons that may be gone by the next call."""


def why(module: Recurrent, data: Tensor, steps: int, batch: int) -> str | None:
    """Why cuDNN's layer is to run, or None."""
    reason = why_by_size(module, data, steps, batch)
    if reason is not None or steps > MOST_STEPS:
        return reason
    resting = _resting(module)
    if not resting and (not _persistent(module, data) or _sure(module)):
        return None
    kind = (data.device, products_in(data), torch.is_grad_enabled())
    rehearsed, captures = kind in module._rehearsed, capturing(data.device)
    if captures:  # what cuDNN makes on its first call, no graph can hold
        return None if not rehearsed else RESTING if resting else UNSURE
    module._rehearsed.add(kind)
    return RESTING if resting else None if rehearsed else REHEARSED


def why_by_size(module: Recurrent, data: Tensor, steps: int, batch: int) -> str | None:
    """The same as far as the size alone tells. `steps` may be a symbol."""
    if steps > MOST_STEPS:
        return None
    kernels = module.proj_size == 0 and data.dtype != torch.float64 and has_triton()
    persistent = _persistent(module, data)
    if persistent and not kernels:
        return f"auto: cuDNN runs {module.hidden_size} hidden units in one kernel"
    if persistent:
        needed = _longer_than_our_fixed_cost(module, data, int(batch))
    else:
        needed = SHORTEST_BY_STEPS if kernels else SHORTEST_IN_TORCH
    if kernels and _one_chunk(module, steps, batch, data.device):
        return f"auto: one chunk is cheapest for T={steps}, B={batch}, and cuDNN is faster at that"
    return f"auto: {steps} steps are too few to gain" if steps < needed else None


def _persistent(module: Recurrent, data: Tensor) -> bool:
    """Whether cuDNN runs this layer in one kernel."""
    return module.hidden_size <= PERSISTENT and products_in(data) in (torch.float32, torch.float16)


def _longer_than_our_fixed_cost(module: Recurrent, data: Tensor, batch: int) -> int:
    """Steps that take cuDNN's persistent kernel longer than a call of ours costs at any length."""
    taped = torch.is_grad_enabled()
    by_units, least = (STEP, LEAST_TIME) if taped else (FORWARD_STEP, LEAST_FORWARD_TIME)
    step = next(own + each * batch for units, own, each in by_units if module.hidden_size <= units)
    step *= SHARE[module.mode.split("_")[0]]
    if products_in(data) == torch.float16:
        step *= HALF_SHARE
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
    fewest = fewest_to_cut(max(int(batch), 1), assumed_warmup(TF32_TOLERANCE), cost)
    return fewest is None or steps < fewest


def _resting(module: Recurrent) -> bool:
    """Whether shooting has turned out not to pay on any layer, and is not to be tried for some calls; counts this
    one.
    """
    memories = module.memories()
    rests = bool(memories) and all(memory.forward.pause > 0 or memory.backward.pause > 0 for memory in memories)
    for experience in (side for memory in memories for side in (memory.forward, memory.backward)) if rests else ():
        experience.pause = max(experience.pause - 1, 0)
    return rests
