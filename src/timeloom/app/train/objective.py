"""What a task minimises and how its answers are measured."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from timeloom.app.data.records import Task
from timeloom.app.data.splits import PADDING


def loss_of(answers: Tensor, targets: Tensor, task: Task, reduction: Literal["mean", "sum"] = "mean") -> Tensor:
    """Cross-entropy of classes, squared error of numbers: their mean, or their sum."""
    if task == "regression":
        return functional.mse_loss(answers.squeeze(-1), targets, reduction=reduction)
    classes = targets.flatten()
    return functional.cross_entropy(answers.flatten(0, -2), classes, ignore_index=PADDING, reduction=reduction)


@dataclass
class Score:
    """Sums over the batches of a measurement."""

    task: Task
    classes: int
    count: int = 0
    loss_sum: float = 0.0
    confusion: Tensor = field(init=False)
    """(true class, answered class), counts."""
    targets: list[Tensor] = field(default_factory=list)
    """Of a regression."""

    def __post_init__(self) -> None:
        self.confusion = torch.zeros(self.classes, self.classes, dtype=torch.long)

    def add(self, answers: Tensor, targets: Tensor) -> None:
        """Take in a batch."""
        real = targets != PADDING if self.task != "regression" else torch.ones_like(targets, dtype=torch.bool)
        count = int(real.sum())
        if not count:  # a slice of steps after the ends of all series
            return
        self.loss_sum += loss_of(answers, targets, self.task).item() * count
        self.count += count
        if self.task == "regression":
            self.targets.append(targets.detach().double().cpu())
            return
        pairs = targets[real] * self.classes + answers.argmax(dim=-1)[real]
        self.confusion += pairs.bincount(minlength=self.classes**2).reshape(self.classes, -1).cpu()

    @property
    def loss(self) -> float:
        return self.loss_sum / max(self.count, 1)

    @property
    def quality(self) -> float:
        """Share of right answers; of a regression R², the explained share of the variance."""
        if self.task != "regression":
            return int(self.confusion.diag().sum()) / max(self.count, 1)
        targets = torch.cat(self.targets)
        variance = (targets - targets.mean()).square().mean().item()
        return 1 - self.loss / variance if variance else float("nan")


def quality_name(task: Task) -> str:
    return "R²" if task == "regression" else "accuracy"


def quality_text(task: Task, value: float) -> str:
    return f"{value:.3f}" if task == "regression" else f"{value:.1%}"
