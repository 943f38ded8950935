"""The result of a training in numbers and in words."""

from __future__ import annotations

import shlex
import statistics
import sys
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

import torch

import timeloom
from timeloom.app.data.records import NUMERIC, Task
from timeloom.app.machine import NOTICEABLE, Load, counted, duration
from timeloom.app.train import config_file
from timeloom.app.train.ending import ending
from timeloom.app.train.objective import Score, chosen_by, quality_name, quality_text
from timeloom.app.train.trainer import Trainer

BESIDE = {"torch": "torch's own layers", "step by step": "the same layers step by step"}
MOST_ANSWERS = 500
"""Numbers that are drawn beside the true ones."""


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
    """From 1 on."""
    steps: int
    seconds_a_step: float
    """Median over the run."""
    data_share: float
    """Share of the time that training waited for its data."""
    beside: str
    """What ran beside: torch's layers, or the same layers step by step where torch has none."""
    torch_seconds_a_step: float | None
    """Median of the steps that ran beside; None where none did."""
    compared_seconds: float | None
    """Median of ours over the same steps."""
    compared_steps: int
    torch_threads: int | None
    """Threads of torch's steps: the number with which it was faster."""
    torch_expected: float | None
    """Seconds that one step of torch's would have taken, where that was too long to be tried."""
    speedup: float | None
    """Median over the steps that both ran of torch's time over ours."""
    speedup_range: list[float] | None
    """The least and the greatest of them."""
    loss_difference: float | None
    """Largest relative difference of the losses that both found from the same weights and batch."""
    parallel_share: float
    """Share of the training steps that ran in parallel over several chunks of time."""
    most_chunks: int
    most_sweeps: int
    fallbacks: int
    baseline: float
    """Quality of always giving the same answer."""
    metric: str
    """What the best epoch was chosen by."""
    classes: list[str]
    recalls: list[float]
    """Of each class the share that was found."""
    precisions: list[float]
    """Of the answers of each class the share that was right."""
    mean_error: float | None
    """Mean absolute error of numbers."""
    answers: list[list[float]]
    """Of numbers: pairs of the true one and the answer, a part of them where there are many."""
    load: dict[str, Any]
    """Cores, threads of torch, and the cores that other programs used meanwhile."""
    made: str
    """When the run ended."""
    version: str
    command: str
    """What the user typed; a line each for the first command, and for those that went on with the run."""
    device: str
    threads: int
    """Of each process."""
    processes: int = 1
    warm_share: float = 0.0
    """Share of the training steps that began at the states of the epoch before."""
    warm_bytes: int = 0
    """Memory that these states took."""
    ending: str = ""
    """Why the training went no further, and how to go on with it."""
    compared_at: list[int] = field(default_factory=list)
    """The steps that both ran."""
    compared_others: float | None = None
    """Cores that other programs used while torch repeated them, on average."""
    resumed_after: int = 0
    """The step after which the run last went on from a checkpoint; 0 where it never stopped."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        """The result in words."""
        task = self.task
        lines = [
            f"Test {quality_name(task)} {quality_text(task, self.test_quality)} on {self.test_series} series "
            f"(loss {self.test_loss:.4f}, weights of epoch {self.best_epoch}, the best by {self.metric})."
        ]
        if (warning := self.warning()) is not None:
            lines.append(warning)
        return [*lines, self.ending, self.time_words(), self.parallel_words(), self.load_words()]

    def warning(self) -> str | None:
        """That nothing was learned, where that is so."""
        numeric = self.task in NUMERIC
        if not self.test_quality <= self.baseline:  # better, or not defined, as was said
            return None
        if self.baseline == 1 and not numeric:
            return "Warning: all that was tested is of one class, so accuracy says little: give more series to test."
        guess = "the mean of all targets" if numeric else "the most frequent class"
        return (
            f"Warning: this is no better than always answering {guess} ({quality_text(self.task, self.baseline)}). "
            f"Try more --epochs, another --lr, {'' if numeric else '--class-weights balanced, '}or look at the data."
        )

    def time_words(self) -> str:
        """How long a step took, beside torch's."""
        ours, theirs, together = self.compared_seconds, self.torch_seconds_a_step, self._together()
        if self.speedup is None or ours is None or theirs is None or self.speedup_range is None:
            why = "were not timed"
            if self.torch_expected is not None:
                why = f"were not timed: one step of theirs would take about {duration(self.torch_expected)}"
            return f"A training step took {self.seconds_a_step:.3f} s{together}; {BESIDE[self.beside]} {why}."
        agree = f"agree to {self.loss_difference:.0e}" if self.loss_difference else "are the same"
        low, high = self.speedup_range
        spread = f" (from {low:.1f}x to {high:.1f}x)" if self.compared_steps > 1 else ""
        return (
            f"{self._repeated()} repeated by {BESIDE[self.beside]}, from the same weights: the losses "
            f"{agree}; {theirs:.3f} s a step with {counted(self.torch_threads or 1, 'thread')}, timeloom {ours:.3f} s "
            f"on the same steps{together}: {self.speedup:.1f}x{spread}."
        )

    def _repeated(self) -> str:
        """Which steps were repeated, and in which part of a run that stopped and went on."""
        steps, before = self.compared_at, sum(step <= self.resumed_after for step in self.compared_at)
        which = f"{steps[0]:,} to {steps[-1]:,}" if len(steps) > 6 else ", ".join(f"{step:,}" for step in steps)
        of_them = "" if before == len(steps) else f"{before} of them "
        earlier = f"; {of_them}before the run was resumed after step {self.resumed_after:,}" if before else ""
        was = "was" if len(steps) == 1 else "were"
        return f"{counted(len(steps), 'step')} ({which} of {self.steps:,}{earlier}) {was}"

    def parallel_words(self) -> str:
        """Whether steps ran parallel in time."""
        if not self.parallel_share:
            return (
                "Every step ran in one chunk: such series are fastest without being cut, so no gain here comes from "
                "parallel time."
            )
        back = f"; {self.fallbacks} solves were finished in one chunk" if self.fallbacks else ""
        return (
            f"{self.parallel_share:.0%} of the steps ran in parallel over up to {self.most_chunks:,} chunks of time, "
            f"in {counted(self.most_sweeps, 'sweep')} at most{back}{self._warm()}."
        )

    def _warm(self) -> str:
        if not self.warm_share:
            return ""
        return (
            f"; {self.warm_share:.0%} of the steps began at their series' states of the epoch before, which took "
            f"{self.warm_bytes / 2**20:.1f} MiB (--warm-starts 0: none)"
        )

    def load_words(self) -> str:
        """What else the machine was busy with."""
        words = Load(**self.load).words()
        if not self.compared_others or self.compared_others < NOTICEABLE:
            return words
        return f"{words} While torch repeated its steps, they used {self.compared_others:.1f} cores."

    def _together(self) -> str:
        return f", {self.processes} processes together" if self.processes > 1 else ""

    def pace(self) -> str:
        """The speedup in a few words."""
        if self.speedup is None:
            return f"{self.beside} was not timed"
        if self.speedup < 1:
            return f"{self.speedup:.2f} times the speed of {self.beside}"
        return f"{self.speedup:.1f}x faster a step than {self.beside}"


