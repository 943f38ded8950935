"""The same classifier trained in the multigrid paper's three ways, and in two of ours: shared by its experiments."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.harness import Clock, Results, attempt, curve, errors, made_on, markdown, plot_losses
from experiments.processes import torchrun
from timeloom.app.data import Splits
from timeloom.app.train.config import TrainConfig
from timeloom.app.train.metrics_file import read
from timeloom.app.train.trainer import Trainer

WAYS = {
    "GRU, torch": ("gru", "sequential"),
    "GRU, timeloom": ("gru", "auto"),
    "implicit GRU, in order": ("implicit-gru", "sequential"),
    "implicit GRU, multigrid as published": ("implicit-gru", "mgrit-paper"),
    "implicit GRU, exact multigrid": ("implicit-gru", "mgrit"),
}
"""Cell and solver."""
BY_EPOCH = "test_accuracy"
"""Of the weights after each epoch, as the paper draws it. The epoch is chosen by the validation, not by this."""


def train(way: str, splits: Splits, config: TrainConfig, folder: Path) -> Results:
    """One training: accuracy as trained and in order, time of a step, and what the solver did."""
    cell, solver = WAYS[way]
    config = replace(config, solver=solver, model=replace(config.model, cell=cell))
    folder.mkdir(parents=True)
    by_epoch: list[float] = []

    def look(row: Mapping[str, Any]) -> None:
        if row["kind"] == "validation":
            by_epoch.append(round(trainer.measure(splits.test).quality, 4))

    trainer = Trainer(config, splits, folder, None, look)
    trainer.run()
    rows = trainer.metrics.of("step")
    trainer.use_best()
    as_trained = trainer.measure(splits.test).quality
    for layer in trainer.model.recurrent_layers():
        layer.solver = "sequential"
    seconds, waited = [row["seconds"] for row in rows], sum(row["data_seconds"] for row in rows)
    return {
        "accuracy": as_trained,
        "accuracy_in_order": trainer.measure(splits.test).quality,
        "seconds_a_step": statistics.median(seconds),
        "waits_for_data": waited / (waited + sum(seconds)),
        "last_residual": rows[-1]["residual"],
        "fallbacks": sum(row["fallbacks"] for row in rows),
        BY_EPOCH: by_epoch,
        **curve(rows),
    }


def over_ranks(way: str, ranks: int, arguments: list[str], seconds: float) -> Results:
    """The same by `torchrun -m timeloom train`, time split over so many processes: its accuracy, losses and times."""
    cell, solver = WAYS[way]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        given = [
            "train",
            *arguments,
            "--cell",
            cell,
            "--solver",
            solver,
            "--out",
            str(out),
            "--compare",
            "0",
            "--device",
            "cpu",
        ]
        torchrun("timeloom", ranks, given, seconds)
        rows, summary = read(out / "metrics.jsonl"), json.loads((out / "summary.json").read_text())
    steps = [row for row in rows if row["kind"] == "step"]
    return {
        "accuracy": summary["test_quality"],
        "seconds_a_step": statistics.median(row["seconds"] for row in steps),
        "waits_for_data": summary["data_share"],
        "ranks": ranks,
        **curve(steps),
    }


def all_ways(splits: Splits, config: TrainConfig, place: Path, clock: Clock) -> dict[str, Results]:
    """Every way in turn; one that fails is told and costs the others nothing."""
    found: dict[str, Results] = {}
    for number, way in enumerate(WAYS):
        if not clock.over:
            found[way] = attempt({}, lambda w=way, n=number: train(w, splits, config, place / f"run{n}"))
            print(f"{way}: {found[way].get('error') or format(found[way]['accuracy'], '.1%')}", flush=True)
    return found


def setting(splits: Splits, config: TrainConfig) -> dict[str, int]:
    """Sizes of the data and the network."""
    return {
        "train": len(splits.train),
        "valid": len(splits.valid),
        "test": len(splits.test),
        "classes": len(splits.classes),
        "frames": len(splits.train.series[0]),
        "features": splits.channels,
        "hidden": config.model.hidden,
        "layers": config.model.layers,
        "batch": config.optim.batch,
        "epochs": config.optim.epochs,
    }


def good_ways(results: Results) -> dict[str, Results]:
    return {name: one for name, one in results["ways"].items() if "error" not in one}


def table(results: Results) -> str:
    """A line for each way."""
    about = results["setting"]
    lines = [
        f"{results['data']}: {about['train']} series to train, {about['valid']} to choose and {about['test']} to "
        "test on, "
        f"{about['classes']} classes, {about['frames']} steps of {about['features']} channels; "
        f"{about.get('layers', 1)} layer(s) of "
        f"{about['hidden']} units, batch {about['batch']}, {about['epochs']} epochs of Adam at 1e-3; "
        f"{made_on(results['machine'])}.",
        "",
    ]
    ways = good_ways(results)
    base = ways.get("GRU, torch", {}).get("seconds_a_step")
    cells = []
    for name, one in ways.items():
        seconds = one["seconds_a_step"]
        in_order = f"{one['accuracy_in_order']:.1%}" if "accuracy_in_order" in one else "–"
        ratio = f"{base / seconds:.2g}×" if base else "–"
        cells.append(
            [name, f"{one['accuracy']:.1%}", in_order, f"{1e3 * seconds:.0f} ms", ratio, f"{one['waits_for_data']:.1%}"]
        )
    head = ["way", "accuracy", "in order, same weights", "a training step", "over torch's GRU", "waits for data"]
    failed = [{"way": name, **one} for name, one in results["ways"].items()]
    return "\n".join([*lines, *markdown(head, cells), *errors(failed, ("way",))]) + "\n"


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Losses of all ways over steps and over time, and the accuracy by epoch of those that it was measured of: older
    results have that of the validation alone.
    """
    ways = good_ways(dict(results))
    kept = {key for one in ways.values() for key in one}
    plot_losses(ways, results["data"], path, BY_EPOCH if BY_EPOCH in kept else "validation_accuracy")
