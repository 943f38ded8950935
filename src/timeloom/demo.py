"""`python -m timeloom.demo`: one GRU classifier, trained with torch.nn.GRU and with timeloom.GRU side by side.

Both start from the same weights and see the same batches, so their losses must agree step by step; only the time
differs. Everything printed and plotted is measured in this run.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from timeloom.demo_task import CHANNELS, SEGMENT, Turning, draw_turning
from timeloom.nn import GRU
from timeloom.report import SolveReport

try:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Table
except ImportError as error:
    raise SystemExit(f"the demo needs {error.name}: pip install 'timeloom[demo]'") from error

LEARNING_RATE = 2e-2
# The gradient is tiny until the network sees its first turns and then grows a thousandfold. A short memory of its
# size and a floor under it keep Adam from leaping there, which would also blow up rounding differences.
ADAM = {"betas": (0.9, 0.9), "eps": 1e-4}
CLIP = 1.0
HELD_OUT = 64
TAIL = 1024


@dataclass(frozen=True)
class Settings:
    """What the command line asked for."""

    steps: int
    torch_steps: int
    length: int
    hidden: int
    batch: int
    seed: int
    out: Path


class Classifier(nn.Module):
    """A recurrent layer, the mean of its states over time, and a linear readout of two classes."""

    def __init__(self, recurrent: nn.Module, hidden: int) -> None:
        super().__init__()
        self.recurrent = recurrent
        self.readout = nn.Linear(hidden, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        states, _ = self.recurrent(inputs)
        logits: Tensor = self.readout(states.mean(dim=0))
        return logits


@dataclass
class Training:
    """A classifier in training, with the loss and the wall-clock time of each of its steps."""

    name: str
    model: Classifier
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=LEARNING_RATE, **ADAM)

    def step(self, batch: Turning) -> None:
        """One training step: forward, backward, clip and update are all on the clock."""
        begin = time.perf_counter()
        loss = nn.functional.cross_entropy(self.model(batch.inputs), batch.labels)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        value = loss.item()
        self.seconds.append(time.perf_counter() - begin)
        self.losses.append(value)

    @property
    def median_seconds(self) -> float:
        return statistics.median(self.seconds)

    def elapsed(self) -> list[float]:
        """Training time spent by the end of each step."""
        total, out = 0.0, []
        for spent in self.seconds:
            total += spent
            out.append(total)
        return out


def build(settings: Settings) -> tuple[Training, Training]:
    """The same classifier twice, with the same initial weights: on torch.nn.GRU and on timeloom.GRU."""
    torch.manual_seed(settings.seed)
    by_torch = Classifier(nn.GRU(CHANNELS, settings.hidden), settings.hidden)
    by_timeloom = Classifier(GRU(CHANNELS, settings.hidden), settings.hidden)
    by_timeloom.load_state_dict(by_torch.state_dict())
    return Training("torch.nn.GRU", by_torch), Training("timeloom.GRU", by_timeloom)


def warm_up(trainings: Sequence[Training], settings: Settings) -> None:
    """One untimed step of a throwaway copy of each on a shorter sequence: libraries load and kernels are built once."""
    batch = draw_turning(
        min(settings.length, 1024), settings.batch, torch.Generator().manual_seed(settings.seed)
    )
    for training in trainings:
        Training(training.name, deepcopy(training.model)).step(batch)


def train(by_torch: Training, by_timeloom: Training, settings: Settings, console: Console) -> None:
    """Trains both in turn on the same batches; torch stops after its share of the steps, timeloom goes on."""
    generator = torch.Generator().manual_seed(settings.seed + 1)
    columns = (
        TextColumn("{task.description:<12}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.4f}   {task.fields[pace]:7.3f} s/step"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:

        def track(training: Training, total: int) -> Callable[[Turning], None]:
            bar = progress.add_task(training.name, total=total, loss=float("nan"), pace=float("nan"))

            def advance(batch: Turning) -> None:
                training.step(batch)
                progress.update(bar, advance=1, loss=training.losses[-1], pace=training.median_seconds)

            return advance

        step_torch = track(by_torch, settings.torch_steps)
        step_timeloom = track(by_timeloom, settings.steps)
        for step in range(settings.steps):
            batch = draw_turning(settings.length, settings.batch, generator)
            step_timeloom(batch)
            if step < settings.torch_steps:
                step_torch(batch)


@dataclass(frozen=True)
class HeldOut:
    """Accuracies on sequences neither model was trained on."""

    accuracy_torch: float
    accuracy_timeloom: float
    logit_difference: float
    """Largest difference of the logits when torch.nn.GRU runs timeloom's trained weights."""
    tail: float


