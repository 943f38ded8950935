"""The result of a training in numbers and in words."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import Any

import torch

from timeloom.data import Splits
from timeloom.data.records import Task
from timeloom.train.checkpoint import Progress
from timeloom.train.metrics import Metrics
from timeloom.train.objective import Score, quality_name, quality_text


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
    torch_seconds_a_step: float | None
    """Median of the steps that torch's layers repeated; None where none were."""
    compared_steps: int
    speedup: float | None
    """Torch's median over ours."""
    loss_difference: float | None
    """Largest relative difference of the losses that both found from the same weights and batch."""
    most_sweeps: int
    fallbacks: int
    device: str
    threads: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        """The result in words."""
        lines = [
            f"Test {quality_name(self.task)} {quality_text(self.task, self.test_quality)} on {self.test_series} series "
            f"(loss {self.test_loss:.4f}, weights of epoch {self.best_epoch + 1})."
        ]
        if self.speedup is None or self.torch_seconds_a_step is None:
            lines.append(f"A training step took {self.seconds_a_step:.3f} s; torch's own layers were not timed.")
        else:
            agree = f"agree to {self.loss_difference:.0e}" if self.loss_difference else "are the same"
            lines.append(
                f"A training step is {self.speedup:.1f}x faster than with torch's own layers: "
                f"{self.torch_seconds_a_step:.3f} s to {self.seconds_a_step:.3f} s; the losses {agree}."
            )
        return lines


def summarize(splits: Splits, metrics: Metrics, score: Score, progress: Progress, device: torch.device) -> Summary:
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
        torch_seconds_a_step=statistics.median(theirs) if pairs else None,
        compared_steps=len(pairs),
        speedup=statistics.median(theirs) / ours if pairs else None,
        loss_difference=max(_relative(one["loss"], other["loss"]) for one, other in pairs) if pairs else None,
        most_sweeps=max(max(row["sweeps"], row["backward_sweeps"]) for row in steps),
        fallbacks=sum(row["fallbacks"] for row in steps),
        device=str(device),
        threads=torch.get_num_threads(),
    )


def _relative(one: float, other: float) -> float:
    return abs(one - other) / max(abs(one), abs(other), 1e-30)
