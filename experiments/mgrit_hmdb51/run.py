"""The multigrid paper's video classifier: features of a ResNet, then a GRU over the frames, by several solvers.

    python -m experiments.mgrit_hmdb51.run                                    # generated clips; minutes on one core
    python -m experiments.mgrit_hmdb51.run --data HMDB51 --net resnet-18      # real clips, six classes
    python -m experiments.mgrit_hmdb51.run --data HMDB51 --classes all        # … all 51
    python -m experiments.mgrit_hmdb51.run --fast                             # all parts in small, seconds

HMDB51 is a folder of class folders with the folder testTrainMulti_7030_splits beside it. Features are computed once, in
parallel, and kept (docs/video.md). Then the same classifier is trained by Adam with torch's GRU, timeloom's, and the
paper's implicit GRU in order, by multigrid as published, and by exact multigrid; each is tested as it was trained, and
once more in order with the same weights. One command does a single training: `timeloom train --preset hmdb6 --data
video:HMDB51,classes=hmdb6`.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.losses import curve, plot_losses
from experiments.mgrit_hmdb51.standin import CLASSES, write_clips, write_net
from experiments.harness import command, facts, target, write
from timeloom.app.data import Splits, load, split
from timeloom.app.errors import InputError
from timeloom.app.train.config import ModelConfig, TrainConfig, preset
from timeloom.app.train.trainer import Trainer

WAYS = {
    "GRU, torch": ("gru", "sequential"),
    "GRU, timeloom": ("gru", "auto"),
    "implicit GRU, in order": ("implicit-gru", "sequential"),
    "implicit GRU, multigrid as published": ("implicit-gru", "mgrit-paper"),
    "implicit GRU, exact multigrid": ("implicit-gru", "mgrit"),
}
"""Cell and solver."""
FULL = {"each": 30, "frames": 128, "size": 96, "features": 1000, "hidden": 64, "epochs": 25, "batch": 32}
FAST = {"each": 4, "frames": 24, "size": 32, "features": 20, "hidden": 8, "epochs": 2, "batch": 12}


def stand_in(folder: Path, sizes: dict[str, int]) -> str:
    """Clips and a net made here, as `timeloom train` names them."""
    clips = write_clips(folder / "made", sizes["each"], sizes["frames"])
    net = write_net(folder / "net", sizes["features"], width=8)
    options = f"net={net},frames={sizes['frames']},size={sizes['size']},cache={folder / 'features'},workers=1"
    return f"video:{clips},{options}"


def train(way: str, splits: Splits, config: TrainConfig, folder: Path) -> dict[str, Any]:
    """One training: accuracy as trained and in order, time of a step, and what the solver did."""
    cell, solver = WAYS[way]
    config = replace(config, solver=solver, model=replace(config.model, cell=cell))
    folder.mkdir(parents=True)
    trainer = Trainer(config, splits, folder, None, lambda row: None)
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
        **curve(rows),
    }


def table(results: dict[str, Any]) -> str:
    """A line for each way."""
    about = results["setting"]
    lines = [
        f"{results['data']}: {about['train']} clips to train, {about['valid']} to choose and {about['test']} to test "
        f"on, {about['classes']} classes, {about['frames']} frames of {about['features']} features; {about['hidden']} "
        f"units, batch {about['batch']}, {about['epochs']} epochs of Adam at 1e-3; {results['machine']['threads']} "
        f"thread(s).",
        "",
        "| way | accuracy | in order, same weights | a training step | over torch's GRU | waits for data |",
        "| --- | --: | --: | --: | --: | --: |",
    ]
    base = results["ways"]["GRU, torch"]["seconds_a_step"]
    for name, one in results["ways"].items():
        seconds = one["seconds_a_step"]
        lines.append(
            f"| {name} | {one['accuracy']:.1%} | {one['accuracy_in_order']:.1%} | {1e3 * seconds:.0f} ms | "
            f"{base / seconds:.2g}× | {one['waits_for_data']:.1%} |"
        )
    return "\n".join(lines) + "\n"


def plot(results: dict[str, Any], path: Path) -> None:
    """Losses of all ways over steps and over time."""
    plot_losses(results["ways"], results["data"], path)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command(__doc__)
    parser.add_argument("--data", type=Path, help="a folder of class folders; without it, clips are generated")
    parser.add_argument("--net", default="resnet-18", help="with --data: as the option net= of video: (resnet-18)")
    parser.add_argument("--classes", default="hmdb6", help="with --data: all, hmdb6 or names joined by + (hmdb6)")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        if options.data is None:
            sizes, name = FAST if options.fast else FULL, f"generated stand-in for HMDB51 ({len(CLASSES)} classes)"
            optim = replace(preset("hmdb6").optim, epochs=sizes["epochs"], batch=sizes["batch"])
            model = ModelConfig(hidden=sizes["hidden"], pooling="last")
            config = replace(preset("hmdb6"), data=stand_in(place, sizes), model=model, optim=optim)
        else:
            name = f"HMDB51, {options.classes}"
            config = replace(preset("hmdb6"), data=f"video:{options.data},net={options.net},classes={options.classes}")
        try:
            splits = split(load(config.data), config.valid_fraction, config.test_fraction, config.seed)
        except InputError as error:
            parser.error(str(error))
        results: dict[str, Any] = {"data": name, "machine": facts(), "setting": setting(splits, config), "ways": {}}
        print(json.dumps({"data": name, **results["setting"]}), flush=True)
        for number, way in enumerate(WAYS):
            results["ways"][way] = train(way, splits, config, place / f"run{number}")
            print(f"{way}: accuracy {results['ways'][way]['accuracy']:.1%}", flush=True)
    print(table(results))
    folder = target(options, __file__)
    if folder is not None:
        base = "generated" if options.data is None else f"hmdb51_{options.classes.replace('+', '_')}"
        write(base, results, folder, table, plot)


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
        "batch": config.optim.batch,
        "epochs": config.optim.epochs,
    }


if __name__ == "__main__":
    main()