def evaluate(by_torch: Training, by_timeloom: Training, settings: Settings) -> HeldOut:
    """Measures both models, and timeloom's weights in torch.nn.GRU too: the weights must not need the solver."""
    batch = draw_turning(settings.length, HELD_OUT, torch.Generator().manual_seed(settings.seed + 2))

    def accuracy(logits: Tensor) -> float:
        return (logits.argmax(dim=-1) == batch.labels).float().mean().item()

    transplanted = deepcopy(by_torch.model)
    transplanted.load_state_dict(by_timeloom.model.state_dict())
    with torch.no_grad():
        logits = by_timeloom.model(batch.inputs)
        return HeldOut(
            accuracy_torch=accuracy(by_torch.model(batch.inputs)),
            accuracy_timeloom=accuracy(logits),
            logit_difference=(logits - transplanted(batch.inputs)).abs().max().item(),
            tail=batch.agreement_of_tail(TAIL),
        )


def describe(report: SolveReport, length: int) -> str:
    """The solver's report in words."""
    if report.solver == "sequential":
        sentence = f"ran all {length:,} steps one after the other"
    else:
        chunks = -(-length // report.chunk)
        sentence = (
            f"cut {length:,} steps into {chunks:,} chunks of {report.chunk}, ran them all at once, {report.solver}, "
            f"in {report.iterations} sweep{'s' if report.iterations != 1 else ''}"
        )
        if report.residuals:
            sentence += (
                f"; the largest jump left between two chunks is {report.residuals[-1]:.1e} "
                f"(tolerance {report.tolerance:.0e})"
            )
        if report.fell_back:
            sentence += "; the sweeps did not contract, so the rest was run sequentially"
    return f"{sentence}. {report.reason}".strip()


def summarize(
    by_torch: Training,
    by_timeloom: Training,
    held_out: HeldOut,
    report: SolveReport,
    settings: Settings,
    console: Console,
) -> None:
    """Prints what was measured."""
    shared = settings.torch_steps
    pairs = zip(by_torch.losses, by_timeloom.losses, strict=False)
    difference = max(abs(a - b) for a, b in pairs)
    speedup = by_torch.median_seconds / by_timeloom.median_seconds

    table = Table(title="Measured in this run")
    table.add_column("")
    table.add_column(by_torch.name, justify="right")
    table.add_column(by_timeloom.name, justify="right")
    rows = (
        ("training steps", *(str(len(t.losses)) for t in (by_torch, by_timeloom))),
        ("seconds a step (median)", *(f"{t.median_seconds:.3f}" for t in (by_torch, by_timeloom))),
        ("training time, s", *(f"{sum(t.seconds):.1f}" for t in (by_torch, by_timeloom))),
        ("first loss", *(f"{t.losses[0]:.6f}" for t in (by_torch, by_timeloom))),
        (f"loss at step {shared}", *(f"{t.losses[shared - 1]:.6f}" for t in (by_torch, by_timeloom))),
        ("last loss", *(f"{t.losses[-1]:.6f}" for t in (by_torch, by_timeloom))),
        ("held-out accuracy", f"{held_out.accuracy_torch:.1%}", f"{held_out.accuracy_timeloom:.1%}"),
    )
    for row in rows:
        table.add_row(*row)
    console.print(table)
    console.print(f"[bold]Speedup of a training step: {speedup:.1f}x[/bold]")
    console.print(f"Losses agree: largest difference over the {shared} shared steps is {difference:.1e}")
    console.print(
        f"timeloom's trained weights in torch.nn.GRU: held-out logits differ by at most {held_out.logit_difference:.1e}"
    )
    console.print(
        f"A reader of the last {TAIL:,} steps alone, seeing every turn, would be right for {held_out.tail:.0%}: "
        "the label needs the whole sequence"
    )
    console.print(f"Forward:  {describe(report, settings.length)}", highlight=False)
    if report.backward is not None:
        console.print(f"Backward: {describe(report.backward, settings.length)}", highlight=False)


def plot(by_torch: Training, by_timeloom: Training, settings: Settings) -> None:
    """Draws both loss curves over steps, where they must coincide, and over wall-clock time, where they must not."""
    try:
        import matplotlib
    except ImportError as error:
        raise SystemExit(f"the demo needs {error.name}: pip install 'timeloom[demo]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    styles: tuple[tuple[Training, dict[str, Any]], ...] = (
        (by_torch, {"color": "#8c8c8c", "linewidth": 5.0, "solid_capstyle": "round"}),
        (by_timeloom, {"color": "#0b6e99", "linewidth": 1.8}),
    )
    figure, (over_steps, over_time) = pyplot.subplots(
        1, 2, figsize=(10, 4.2), sharey=True, layout="constrained"
    )
    for training, style in styles:
        label = f"{training.name} ({training.median_seconds:.3f} s a step)"
        over_steps.plot(range(1, len(training.losses) + 1), training.losses, label=training.name, **style)
        over_time.plot(training.elapsed(), training.losses, label=label, **style)
    over_time.set_xscale("log")
    over_steps.set(xlabel="training step", ylabel="training loss", title="Same loss, step by step")
    speedup = by_torch.median_seconds / by_timeloom.median_seconds
    over_time.set(xlabel="training time, s (log)", title=f"Wall-clock time: {speedup:.1f}x a step")
    for axes in (over_steps, over_time):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="lower left")
    figure.suptitle(
        f"GRU classifier, T={settings.length:,}, hidden {settings.hidden}, batch {settings.batch}, CPU"
    )
    figure.savefig(settings.out, dpi=150)
    pyplot.close(figure)


