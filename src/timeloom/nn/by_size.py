"""The short way to torch's own layer, for calls on a CPU that are too short for sweeps.

Torch takes tens of microseconds for a call of few steps, so every check in Python counts, also in calls of a new shape:
the lengths of texts vary. What torch's operators check themselves is not checked here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from timeloom.auto.thresholds import Fewest
from timeloom.nn import torch_layer
from timeloom.report import SolveReport

if TYPE_CHECKING:
    from timeloom.nn.base import Recurrent

MOST_KINDS = 256
"""Largest number of kinds of calls (number of sequences, dtype, gradients) that a layer remembers."""


class Told(NamedTuple):
    """The report of such a call, made on request."""

    fewest: Fewest
    steps: int

    def report(self) -> SolveReport:
        return SolveReport.by_torch(self.steps, self.fewest.why(self.steps) or "")


def call(module: Recurrent, input: Tensor | PackedSequence, hx: Any) -> tuple[Any, Any] | None:
    """Torch's forward pass, or None if the size of the call does not decide."""
    if type(input) is Tensor:
        data, sizes = input, None
        shape = data.shape
        if not data.is_cpu or data.is_nested:
            return None
        if len(shape) == 3:
            batch, steps, width = shape
            if not module.batch_first:
                batch, steps = steps, batch
        elif len(shape) == 2:
            (steps, width), batch = shape, 1
        else:
            return None
    else:
        data, sizes = input[0], input[1]
        if type(data) is not Tensor or not data.is_cpu or data.dim() != 2:
            return None
        steps, width = len(sizes), data.shape[1]
        batch = int(sizes[0])
    if torch._C._get_tracing_state() is not None:
        return None
    kind = (batch, data.dtype, torch.is_grad_enabled())
    fewest = module._fewest.get(kind)
    if fewest is None:
        fewest = _remember(module, kind, data, batch)
    if not (0 < steps < fewest.steps and batch) or width != module.input_size:
        return None
    found: tuple[Any, Any] = torch_layer.call_again(module, data, sizes, input, hx, batch)
    module._take_reports([], (Told(fewest, steps),) * module._stacked)
    return found


def _remember(module: Recurrent, kind: Any, data: Tensor, batch: int) -> Fewest:
    known = module.has_torch_twin and data.device.type in torch_layer.SWEPT
    fewest = module._solver.fewest_steps(module, data, batch) if known else Fewest()
    if len(module._fewest) >= MOST_KINDS:
        module._fewest.clear()
    module._fewest[kind] = fewest
    return fewest
