"""When torch's own layer is faster: on a CPU here, on a GPU in `timeloom.auto.cudnn`.

Its numbers were measured on 2 cores of a Xeon: `python -m benchmarks.calibrate` measures them anew and prints them
beside the stored ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from timeloom.auto import cudnn
from timeloom.auto.cudnn import Sized
from timeloom.auto.layer_experience import LayerExperience, rest_of
from timeloom.kernels.cpu.build import unavailable
from timeloom.kernels.cpu.layer import CPULayer
from timeloom.torch_state.precision import solved_in

SHORTEST = {"GRU": (12, 32), "RNN": (40, 64)}
"""Steps from which compiled sweeps beat torch's layer on a CPU, with and without gradients: below that, our fixed cost
per call exceeds torch's whole run."""
SHORTEST_LSTM = ((4096, 64), (256, 256), (0, 512))
"""The same for an LSTM with gradients, by the number of units in all sequences together: oneDNN has a small fixed cost.
"""
SHORTEST_LSTM_FORWARD = 1024
"""The same without gradients."""
SHORTEST_IN_TORCH = 2048
"""The same for sweeps in plain torch operations (float64, a projected LSTM, no compiler)."""
SHORTEST_LSTM_IN_TORCH = 32768
"""The same for such sweeps of an LSTM without gradients: a step of torch's LSTM takes a tenth of a step of its GRU."""
LSTM_BATCH = 8
"""Batch from which oneDNN's fused LSTM fills a CPU by itself."""
LSTM_HIDDEN = 256
"""Hidden size beyond which it does so with a single sequence."""

RESTING = "auto: the network forgets too slowly, and torch's own layer is faster than one chunk"
"""A reason that may no longer hold at the next call."""

__all__ = ["Sized", "why_faster", "why_faster_by_size"]


def why_faster(layer: Sized, x: Tensor, steps: int, batch: int, known: Sequence[LayerExperience]) -> str | None:
    """Why torch's own layer is the faster one, or None. `known` is the experience with the layer."""
    if x.device.type == "cuda":
        return cudnn.why(layer, x, steps, batch, known)
    reason = _why_on_cpu(layer, x, steps, batch)
    if reason is None and not _has_kernels(layer, x) and rest_of(known):
        return RESTING
    return reason


def by_size(layer: Sized, x: Tensor) -> bool:
    """Whether the size alone decides, since our kernels also run networks that forget too slowly, in one chunk."""
    return x.device.type == "cpu" and _has_kernels(layer, x)


def why_faster_by_size(layer: Sized, x: Tensor, steps: int, batch: int) -> str | None:
    """Why torch's own layer is the faster one for any problem of this size, or None. `steps` may be a symbol."""
    if x.device.type == "cuda":
        return cudnn.why_by_size(layer, x, steps, batch)
    return _why_on_cpu(layer, x, steps, batch)


def _why_on_cpu(layer: Sized, x: Tensor, steps: int, batch: int) -> str | None:
    missing = ""
    in_torch = SHORTEST_IN_TORCH
    if layer.mode == "LSTM" and not torch.is_grad_enabled():
        in_torch = SHORTEST_LSTM_IN_TORCH
    if not _compiles(layer, x):
        needed = in_torch
    elif unavailable() is not None:
        needed, missing = in_torch, f" without compiled kernels ({unavailable()})"
    elif layer.mode == "LSTM" and _fills_the_cpu(layer.hidden_size, layer.input_size, batch):
        return f"auto: {batch} × {layer.hidden_size} units fill the CPU in torch's fused LSTM"
    elif layer.mode == "LSTM":
        by_units = (steps for units, steps in SHORTEST_LSTM if batch * layer.hidden_size >= units)
        needed = next(by_units) if torch.is_grad_enabled() else SHORTEST_LSTM_FORWARD
    else:
        needed = SHORTEST[layer.mode.split("_")[0]][0 if torch.is_grad_enabled() else 1]
    return f"auto: {steps} steps are too few to gain{missing}" if steps < needed else None


def _compiles(layer: Sized, x: Tensor) -> bool:
    """Whether there are compiled kernels for a layer of this kind."""
    return solved_in(x) == torch.float32 and layer.proj_size == 0


def _has_kernels(layer: Sized, x: Tensor) -> bool:
    """Whether there are compiled kernels for a layer of this kind on this machine."""
    return _compiles(layer, x) and unavailable() is None


def _fills_the_cpu(hidden: int, inputs: int, batch: int) -> bool:
    """Whether oneDNN's fused LSTM leaves nothing to gain; a layer that is one call of ours gains at any batch size."""
    return not CPULayer.fits(hidden, inputs) and (batch >= LSTM_BATCH or hidden > LSTM_HIDDEN)
