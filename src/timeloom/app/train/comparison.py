"""A training step by torch's own layers, beside ours: how long it takes, and what loss it finds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor

from timeloom.app.train.model import SequenceModel
from timeloom.nn import sequentialize

MOST_SECONDS = 60.0
"""Time that a run spends on torch's steps: no further one is begun that would go beyond it."""


@dataclass(frozen=True)
class TorchStep:
    """One training step by torch's layers."""

    seconds: float
    loss: float


def torch_step(
    model: SequenceModel, step: Callable[[SequenceModel, torch.optim.Optimizer], Tensor],
    make_optimizer: Callable[[SequenceModel], torch.optim.Optimizer],
) -> TorchStep:  # fmt: skip
    """Times `step` on a copy of the model with torch's own layers; the model itself is not touched."""
    copied = sequentialize(deepcopy(model))
    optimizer = make_optimizer(copied)
    begin = time.perf_counter()
    loss = step(copied, optimizer).item()
    synchronize(model.offset.device)
    return TorchStep(time.perf_counter() - begin, loss)


def synchronize(device: torch.device) -> None:
    """Wait for the device, so that a clock sees all of the work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_is_left(seconds: Sequence[float]) -> bool:
    """Whether one more step as slow as the last one fits."""
    return not seconds or sum(seconds) + seconds[-1] <= MOST_SECONDS


def chosen_steps(count: int, total: int) -> set[int]:
    """Steps at which to compare: spread over the training, the very first left out, where libraries still load."""
    if total < 2 or count < 1:
        return set()
    return {1 + round(i * (total - 2) / max(count - 1, 1)) for i in range(min(count, total - 1))}