def _at_least(minimum: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r}") from None
        if value < minimum:
            raise argparse.ArgumentTypeError(f"expected at least {minimum}, got {value}")
        return value

    return parse


def _picture(text: str) -> Path:
    path = Path(text)
    if path.suffix.lower() != ".png":
        raise argparse.ArgumentTypeError(f"expected a file name that ends in .png, got {text!r}")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"the folder {str(path.parent)!r} does not exist; create it first")
    return path


def parse_settings(arguments: Sequence[str] | None) -> Settings:
    """Reads the command line; what cannot run is refused here, before minutes are spent on it."""
    parser = argparse.ArgumentParser(prog="python -m timeloom.demo", description=__doc__)
    parser.add_argument(
        "--steps", type=_at_least(1), default=80, help="training steps of timeloom (default 80)"
    )
    parser.add_argument(
        "--torch-steps",
        type=_at_least(1),
        default=24,
        help="training steps of torch, on the same batches (default 24)",
    )
    parser.add_argument(
        "--length", type=_at_least(SEGMENT), default=16384, help="steps in a sequence (default 16384)"
    )
    parser.add_argument("--hidden", type=_at_least(1), default=32, help="units of the GRU (default 32)")
    parser.add_argument(
        "--batch", type=_at_least(2), default=8, help="sequences in a batch, an even number (default 8)"
    )
    parser.add_argument("--seed", type=_at_least(0), default=0, help="seed of weights and data (default 0)")
    parser.add_argument(
        "--out",
        type=_picture,
        default=Path("timeloom-demo.png"),
        help="the picture (default timeloom-demo.png)",
    )
    settings = Settings(**vars(parser.parse_args(arguments)))
    if settings.batch % 2:
        parser.error(f"argument --batch: expected an even number (half of each class), got {settings.batch}")
    if settings.torch_steps > settings.steps:
        parser.error(f"argument --torch-steps: {settings.torch_steps} is more than --steps {settings.steps}")
    return settings


def main(arguments: Sequence[str] | None = None) -> int:
    settings = parse_settings(arguments)
    console = Console()
    console.print(
        f"Task: did a noisy pointer turn more forwards or more backwards over {settings.length:,} steps? "
        f"{CHANNELS} channels, batch {settings.batch}, GRU of {settings.hidden} units, "
        f"{torch.get_num_threads()} CPU threads. torch stops after {settings.torch_steps} steps.",
        highlight=False,
    )
    by_torch, by_timeloom = build(settings)
    warm_up((by_torch, by_timeloom), settings)
    train(by_torch, by_timeloom, settings, console)
    report = by_timeloom.model.recurrent.reports[0]
    summarize(by_torch, by_timeloom, evaluate(by_torch, by_timeloom, settings), report, settings, console)
    plot(by_torch, by_timeloom, settings)
    console.print(f"Loss curves: {settings.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
