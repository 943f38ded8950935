"""What a task minimises and how its answers are measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from timeloom.app.data.records import NUMERIC, Task
from timeloom.app.data.splits import PADDING
from timeloom.app.errors import InputError
from timeloom.app.train.config import Metric


def counted(targets: Tensor) -> Tensor:
    """Which targets are real: not of padding, and not of steps that a mask leaves out."""
    return ~targets.isnan() if targets.is_floating_point() else targets != PADDING


def loss_of(
    answers: Tensor, targets: Tensor, task: Task, reduction: Literal["mean", "sum"] = "mean",
    weights: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Cross-entropy of classes, squared error of numbers, over the targets that count: their mean, or their sum.

    weights: `(K,)`, how much a class counts; their mean over the training targets is 1.
    """
    if task in NUMERIC:
        real = counted(targets)
        total = functional.mse_loss(answers.squeeze(-1)[real], targets[real], reduction="sum")
        return total / real.sum().clamp_min(1) if reduction == "mean" else total
    classes = targets.flatten()
    total = functional.cross_entropy(
        answers.flatten(0, -2), classes, weight=weights, ignore_index=PADDING, reduction="sum"
    )
    return total / counted(classes).sum().clamp_min(1) if reduction == "mean" else total


def balancing(targets: Sequence[Tensor], classes: int) -> Tensor:
    """Weights `(K,)` by which all classes count the same, their mean over the targets 1."""
    found = torch.cat([target.flatten() for target in targets])
    counts = found[found != PADDING].bincount(minlength=classes).double()
    return (counts.sum() / (classes * counts.clamp_min(1))).float()


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
    """Of numbers: the true ones, and the answers to them, where one process has all."""
    answers: list[Tensor] = field(default_factory=list)
    absolute_sum: float = 0.0
    """Of the errors of numbers."""

    def __post_init__(self) -> None:
        self.confusion = torch.zeros(self.classes, self.classes, dtype=torch.long)

    def add(self, answers: Tensor, targets: Tensor) -> None:
        """Take in a batch."""
        real = counted(targets)
        count = int(real.sum())
        if not count:  # a slice of steps after the ends of all series
            return
        self.loss_sum += loss_of(answers, targets, self.task).item() * count
        self.count += count
        if self.task in NUMERIC:
            self.targets.append(targets[real].detach().double().cpu())
            self.answers.append(answers.squeeze(-1)[real].detach().double().cpu())
            self.absolute_sum += (self.targets[-1] - self.answers[-1]).abs().sum().item()
            return
        pairs = targets[real] * self.classes + answers.argmax(dim=-1)[real]
        self.confusion += pairs.bincount(minlength=self.classes**2).reshape(self.classes, -1).cpu()

    @property
    def loss(self) -> float:
        return self.loss_sum / max(self.count, 1)

    @property
    def quality(self) -> float:
        """Share of right answers; of numbers R², the explained share of the variance, NaN where there is none."""
        if self.task not in NUMERIC:
            return int(self.confusion.diag().sum()) / max(self.count, 1)
        targets = torch.cat(self.targets)
        variance = (targets - targets.mean()).square().mean().item()
        return 1 - self.loss / variance if variance else float("nan")

    @property
    def baseline(self) -> float:
        """The quality of always giving the same answer: the most frequent class, or the mean."""
        if self.task in NUMERIC:
            return 0.0
        return int(self.confusion.sum(dim=1).max()) / max(self.count, 1)

    @property
    def recalls(self) -> Tensor:
        """(K,): of each class the share that was found; NaN for one that does not occur."""
        return self.confusion.diag() / self.confusion.sum(dim=1)

    @property
    def precisions(self) -> Tensor:
        """(K,): of the answers of each class the share that was right; NaN for one that was never given."""
        return self.confusion.diag() / self.confusion.sum(dim=0)

    def by(self, metric: Metric) -> float:
        """What a metric says, larger being better."""
        if metric == "loss" or (metric == "auto" and self.task in NUMERIC):
            return -self.loss
        if metric in ("auto", "accuracy", "r2"):
            return self.quality
        if metric == "mae":
            return -self.absolute_sum / max(self.count, 1)
        if metric == "balanced-accuracy":
            return self.recalls.nanmean().item()
        occurs = self.confusion.sum(dim=1) > 0
        sums = (self.confusion.sum(dim=0) + self.confusion.sum(dim=1))[occurs]
        return (2 * self.confusion.diag()[occurs] / sums).mean().item()


def check_objective(metric: Metric, class_weights: str, task: Task) -> None:
    """Refuse a metric, or weights of classes, that the task does not have."""
    if task in NUMERIC and class_weights != "none":
        raise InputError(f"--class-weights {class_weights} is for classes, and this is a {task}; leave it out")
    of_numbers, of_classes = ("r2", "mae"), ("accuracy", "balanced-accuracy", "macro-f1")
    if metric in (of_classes if task in NUMERIC else of_numbers):
        fitting = of_numbers if task in NUMERIC else of_classes
        raise InputError(f"--metric {metric} does not measure a {task}; give loss, {', '.join(fitting)}")


def chosen_by(metric: Metric, task: Task) -> str:
    """What the best epoch is best by."""
    return metric if metric != "auto" else "loss" if task in NUMERIC else "accuracy"


def quality_name(task: Task) -> str:
    return "R²" if task in NUMERIC else "accuracy"


def quality_text(task: Task, value: float) -> str:
    if not math.isfinite(value):
        return "not defined (all targets are the same)"
    return f"{value:.3f}" if task in NUMERIC else f"{value:.1%}"
