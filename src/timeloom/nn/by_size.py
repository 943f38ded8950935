"""Calls on a CPU that are torch's own layer's by their size alone, whatever else is known: the short way there.

A call of few steps takes torch tens of microseconds, so each look at it counts, at one whose shape has not been met as
at any other: texts vary in length. Nothing is looked at that torch's operators look at themselves.
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
"""Numbers of sequences, dtypes and modes that a layer remembers its answer for."""


class Told(NamedTuple):
    """What such a call did, for those who ask."""

    fewest: Fewest
    steps: int

    def report(self) -> SolveReport:
        return SolveReport.by_torch(self.steps, self.fewest.why(self.steps) or "")


def call(module: Recurrent, input: Tensor | PackedSequence, hx: Any) -> tuple[Any, Any] | None:
    """Torch's forward pass, or None where more must be known than sizes."""
    if type(input) is Tensor:
        data, sizes = input, None
        if data.dim() != 3 or data.is_nested:
            return None
        batch, steps, width = data.shape
        if not module.batch_first:
            batch, steps = steps, batch
    else:
        data, sizes = input[0], input[1]
        if type(data) is not Tensor or data.dim() != 2:
            return None
        steps, width = len(sizes), data.shape[1]
        batch = int(sizes[0])
    if not data.is_cpu or torch.is_autocast_enabled("cpu") or torch._C._get_tracing_state() is not None:
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
    fewest = module._solver.fewest_steps(module, data, batch) if module.has_torch_twin else Fewest()
    if len(module._fewest) >= MOST_KINDS:
        module._fewest.clear()
    module._fewest[kind] = fewest
    return fewest
