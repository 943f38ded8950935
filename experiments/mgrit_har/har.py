"""UCI-HAR: its text files where they are given, and series of the same shape made here where not.

"Human Activity Recognition Using Smartphones" (Anguita, Ghio, Oneto, Parra and Reyes-Ortiz, 2013): 10,299 series of 128
steps and 9 channels, 6 activities, with its own split into train and test.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from timeloom.app.data.records import Record, Table

STEPS, NAME, STAND_IN = 128, "UCI-HAR", "generated stand-in for UCI-HAR"
SIGNALS = [f"{kind}_{axis}" for kind in ("body_acc", "body_gyro", "total_acc") for axis in "xyz"]
ACTIVITIES = ("walking", "walking upstairs", "walking downstairs", "sitting", "standing", "laying")


def read(folder: Path) -> Table:
    """The folder "UCI HAR Dataset", with train/ and test/ below it."""
    records = [record for part in ("train", "test") for record in _part(folder, part)]
    return Table(str(folder), "classification", records).checked()


def _part(folder: Path, part: str) -> list[Record]:
    labels = _numbers(folder / part / f"y_{part}.txt")[:, 0].long()
    signals = [_numbers(folder / part / "Inertial Signals" / f"{name}_{part}.txt") for name in SIGNALS]
    shapes = {tuple(signal.shape) for signal in signals}
    if len(shapes) > 1 or len(signals[0]) != len(labels):
        raise ValueError(
            f"{folder / part}: nine signals of one shape and as many labels are needed, got shapes {sorted(shapes)} "
            f"and {len(labels)} labels"
        )
    if not 1 <= int(labels.min()) <= int(labels.max()) <= len(ACTIVITIES):
        raise ValueError(f"{folder / part}: activities are 1 to 6, got {int(labels.min())} to {int(labels.max())}")
    values = torch.stack(signals, -1)  # (N, T, 9)
    split = "train" if part == "train" else "test"
    return [
        Record(f"{part}{i}", one, ACTIVITIES[int(k) - 1], split)
        for i, (one, k) in enumerate(zip(values, labels, strict=True))
    ]


def _numbers(path: Path) -> Tensor:
    if not path.is_file():
        raise ValueError(
            f'{path}: no such file; give the folder that holds train/ and test/ of UCI-HAR, "UCI HAR Dataset"'
        )
    try:
        rows = [[float(word) for word in line.split()] for line in path.read_text().splitlines() if line.strip()]
        return torch.tensor(rows)
    except ValueError as error:
        raise ValueError(f"{path} is not a table of numbers ({error})") from None


def generated(each: int, steps: int = STEPS) -> Table:
    """`each` series of every activity: movement of its own pace and posture of its own direction, with noise."""
    generator = torch.Generator().manual_seed(0)
    records = []
    for number, activity in enumerate(ACTIVITIES):
        pace = (0.30, 0.24, 0.36, 0.02, 0.03, 0.015)[number]
        posture = torch.zeros(9)
        posture[6 + number % 3] = 1.0
        for i in range(each):
            time = torch.arange(steps).unsqueeze(1) * pace * (1 + 0.1 * torch.randn(1, generator=generator))
            phase = 6.28 * torch.rand(9, generator=generator)
            wave = (0.6 if number < 3 else 0.1) * torch.sin(time + phase)
            values = posture + wave + 0.6 * torch.randn(steps, 9, generator=generator)
            records.append(Record(f"{activity} {i}", values, activity, "test" if i % 10 >= 7 else "train"))
    return Table(STAND_IN, "classification", records).checked()
