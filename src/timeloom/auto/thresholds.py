"""When torch's own layer is faster: on a CPU here, on a GPU in `timeloom.auto.cudnn`.

Its numbers were measured on 2 cores of a Xeon: `python -m benchmarks.calibrate` measures them anew and prints them
beside the stored ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from timeloom.auto import cudnn
from timeloom.auto.costs import cheapest, cost_beside_torchs, cost_of
from timeloom.auto.cudnn import Sized
from timeloom.auto.experience import assumed_warmup
from timeloom.auto.layer_experience import LayerExperience, rest_of
from timeloom.kernels.cpu.build import unavailable
from timeloom.kernels.cpu.layer import CPULayer
from timeloom.solve.tolerance import TOLERANCE
from timeloom.torch_state.precision import solved_in

SHORTEST = {"GRU": (12, 32), "RNN": (40, 64)}
"""Steps from which compiled sweeps beat torch's layer on a CPU, with and without gradients: below that, our fixed cost
per call exceeds torch's whole run."""
SHORTEST_LSTM = ((4096, 64), (256, 384), (0, 512))
"""The same for an LSTM with gradients, by the number of units in all sequences together: oneDNN has a small fixed cost.
"""
SHORTEST_LSTM_FORWARD = 1024
"""The same without gradients."""
SHORTEST_IN_TORCH = 2048
"""The same for sweeps in plain torch operations (float64, a projected LSTM, no compiler)."""
SHORTEST_LSTM_IN_TORCH = 32768
"""The same for such sweeps of an LSTM without gradients: a step of torch's LSTM takes a tenth of a step of its GRU."""
FULL = {"GRU": (0.25, 0.5), "RNN": (0.25, 0.65), "LSTM": (0.0, 0.25)}
"""Share of real steps among those of padded sequences from which these sweeps beat torch's packed layer, with and
without gradients; torch's packed LSTM is not a fused one."""
WIDE = 256, 64
"""Units, and as many inputs, and sequences of a GRU of which torch's packed layer gains as much by not multiplying the
inputs of padding."""
FULL_WIDE = 0.65
"""The share of real steps for such a GRU without gradients."""
LSTM_BATCH = 8
"""Batch from which oneDNN's fused LSTM fills a CPU by itself."""
LSTM_HIDDEN = 256
"""Hidden size beyond which it does so with a single sequence."""

RESTING = "auto: the network forgets too slowly, and torch's own layer is faster than one chunk"
"""A reason that may no longer hold at the next call."""

__all__ = ["Fewest", "Sized", "fewest_on_cpu", "why_faster", "why_faster_by_size"]


class Fewest(NamedTuple):
    """The number of steps from which our sweeps run a layer: torch's own runs shorter calls, all if it is infinite."""

    steps: float = 0
    words: str = ""
    """The reason if torch's layer runs all calls; else an addition to the reason for short ones."""

    def why(self, steps: int) -> str | None:
        """Why torch's layer runs so many steps, which may be a symbol, or None."""
        if math.isinf(self.steps):
            return self.words
        return f"auto: {steps} steps are too few to gain{self.words}" if steps < self.steps else None


def why_faster(layer: Sized, x: Tensor, steps: int, batch: int, known: Sequence[LayerExperience]) -> str | None:
    """Why torch's own layer is the faster one, or None. `known` is the experience with the layer."""
    if x.device.type == "cuda":
        return cudnn.why(layer, x, steps, batch, known)
    reason = fewest_on_cpu(layer, x, batch).why(steps)
    if reason is not None or _has_kernels(layer, x):
        return reason or _why_padded(layer, x, steps, batch)
    if rest_of(known):
        return RESTING
    return None if _gains_in_torch(layer, x, steps, batch) else f"auto: {batch} sequences fill the CPU in torch's layer"


def by_size(layer: Sized, x: Tensor) -> bool:
    """Whether the size alone decides, since our kernels also run networks that forget too slowly, in one chunk."""
    return x.device.type == "cpu" and _has_kernels(layer, x)


def why_faster_by_size(layer: Sized, x: Tensor, steps: int, batch: int) -> str | None:
    """Why torch's own layer is the faster one for any problem of this size, or None. `steps` may be a symbol."""
    if x.device.type == "cuda":
        return cudnn.why_by_size(layer, x, steps, batch)
    return fewest_on_cpu(layer, x, batch).why(steps)


def fewest_on_cpu(layer: Sized, x: Tensor, batch: int) -> Fewest:
    """The number of steps from which our sweeps run `batch` sequences, by sizes alone."""
    lstm, taped = layer.mode == "LSTM", torch.is_grad_enabled()
    in_torch = SHORTEST_LSTM_IN_TORCH if lstm and not taped else SHORTEST_IN_TORCH
    if not _compiles(layer, x):
        return Fewest(in_torch)
    missing = unavailable()
    if missing is not None:
        return Fewest(in_torch, f" without compiled kernels ({missing})")
    if lstm and _fills_the_cpu(layer.hidden_size, layer.input_size, batch):
        return Fewest(math.inf, f"auto: {batch} × {layer.hidden_size} units fill the CPU in torch's fused LSTM")
    if lstm:
        by_units = (steps for units, steps in SHORTEST_LSTM if batch * layer.hidden_size >= units)
        return Fewest(next(by_units) if taped else SHORTEST_LSTM_FORWARD)
    return Fewest(SHORTEST[layer.mode.split("_")[0]][0 if taped else 1])


def _why_padded(layer: Sized, x: Tensor, steps: int, batch: int) -> str | None:
    """Why torch's layer, which takes no time for padding, runs packed sequences `(steps of all, inputs)`, or None."""
    full = x.shape[0] / (steps * batch) if x.dim() == 2 else 1.0
    taped = torch.is_grad_enabled()
    least = FULL[layer.mode.split("_")[0]][0 if taped else 1]
    if not taped and layer.mode == "GRU" and min(layer.hidden_size, layer.input_size) >= WIDE[0] and batch >= WIDE[1]:
        least = FULL_WIDE
    if full >= least:
        return None
    return f"auto: {100 * full:.0f} % of the padded steps are too few to gain"


def _gains_in_torch(layer: Sized, x: Tensor, steps: int, batch: int) -> bool:
    """Whether chunks in plain torch operations, of a network that forgets fast, beat torch's own layer."""
    cost = cost_beside_torchs(layer.hidden_size + (layer.proj_size or layer.hidden_size) * (layer.mode == "LSTM"))
    cut = cheapest(steps, batch, assumed_warmup(TOLERANCE[solved_in(x)]), cost)
    return cost_of(steps, batch, *cut, cost) <= cost.worth * cost_of(steps, batch, steps, 0, cost)


def _compiles(layer: Sized, x: Tensor) -> bool:
    """Whether there are compiled kernels for a layer of this kind."""
    return solved_in(x) == torch.float32 and layer.proj_size == 0


def _has_kernels(layer: Sized, x: Tensor) -> bool:
    """Whether there are compiled kernels for a layer of this kind on this machine."""
    return _compiles(layer, x) and unavailable() is None


def _fills_the_cpu(hidden: int, inputs: int, batch: int) -> bool:
    """Whether oneDNN's fused LSTM leaves nothing to gain; a layer that is one call of ours gains at any batch size."""
    return not CPULayer.fits(hidden, inputs) and (batch >= LSTM_BATCH or hidden > LSTM_HIDDEN)
