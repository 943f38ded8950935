"""Trains one GRU classifier with torch.nn.GRU and with timeloom.GRU, side by side on the CPU.

Both start from the same weights and see the same batches, so their losses must agree step by step; only the
time differs. Everything printed and plotted is measured in this run.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor, nn

from timeloom.demo_task import CHANNELS, SEGMENT, TORCH_SECONDS, Turning, draw_turning
from timeloom.nn import GRU

LEARNING_RATE = 5e-3
# A shorter memory of past gradients than torch's default: with that one, the loss of this task jumped up again (to 0.6,
# 7.5 and 11.5 with seeds 0, 1 and 2) after it had been learned; with this one it stayed below 0.15.
BETAS = (0.5, 0.9)
EPSILON = 1e-5
CLIP = 1.0
VOTE = 8.0
"""Logit of a class that gets the vote of every step; large, as the two classes differ in few of the votes."""
HELD_OUT = 64
TORCH_STEPS = 24


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
    """A recurrent layer whose every state casts a bounded vote for each of two classes; the votes are averaged."""

    def __init__(self, recurrent: nn.Module, hidden: int) -> None:
        super().__init__()
        self.recurrent = recurrent
        self.readout = nn.Linear(hidden, 2)
        nn.init.zeros_(self.readout.bias)  # neither class is favoured at the start

    def forward(self, inputs: Tensor) -> Tensor:
        states, _ = self.recurrent(inputs)
        votes: Tensor = self.readout(states).tanh()  # (T, B, 2)
        return VOTE * votes.mean(dim=0)


@dataclass
class Training:
    """A classifier in training, with the loss and the wall-clock time of each of its steps."""

    name: str
    model: Classifier
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=LEARNING_RATE, betas=BETAS, eps=EPSILON)

    def step(self, batch: Turning) -> None:
        """One training step: forward, backward, clip and update are all on the clock."""
        begin = time.perf_counter()
        loss = nn.functional.cross_entropy(self.model(batch.inputs), batch.labels)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.losses.append(loss.item())
        self.seconds.append(time.perf_counter() - begin)

    @property
    def median_seconds(self) -> float:
        return statistics.median(self.seconds)

    def elapsed(self) -> list[float]:
        """Training time spent by the end of each step."""
        return list(accumulate(self.seconds))


@dataclass(frozen=True)
class HeldOut:
    """What both models make of sequences they were not trained on."""

    accuracy_torch: float
    accuracy_timeloom: float
    logit_difference: float
    """Largest difference of the logits when torch.nn.GRU runs timeloom's trained weights."""
    tail: int
    tail_agreement: float
    """Share of the sequences whose last `tail` steps alone point to the label."""


def build(settings: Settings) -> tuple[Training, Training]:
    """The same classifier twice, with the same initial weights: on torch.nn.GRU and on timeloom.GRU."""
    torch.manual_seed(settings.seed)
    by_torch = Classifier(nn.GRU(CHANNELS, settings.hidden), settings.hidden)
    by_timeloom = Classifier(GRU(CHANNELS, settings.hidden), settings.hidden)
    by_timeloom.load_state_dict(by_torch.state_dict())
    return Training("torch.nn.GRU", by_torch), Training("timeloom.GRU", by_timeloom)


def warm_up(trainings: Sequence[Training], settings: Settings) -> None:
    """An untimed step of a throwaway copy of each on a shorter sequence: libraries load, kernels are built."""
    generator = torch.Generator().manual_seed(settings.seed)
    batch = draw_turning(min(settings.length, 1024), settings.batch, generator)
    for training in trainings:
        Training(training.name, deepcopy(training.model)).step(batch)


def train(by_torch: Training, by_timeloom: Training, settings: Settings, show: Callable[[Training], None]) -> None:
    """Trains both in turn on the same batches; torch stops after its share of steps or time, timeloom goes on."""
    generator = torch.Generator().manual_seed(settings.seed + 1)
    for step in range(settings.steps):
        batch = draw_turning(settings.length, settings.batch, generator)
        torch_goes_on = step < settings.torch_steps and sum(by_torch.seconds) < TORCH_SECONDS
        for training in (by_torch, by_timeloom) if torch_goes_on else (by_timeloom,):
            training.step(batch)
            show(training)


def evaluate(by_torch: Training, by_timeloom: Training, settings: Settings) -> HeldOut:
    """Measures both models, and timeloom's weights in torch.nn.GRU too: they must not need the solver."""
    batch = draw_turning(settings.length, HELD_OUT, torch.Generator().manual_seed(settings.seed + 2))
    tail = max(1, settings.length // 16)

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
            tail=tail,
            tail_agreement=batch.agreement_of_tail(tail),
        )


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
    parser = argparse.ArgumentParser(
        prog="python -m timeloom.demo",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--steps", type=_at_least(1), default=80, help="training steps of timeloom")
    add(
        "--torch-steps", type=_at_least(1), default=argparse.SUPPRESS, metavar="STEPS",
        help=f"training steps of torch, on the same batches (default: {TORCH_STEPS}, or all if there are fewer)",
    )  # fmt: skip
    add("--length", type=_at_least(SEGMENT), default=16384, help="steps in a sequence")
    add("--hidden", type=_at_least(1), default=32, help="units of the GRU")
    add("--batch", type=_at_least(2), default=4, help="sequences in a batch, an even number")
    add("--seed", type=_at_least(0), default=0, help="seed of weights and data")
    add("--out", type=_picture, default=Path("timeloom-demo.png"), help="where the picture goes")
    given = vars(parser.parse_args(arguments))
    settings = Settings(**{"torch_steps": min(TORCH_STEPS, given["steps"]), **given})
    if settings.batch % 2:
        parser.error(f"argument --batch: expected an even number (half of each class), got {settings.batch}")
    if settings.torch_steps > settings.steps:
        parser.error(f"argument --torch-steps: {settings.torch_steps} is more than --steps {settings.steps}")
    return settings


def main(arguments: Sequence[str] | None = None) -> int:
    settings = parse_settings(arguments)
    try:
        from timeloom.demo_report import introduce, plot, progress_bars, summarize
    except ModuleNotFoundError as error:
        print(f"the demo needs {error.name}: pip install 'timeloom[demo]'", file=sys.stderr)
        return 1
    introduce(settings)
    by_torch, by_timeloom = build(settings)
    warm_up((by_torch, by_timeloom), settings)
    with progress_bars({by_torch.name: settings.torch_steps, by_timeloom.name: settings.steps}) as show:
        train(by_torch, by_timeloom, settings, show)
    layer = by_timeloom.model.recurrent
    assert isinstance(layer, GRU)
    report = layer.reports[0]  # of the last training step; the evaluation writes its own
    summarize(by_torch, by_timeloom, evaluate(by_torch, by_timeloom, settings), report, settings)
    plot(by_torch, by_timeloom, settings)
    return 0


if __name__ == "__main__":
    sys.exit(main())
