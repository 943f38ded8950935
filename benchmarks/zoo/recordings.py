"""Real series from a wheel: BasicMotions, which the package aeon contains. Nothing is downloaded."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from timeloom.app.data.ts import read_ts

CHANNELS, CLASSES = 6, 4
FILE = Path("datasets", "data", "BasicMotions", "BasicMotions_TRAIN.ts")


def missing() -> str:
    """What must be installed first; empty if the series are there."""
    return "" if _file() is not None else "no package aeon, whose wheel has the series"


def in_a_row(steps: int, batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random recordings in sequence, different for every sequence, `(T, B, CHANNELS)`, and their classes `(T, B)`."""
    series, classes = _all()
    length = series.shape[1]
    chosen = torch.randint(0, len(series), (-(-steps // length), batch), generator=generator)
    x = series[chosen].permute(0, 2, 1, 3).flatten(0, 1)[:steps]
    return x, classes[chosen].repeat_interleave(length, 0)[:steps]


@cache
def _all() -> tuple[Tensor, Tensor]:
    """Series `(N, T, CHANNELS)` of mean 0 and deviation 1, and their classes `(N,)`."""
    file = _file()
    if file is None:
        raise FileNotFoundError(missing())
    records = read_ts(file, None).checked().records
    names = sorted({str(record.label) for record in records})
    series = torch.stack([record.values for record in records]).float()
    deviation, mean = torch.std_mean(series, (0, 1))
    return (series - mean) / deviation, torch.tensor([names.index(str(record.label)) for record in records])


def _file() -> Path | None:
    package = find_spec("aeon")
    if package is None or not package.submodule_search_locations:
        return None
    file = Path(package.submodule_search_locations[0]) / FILE
    return file if file.is_file() else None
