"""How the demo tells what it measured: progress bars, a table, the solver's report in words, a picture."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import matplotlib
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from timeloom.demo_task import CHANNELS, TORCH_SECONDS
from timeloom.report import SolveReport
from timeloom.words import describe

if TYPE_CHECKING:
    from timeloom.demo import HeldOut, Settings, Training

CONSOLE = Console(highlight=False)


def introduce(settings: Settings) -> None:
    """Says what is about to run."""
    threads = torch.get_num_threads()
    CONSOLE.print(
        f"Task: did a noisy pointer turn more forwards or more backwards over {settings.length:,} steps?\n"
        f"{CHANNELS} channels, batch {settings.batch}, a GRU of {settings.hidden} units, {threads} CPU thread(s). "
        f"torch stops after {settings.torch_steps} steps or {TORCH_SECONDS:.0f} s, timeloom after {settings.steps}."
    )


@contextmanager
def progress_bars(totals: Mapping[str, int]) -> Iterator[Callable[[Training], None]]:
    """One bar for each training; yields the function that is told about every finished step."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TextColumn("{task.fields[latest]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=CONSOLE) as progress:
        bars = {name: progress.add_task(name, total=total, latest="") for name, total in totals.items()}

        def show(training: Training) -> None:
            latest = f"loss {training.losses[-1]:.4f}, {training.median_seconds:.3f} s a step"
            progress.update(bars[training.name], advance=1, latest=latest)

        yield show


def summarize(
    by_torch: Training, by_timeloom: Training, held_out: HeldOut, report: SolveReport, settings: Settings
) -> None:
    """Prints the measurements."""
    shared = len(by_torch.losses)
    both = (by_torch, by_timeloom)
    difference = max(abs(a - b) for a, b in zip(by_torch.losses, by_timeloom.losses, strict=False))

    speedup = by_torch.median_seconds / by_timeloom.median_seconds

    table = Table(title="Measured in this run")
    table.add_column("")
    for training in both:
        table.add_column(training.name, justify="right")
    table.add_row("training steps", *(str(len(t.losses)) for t in both))
    table.add_row("seconds a step (median)", *(f"{t.median_seconds:.3f}" for t in both))
    table.add_row("seconds in all", *(f"{sum(t.seconds):.1f}" for t in both))
    table.add_row("loss at step 1", *(f"{t.losses[0]:.6f}" for t in both))
    table.add_row(f"loss at step {shared}", *(f"{t.losses[shared - 1]:.6f}" for t in both))
    table.add_row("loss at its last step", *(f"{t.losses[-1]:.6f}" for t in both))
    table.add_row("held-out accuracy at its end", f"{held_out.accuracy_torch:.1%}", f"{held_out.accuracy_timeloom:.1%}")
    CONSOLE.print(table)
    CONSOLE.print(
        f"[bold]A training step is {speedup:.1f}x faster.[/bold]\n"
        f"The losses of the {shared} shared steps differ by at most {difference:.1e}.\n"
        f"timeloom's trained weights in torch.nn.GRU give the same held-out logits to "
        f"{held_out.logit_difference:.1e}.\n"
        f"The last {held_out.tail:,} steps alone point to the right label in {held_out.tail_agreement:.0%} "
        f"of the held-out sequences: the answer lies in the whole."
    )
    CONSOLE.print(f"Forward: {describe(report, settings.length)}", markup=False)
    if report.backward is not None:
        CONSOLE.print(f"Backward: {describe(report.backward, settings.length)}", markup=False)


def plot(by_torch: Training, by_timeloom: Training, settings: Settings) -> None:
    """Draws both loss curves over the steps, where they must coincide, and over the time they took."""
    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter

    styles: tuple[tuple[Training, dict[str, Any]], ...] = (
        (by_torch, {"color": "#e08214", "linewidth": 5.0, "alpha": 0.65, "solid_capstyle": "round"}),
        (by_timeloom, {"color": "#0b4f8a", "linewidth": 1.8}),
    )
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4.4), sharey=True, layout="constrained")
    over_steps, over_time = axes
    for training, style in styles:
        pace = f"{training.name}: {training.median_seconds:.3f} s a step"
        over_steps.plot(range(1, len(training.losses) + 1), training.losses, label=training.name, **style)
        over_time.plot(training.elapsed(), training.losses, label=pace, **style)
    over_time.set_xscale("log")
    over_time.xaxis.set_major_formatter(FuncFormatter(lambda seconds, _: f"{seconds:g}"))
    over_steps.set(xlabel="training step", ylabel="training loss", title="Step by step: the same losses")
    speedup = by_torch.median_seconds / by_timeloom.median_seconds
    over_time.set(xlabel="training time in seconds (log)", title=f"Over time: {speedup:.1f}x faster a step")
    over_steps.set_ylim(bottom=0)
    for panel in axes:
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    over_steps.legend(frameon=False, loc="upper right")
    over_time.legend(frameon=False, loc="lower left")
    figure.suptitle(
        f"One GRU classifier on the CPU: {settings.length:,} steps, {settings.hidden} units, batch {settings.batch}"
    )
    figure.savefig(settings.out, dpi=150)
    pyplot.close(figure)
    CONSOLE.print(f"Loss curves: {settings.out}", markup=False)
