"""What an inspection found: one trial per solver, in numbers, words and a picture."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from timeloom.inspection.memory import Memory
from timeloom.inspection.plot import plot
from timeloom.report import SolveReport, of_reports


@dataclass(frozen=True)
class Trial:
    """One solver on the input."""

    name: str
    reports: list[tuple[str, SolveReport]]
    """The report of each layer and direction, with its name, in the last of several passes."""
    seconds: float
    """Median time of a forward and backward pass."""
    difference: float
    """Largest difference of outputs and parameters' gradients from torch's layers, relative to the largest value."""
    stretch: int | None = None
    """Steps of one series that it was tried on, if the whole input would take too long."""

    def sweeps(self) -> tuple[int, int]:
        """Most sweeps of a layer, forward and backward."""
        backward = [report.backward.iterations for _, report in self.reports if report.backward is not None]
        return max(report.iterations for _, report in self.reports), max(backward, default=0)

    @property
    def outcome(self) -> str:
        """Whether it converged, in a word or two."""
        solves = [one for _, report in self.reports for one in (report, report.backward) if one is not None]
        if any(one.fell_back for one in solves):
            return "fell back"
        return "converged" if all(one.converged for one in solves) else "inexact"


@dataclass(frozen=True)
class Inspection:
    """The result of `timeloom.inspect`."""

    steps: int
    batch: int
    chunk: int
    """Steps in a chunk of shooting from plain guesses."""
    trials: list[Trial]
    """torch's own layers first, `auto` second."""
    memory: list[tuple[str, Memory]]
    """How fast each layer and direction forgets, along the first sequence."""

    @property
    def reports(self) -> dict[str, list[SolveReport]]:
        """By the solver's name: one report for each layer and direction, each with its backward report."""
        return {trial.name: [report for _, report in trial.reports] for trial in self.trials[1:]}

    def rows(self) -> list[tuple[str, ...]]:
        """A table as text: a header, and a row for each solver."""
        rows: list[tuple[str, ...]] = [("solver", "sweeps", "backward", "outcome", "ms", "difference")]
        for trial in self.trials:
            forward, backward = map(str, trial.sweeps())
            numbers = (f"{1e3 * trial.seconds:.1f}", f"{trial.difference:.1e}")
            name = trial.name if trial.stretch is None else f"{trial.name}, {trial.stretch:,} steps"
            rows.append((name, forward, backward, trial.outcome, *numbers))
        return rows

    def __str__(self) -> str:
        rows = self.rows()
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([*lines, "", *self.words()])

    def words(self) -> list[str]:
        """What `auto` does and why, and what the others would take."""
        torchs, auto, *others = self.trials
        told = [f"auto, {where}: {text}" for where, text in of_reports(auto.reports, self.steps)]
        told += [f"{where} {memory.words}." for where, memory in self.memory]
        if any(memory.steps is not None for _, memory in self.memory):
            told.append(
                "The shorter a memory is beside a chunk, the less a warm-up costs and the fewer sweeps it takes."
            )
        part = [trial.name for trial in others if trial.stretch is not None]
        if part:
            told.append(f"On the first steps of one series alone, as many as took seconds: {', '.join(part)}.")
        slow = [trial.name for trial in others if trial.outcome == "fell back"]
        if slow:
            told.append(f"Did not converge in time and finished in one chunk: {', '.join(slow)}.")
        whole = [trial for trial in self.trials if trial.stretch is None]
        fastest = min(whole, key=lambda trial: trial.seconds)
        told.append(
            f"Fastest on this batch: {fastest.name}, {1e3 * fastest.seconds:.1f} ms a forward and backward pass; "
            f"torch's own layers take {1e3 * torchs.seconds:.1f} ms, auto {1e3 * auto.seconds:.1f} ms."
        )
        return told

    def plot(self, path: str | Path, layer: int = 0) -> None:
        """Draw one layer (and direction): residuals by sweep or cycle, and level by level where there are levels.

        The kind of picture is the path's ending: .png, .svg, .pdf.
        """
        plot({name: reports[layer] for name, reports in self.reports.items()}, path)
