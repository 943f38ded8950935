"""UCI-HAR's own files: the folder "UCI HAR Dataset", with train/ and test/ below it.

"Human Activity Recognition Using Smartphones" (Anguita, Ghio, Oneto, Parra and Reyes-Ortiz, 2013): 10,299 series of 128
steps and 9 channels, 6 activities, with its own split into train and test.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from timeloom.app.data.reading import EVERYTHING, Reading
from timeloom.app.data.records import Record, Split, Table
from timeloom.app.errors import InputError

INERTIAL = "Inertial Signals"
SIGNALS = tuple(f"{kind}_{axis}" for kind in ("body_acc", "body_gyro", "total_acc") for axis in "xyz")
ACTIVITIES = ("walking", "walking upstairs", "walking downstairs", "sitting", "standing", "laying")


def holds_uci_har(folder: Path) -> bool:
    return any((folder / part / INERTIAL).is_dir() for part in ("train", "test"))


def read_uci_har(folder: Path, reading: Reading = EVERYTHING) -> Table:
    """All series, each with its activity and part."""
    if reading.time:
        raise InputError(f"{folder}: UCI-HAR has no column {reading.time!r}; all steps are 1/50 s: leave --time out")
    unknown = [name for name in reading.columns or () if name not in SIGNALS]
    if unknown:
        raise InputError(f"{folder}: UCI-HAR has no column {unknown[0]!r}; its columns are {', '.join(SIGNALS)}")
    columns = tuple(reading.columns or SIGNALS)
    records = [*_part(folder, "train", columns), *_part(folder, "test", columns)]
    return Table(str(folder), "classification", records)


def _part(folder: Path, part: Split, columns: tuple[str, ...]) -> list[Record]:
    labels = _numbers(folder / part / f"y_{part}.txt")[:, 0].long()
    signals = [_numbers(folder / part / INERTIAL / f"{name}_{part}.txt") for name in columns]
    shapes = {tuple(signal.shape) for signal in signals}
    if len(shapes) > 1 or len(signals[0]) != len(labels):
        raise InputError(
            f"{folder / part}: signals of one shape and as many labels are needed, got shapes {sorted(shapes)} "
            f"and {len(labels)} labels"
        )
    if not 1 <= int(labels.min()) <= int(labels.max()) <= len(ACTIVITIES):
        raise InputError(f"{folder / part}: activities are 1 to 6, got {int(labels.min())} to {int(labels.max())}")
    values = torch.stack(signals, -1)  # (N, T, D)
    return [
        Record(f"{part}{i}", one, ACTIVITIES[int(k) - 1], part, columns)
        for i, (one, k) in enumerate(zip(values, labels, strict=True))
    ]


def _numbers(path: Path) -> Tensor:
    """A table of numbers with blanks between them, `(rows, columns)`."""
    if not path.is_file():
        raise InputError(
            f'{path}: no such file; give the folder that holds train/ and test/ of UCI-HAR, "UCI HAR Dataset"'
        )
    try:
        rows = [[float(word) for word in line.split()] for line in path.read_text().splitlines() if line.strip()]
        if not rows:
            raise ValueError("it is empty")
        return torch.tensor(rows)
    except ValueError as error:
        raise InputError(f"{path} is not a table of numbers ({error})") from None
