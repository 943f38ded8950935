"""What a configuration asks for: the network, its optimizer, the learning rate of a step, the precision."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from timeloom.app.train.config import OptimConfig, TrainConfig
from timeloom.app.train.model import SequenceModel, solver_of


def build_model(config: TrainConfig, task: Any, classes: int, channels: int, device: torch.device) -> SequenceModel:
    """The network, with the weights that the seed gives."""
    torch.manual_seed(config.seed)
    model = SequenceModel(config.model, channels, classes or 1, task, solver_of(config.solver))
    return model.to(device, torch.float64 if config.precision == "float64" else torch.float32)


def make_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    kind = torch.optim.AdamW if config.optimizer == "adamw" else torch.optim.Adam
    return kind(model.parameters(), lr=config.lr, betas=config.betas, weight_decay=config.weight_decay)


def learning_rate(config: OptimConfig, step: int, total: int) -> float:
    """The rate of a step: a rise over the warm-up, then the schedule down to zero after the last step."""
    if step < config.warmup:
        return config.lr * (step + 1) / (config.warmup + 1)
    if config.schedule == "constant":
        return config.lr
    done = (step - config.warmup) / max(total - config.warmup, 1)
    return config.lr * (1 - done if config.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2)


def autocast(config: TrainConfig, device: torch.device) -> AbstractContextManager[Any]:
    """Half precision where the configuration asks for it."""
    return torch.autocast(device.type, torch.bfloat16) if config.precision == "bf16" else nullcontext()
