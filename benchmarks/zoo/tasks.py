"""Tasks that need memory, drawn from seeds: what a network is trained on before it is measured."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

Batch = tuple[Tensor, Tensor]
"""Inputs `(T, B, D)` and what to answer, `(T, B, K)`; of text, bytes `(T, B)` and the bytes that follow them."""
WINDOW = 200
"""Steps over which marked numbers are added up."""


@dataclass(frozen=True)
class Task:
    """How to draw a batch, and the widths of inputs and answers."""

    draw: Callable[[int, int, torch.Generator], Batch]
    inputs: int
    answers: int
    text: bool = False


def flip_flop(steps: int, batch: int, generator: torch.Generator) -> Batch:
    """Three bits: each is to be what its last pulse said, and pulses are rare."""
    pulses = torch.rand(steps, batch, 3, generator=generator) < 0.01
    signs = torch.where(torch.rand(steps, batch, 3, generator=generator) < 0.5, -1.0, 1.0)
    x = torch.where(pulses, signs, 0.0)
    last = torch.where(pulses, torch.arange(steps)[:, None, None], 0).cummax(0).values
    return x, x.gather(0, last)


def adding(steps: int, batch: int, generator: torch.Generator) -> Batch:
    """The sum of the marked numbers among the last WINDOW ones."""
    numbers = torch.rand(steps, batch, generator=generator)
    marks = (torch.rand(steps, batch, generator=generator) < 0.02).float()
    sums = (numbers * marks).cumsum(0)
    before = torch.cat([torch.zeros(min(WINDOW, steps), batch), sums[:-WINDOW]])
    return torch.stack([numbers, marks], -1), ((sums - before) / 4).unsqueeze(-1)


def amplifier(steps: int, batch: int, generator: torch.Generator) -> Batch:
    """A guitar's amplifier: a filter with a long memory, and a clipper behind it."""
    x = torch.randn(steps, batch, 1, generator=generator)
    x = 2 * F.avg_pool1d(x.permute(1, 2, 0), 9, 1, 4).permute(2, 0, 1)
    level, out = torch.zeros(batch, 1), []
    for sample in x.unbind(0):
        level = 0.995 * level + 0.05 * sample
        out.append(torch.tanh(3 * (sample + 0.5 * level)))
    return x, torch.stack(out)


def text(steps: int, batch: int, generator: torch.Generator) -> Batch:
    """Bytes of the standard library's sources, and those that follow them."""
    at = torch.randint(0, len(_library()) - steps - 1, (batch,), generator=generator)
    pieces = torch.stack([_library()[i : i + steps + 1] for i in at.tolist()], 1).long()
    return pieces[:-1], pieces[1:]


@cache
def _library() -> Tensor:
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)


TASKS = {
    "flip-flop": Task(flip_flop, 3, 3),
    "adding": Task(adding, 2, 1),
    "amplifier": Task(amplifier, 1, 1),
    "text": Task(text, 32, 256, text=True),
}