def command_line() -> str:
    """What the user typed."""
    return shlex.join(["timeloom", *sys.argv[1:]])


def summarize(trainer: Trainer, score: Score) -> Summary:
    """Gather what the rows of a run say."""
    config, splits, metrics, progress = trainer.config, trainer.splits, trainer.metrics, trainer.progress
    steps = metrics.of("step")
    by_step = {row["step"]: row for row in steps}
    pairs = [(row, by_step[row["step"]]) for row in metrics.of("torch") if row["step"] in by_step]
    seconds = [row["seconds"] for row in steps]
    ratios = sorted(theirs["seconds"] / ours["seconds"] for theirs, ours in pairs)
    others = [row["others"] for row, _ in pairs if row.get("others") is not None]
    fetching = sum(row["data_seconds"] for row in steps)
    return Summary(
        task=splits.task,
        test_loss=score.loss,
        test_quality=score.quality,
        test_series=len(splits.test),
        confusion=score.confusion.tolist(),
        best_epoch=progress.best_epoch,
        steps=progress.step,
        seconds_a_step=statistics.median(seconds),
        data_share=fetching / (fetching + sum(seconds)),
        beside=config.model.beside,
        torch_seconds_a_step=statistics.median(row["seconds"] for row, _ in pairs) if pairs else None,
        compared_seconds=statistics.median(row["seconds"] for _, row in pairs) if pairs else None,
        compared_steps=len(pairs),
        compared_at=[row["step"] for row, _ in pairs],
        compared_others=statistics.fmean(others) if others else None,
        resumed_after=trainer.resumed_after,
        ending=ending(trainer),
        torch_threads=pairs[-1][0]["threads"] if pairs else None,
        torch_expected=trainer.beside.expected,
        speedup=statistics.median(ratios) if pairs else None,
        speedup_range=[ratios[0], ratios[-1]] if pairs else None,
        loss_difference=max(_relative(one["loss"], other["loss"]) for one, other in pairs) if pairs else None,
        parallel_share=sum(row["chunks"] > 1 for row in steps) / len(steps),
        most_chunks=max(row["chunks"] for row in steps),
        most_sweeps=max(max(row["sweeps"], row["backward_sweeps"]) for row in steps),
        fallbacks=sum(row["fallbacks"] for row in steps),
        baseline=score.baseline,
        metric=chosen_by(config.optim.metric, splits.task),
        classes=list(splits.classes),
        recalls=score.recalls.tolist() if splits.classes else [],
        precisions=score.precisions.tolist() if splits.classes else [],
        mean_error=score.absolute_sum / max(score.count, 1) if splits.task in NUMERIC else None,
        answers=_some_answers(score),
        load=asdict(trainer.load.read()),
        made=f"{datetime.now():%Y-%m-%d %H:%M}",
        version=timeloom.__version__,
        command="\n".join(config_file.commands_of(trainer.folder / config_file.NAME) or [command_line()]),
        device=str(trainer.device),
        threads=torch.get_num_threads(),
        processes=trainer.ranks.size,
        warm_share=sum(row.get("warm", False) for row in steps) / len(steps),
        warm_bytes=trainer.warm.nbytes,
    )


def _some_answers(score: Score) -> list[list[float]]:
    if not score.answers:
        return []
    pairs = torch.stack([torch.cat(score.targets), torch.cat(score.answers)], dim=1)
    every = -(-len(pairs) // MOST_ANSWERS)
    found: list[list[float]] = pairs[::every].tolist()
    return found


def _relative(one: float, other: float) -> float:
    return abs(one - other) / max(abs(one), abs(other), 1e-30)
