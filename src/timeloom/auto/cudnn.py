"""When cuDNN's layer is faster on a GPU.

Its numbers were measured on an H200: `python -m benchmarks.calibrate` on a GPU measures them anew and prints them
beside the stored ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from timeloom.auto.costs import fewest_to_cut, register_cost
from timeloom.auto.experience import assumed_warmup
from timeloom.auto.layer_experience import LayerExperience, rest_of
from timeloom.kernels import faults
from timeloom.kernels.cuda.sweeper import fits, launches_each_step, told_as
from timeloom.solve.tolerance import TOLERANCE
from timeloom.torch_state.precision import products_in
from timeloom.torch_state.streams import capturing


class Sized(Protocol):
    """Kind and sizes of a layer, under torch's names, by which its path is chosen."""

    mode: str
    input_size: int
    hidden_size: int
    proj_size: int


STEP = ((16, 0.95, 0.024), (32, 0.95, 0.042), (64, 1.25, 0.045), (128, 1.75, 0.058))
"""Microseconds of a GRU's step of both passes in cuDNN's persistent kernel, on an H200: largest number of units, fixed
time, and time for each sequence."""
FORWARD_STEP = ((32, 0.44, 0.0019), (64, 0.58, 0.005), (128, 0.78, 0.007))
"""The same for the forward pass alone, in which many sequences cost cuDNN little."""
BY_STEPS = 9.0
"""The shortest time of such a step where cuDNN launches kernels for every step."""
SHARE = {"GRU": 1.0, "LSTM": 0.89, "RNN": 0.69}
"""A cell's time of a step relative to a GRU's: the smallest ratio that was measured."""
HALF_SHARE = 0.87
"""Time of a step in float16 relative to float32."""
LEAST_TIME, LEAST_FORWARD_TIME = 3800.0, 1600.0
"""Microseconds in cuDNN, of both passes and of the forward pass alone, from which our GPU kernels are faster: our fixed
cost is well below."""
LEAST_TIME_OF_REGISTERS = 1500.0, 700.0
"""The same for kernels that keep weights in registers, which run even one chunk faster than cuDNN."""
PERSISTENT = STEP[-1][0]
"""Hidden size up to which cuDNN runs float32 layers in one persistent kernel, faster than any launch for each step."""
SHORTEST_BY_STEPS = 256
"""Steps from which our kernels are faster where cuDNN launches kernels for every step: wide layers, and bfloat16."""
SHORTEST_IN_TORCH = 4096
"""Steps from which sweeps in plain torch operations are faster."""
MOST_STEPS = 65535
"""Largest number of steps that cuDNN accepts."""

RESTING = "auto: the network forgets too slowly, and cuDNN is faster than one chunk"
"""A reason that may no longer hold at the next call."""


def why(layer: Sized, x: Tensor, steps: int, batch: int, known: Sequence[LayerExperience]) -> str | None:
    """Why cuDNN's layer runs, or None.

    A network that forgets too slowly is no reason while a CUDA graph is captured, since the capture cannot contain what
    cuDNN creates on its first call.
    """
    reason = why_by_size(layer, x, steps, batch)
    if reason is not None or steps > MOST_STEPS or _in_registers(layer, x, batch) or capturing(x.device):
        return reason
    return RESTING if rest_of(known) else None


def why_by_size(layer: Sized, x: Tensor, steps: int, batch: int) -> str | None:
    """Why cuDNN's layer runs for any network of this size, or None. `steps` may be a symbol."""
    if steps > MOST_STEPS:
        return None
    if _in_registers(layer, x, batch):
        if faults.broken(told_as(layer.mode.lower(), layer.hidden_size, products_in(x))) is not None:
            return "auto: the kernels for this layer cannot run here"
        needed = _longer_than_our_fixed_cost(layer, x, int(batch), LEAST_TIME_OF_REGISTERS)
        return f"auto: {steps} steps are too few to gain" if steps < needed else None
    kernels = _has_kernels(layer, x)
    persistent = _persistent(layer, x)
    if persistent and not kernels:
        return f"auto: cuDNN runs {layer.hidden_size} hidden units in one kernel"
    if persistent:
        needed = _longer_than_our_fixed_cost(layer, x, int(batch), (LEAST_TIME, LEAST_FORWARD_TIME))
    else:
        needed = SHORTEST_BY_STEPS if kernels else SHORTEST_IN_TORCH
    if kernels and _one_chunk(layer, steps, batch, x.device):
        return f"auto: one chunk is cheapest for T={steps}, B={batch}, and cuDNN is faster at that"
    return f"auto: {steps} steps are too few to gain" if steps < needed else None


def _in_registers(layer: Sized, x: Tensor, batch: int) -> bool:
    """Whether our kernels keep the layer's weights in registers, and so run one chunk faster than cuDNN's layer."""
    kernel, units = layer.mode.lower(), layer.hidden_size
    return _has_kernels(layer, x) and not launches_each_step(kernel, units, int(batch), x.device)


def _has_kernels(layer: Sized, x: Tensor) -> bool:
    whole = layer.proj_size == 0 and x.dtype != torch.float64
    return whole and fits(layer.mode.lower(), layer.hidden_size, x.device)


def _persistent(layer: Sized, x: Tensor) -> bool:
    """Whether cuDNN runs this layer in one persistent kernel."""
    return layer.hidden_size <= PERSISTENT and products_in(x) in (torch.float32, torch.float16)


def _longer_than_our_fixed_cost(layer: Sized, x: Tensor, batch: int, fixed: tuple[float, float]) -> int:
    """The number of steps for which cuDNN's kernel takes longer than the fixed cost of our call."""
    taped = torch.is_grad_enabled()
    by_units, least = (STEP, fixed[0]) if taped else (FORWARD_STEP, fixed[1])
    known = (own + each * batch for units, own, each in by_units if layer.hidden_size <= units)
    step = next(known, BY_STEPS)
    step *= SHARE[layer.mode.split("_")[0]]
    if products_in(x) == torch.float16:
        step *= HALF_SHARE
    return math.ceil(least / step)


def _one_chunk(layer: Sized, steps: int, batch: int, device: torch.device) -> bool:
    """Whether our kernels would run one chunk, with nothing but the batch side by side."""
    cost = register_cost(layer.mode.lower(), layer.hidden_size, device.index or 0)
    fewest = fewest_to_cut(max(int(batch), 1), assumed_warmup(TOLERANCE[torch.float32]), cost)
    return fewest is None or steps < fewest
