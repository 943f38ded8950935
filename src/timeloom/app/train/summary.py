"""The result of a training in numbers and in words."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import Any

import torch

from timeloom.app.data import Splits
from timeloom.app.data.records import Task
from timeloom.app.train.checkpoint import Progress
from timeloom.app.train.config import TrainConfig
from timeloom.app.train.metrics import Metrics
from timeloom.app.train.objective import Score, quality_name, quality_text

BESIDE = {"torch": "torch's own layers", "sequential": "the same layers one step after the other"}


@dataclass(frozen=True)
class Summary:
    """What a run has shown."""

    task: Task
    test_loss: float
    test_quality: float
    test_series: int
    confusion: list[list[int]]
    """(true class, answered class), counts; empty for regression."""
    best_epoch: int
    steps: int
    seconds_a_step: float
    """Median over the run."""
    data_share: float
    """Share of the time that training waited for its data."""
    beside: str
    """What ran beside: torch's layers, or the same layers one step after the other where torch has none."""
    torch_seconds_a_step: float | None
    """The fastest of the steps that ran beside; None where none did."""
    compared_steps: int
    speedup: float | None
    """Torch's fastest over our median: a busy machine makes it smaller, never larger."""
    loss_difference: float | None
    """Largest relative difference of the losses that both found from the same weights and batch."""
    most_sweeps: int
    fallbacks: int
    device: str
    threads: int
    """Of each process."""
    processes: int = 1

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        """The result in words."""
        lines = [
            f"Test {quality_name(self.task)} {quality_text(self.task, self.test_quality)} on {self.test_series} series "
            f"(loss {self.test_loss:.4f}, weights of epoch {self.best_epoch + 1})."
        ]
        if self.speedup is None or self.torch_seconds_a_step is None:
            lines.append(
                f"A training step took {self.seconds_a_step:.3f} s{self._together()}; {BESIDE[self.beside]} were not "
                f"timed."
            )
        else:
            agree = f"agree to {self.loss_difference:.0e}" if self.loss_difference else "are the same"
            lines.append(
                f"{_count(self.compared_steps)} repeated by {BESIDE[self.beside]}, from the same weights: the "
                f"losses {agree}; {self.torch_seconds_a_step:.3f} s a step (its fastest), timeloom "
                f"{self.seconds_a_step:.3f} s (its median{self._together()})."
            )
        return lines

    def _together(self) -> str:
        return f", {self.processes} processes together" if self.processes > 1 else ""

    def pace(self) -> str:
        """The speedup in a few words."""
        if self.speedup is None:
            return f"{self.beside} was not timed"
        if self.speedup < 1:
            return f"{self.speedup:.2f} times the speed of {self.beside}"
        return f"{self.speedup:.1f}x faster a step than {self.beside}"


def summarize(
    config: TrainConfig,
    splits: Splits,
    metrics: Metrics,
    score: Score,
    progress: Progress,
    device: torch.device,
    processes: int = 1,
) -> Summary:
    """Gather what the rows of a run say."""
    steps = metrics.of("step")
    by_step = {row["step"]: row for row in steps}
    pairs = [(row, by_step[row["step"]]) for row in metrics.of("torch") if row["step"] in by_step]
    seconds = [row["seconds"] for row in steps]
    ours, theirs = statistics.median(seconds), [row["seconds"] for row, _ in pairs]
    fetching = sum(row["data_seconds"] for row in steps)
    return Summary(
        task=splits.task,
        test_loss=score.loss,
        test_quality=score.quality,
        test_series=len(splits.test),
        confusion=score.confusion.tolist(),
        best_epoch=progress.best_epoch,
        steps=progress.step,
        seconds_a_step=ours,
        data_share=fetching / (fetching + sum(seconds)),
        beside=config.model.beside,
        torch_seconds_a_step=min(theirs) if pairs else None,
        compared_steps=len(pairs),
        speedup=min(theirs) / ours if pairs else None,
        loss_difference=max(_relative(one["loss"], other["loss"]) for one, other in pairs) if pairs else None,
        most_sweeps=max(max(row["sweeps"], row["backward_sweeps"]) for row in steps),
        fallbacks=sum(row["fallbacks"] for row in steps),
        device=str(device),
        threads=torch.get_num_threads(),
        processes=processes,
    )


def _count(steps: int) -> str:
    return "1 step was" if steps == 1 else f"{steps} steps were"


def _relative(one: float, other: float) -> float:
    return abs(one - other) / max(abs(one), abs(other), 1e-30)
