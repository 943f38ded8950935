"""The multigrid paper's video classifier: features of a ResNet, then a GRU over the frames, by several solvers.

    python -m experiments.mgrit_hmdb51.run                                    # generated clips; minutes on one core
    python -m experiments.mgrit_hmdb51.run --data HMDB51 --net resnet-18      # real clips, six classes
    python -m experiments.mgrit_hmdb51.run --data HMDB51 --classes all        # … all 51
    python -m experiments.mgrit_hmdb51.run --data HMDB51 --split 9:1 --net resnet-50   # the paper's shares and nets
    python -m experiments.mgrit_hmdb51.run --ranks 4                          # and once more over 4 processes
    python -m experiments.mgrit_hmdb51.run --ranks 16 --shape resnet-50 --clips 10   # … a random net of that shape
    python -m experiments.mgrit_hmdb51.run --fast                             # all parts in small, seconds

HMDB51 is a folder of class folders with the folder testTrainMulti_7030_splits beside it. Features are computed once, in
parallel, and kept (docs/video.md). Then the same classifier is trained by Adam with torch's GRU, timeloom's, and the
paper's implicit GRU in order, by multigrid as published, and by exact multigrid; each is tested as it was trained, and
once more in order with the same weights. One command does a single training: `timeloom train --preset hmdb6 --data
video:HMDB51,classes=hmdb6`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.harness import attempt, begin, command, facts, folder_of, only_with_data, whole, write
from experiments.mgrit.classify import all_ways, draw, over_ranks, setting, table
from experiments.mgrit_hmdb51.net_worker import SHAPES
from experiments.mgrit_hmdb51.standin import CLASSES, write_clips, write_net
from timeloom.app.data import load, split
from timeloom.app.errors import InputError
from timeloom.app.train.config import ModelConfig, TrainConfig, preset

FULL = {"each": 30, "frames": 128, "size": 96, "features": 1000, "hidden": 64, "epochs": 25, "batch": 32}
FAST = {"each": 4, "frames": 32, "size": 32, "features": 20, "hidden": 8, "epochs": 2, "batch": 12}


def stand_in(folder: Path, sizes: dict[str, int], shape: str | None = None) -> str:
    """Clips and a net made here, as `timeloom train` names them."""
    clips = write_clips(folder / "made", sizes["each"], sizes["frames"])
    net = write_net(folder / "net", sizes["features"], width=8, shape=SHAPES[shape] if shape else None)
    options = f"net={net},frames={sizes['frames']},size={sizes['size']},cache={folder / 'features'},workers=1"
    return f"video:{clips},{options}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command(__doc__)
    parser.add_argument("--data", type=Path, help="a folder of class folders; without it, clips are generated")
    parser.add_argument("--net", default="resnet-18", help="with --data: as the option net= of video: (resnet-18)")
    parser.add_argument("--classes", default="hmdb6", help="with --data: all, hmdb6 or names joined by + (hmdb6)")
    parser.add_argument(
        "--split",
        choices=("official", "9:1"),
        default="official",
        help="with --data: the set's own split files, or one clip in ten to test on, as in the paper (of the "
        "others, one in ten chooses the epoch)",
    )
    parser.add_argument(
        "--shape", choices=tuple(SHAPES), help="of the random net that sees generated clips (default: a few blocks)"
    )
    parser.add_argument("--clips", type=whole, help=f"generated ones of a class (default: {FULL['each']})")
    parser.add_argument("--epochs", type=whole, help="(default: the preset's, fewer of generated clips)")
    parser.add_argument(
        "--ranks", type=whole, help="multigrid once more under torchrun, time split over so many processes"
    )
    options = begin(parser, arguments)
    only_with_data(parser, options, "net", "classes", "split")
    if (options.shape or options.clips) and options.data is not None:
        parser.error("--shape, --clips: only of generated clips, whose net is random; --net names that of real ones")
    if options.ranks and options.device == "cuda":
        parser.error("--ranks: its processes run on the CPU, beside which times of a GPU say nothing; leave one out")
    clock, sizes = options.clock, dict(FAST if options.fast else FULL)
    sizes["each"] = options.clips or sizes["each"]
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        config = preset("hmdb6")
        if options.data is None:
            name = f"generated stand-in for HMDB51 ({len(CLASSES)} classes)"
            name += f", a random {options.shape}" if options.shape else ""
            config = replace(
                config,
                data=stand_in(place, sizes, options.shape),
                model=ModelConfig(hidden=sizes["hidden"], pooling="last"),
                optim=replace(config.optim, epochs=sizes["epochs"], batch=sizes["batch"]),
            )
        else:
            drawn = ",splits=random" if options.split == "9:1" else ""
            small = f",frames={sizes['frames']},size={sizes['size']}" if options.fast else ""
            name = f"{options.data.name}, {options.classes}, {Path(options.net).name}, {options.split} split"
            source = f"video:{options.data},net={options.net},classes={options.classes}{drawn}{small}"
            epochs = sizes["epochs"] if options.fast else config.optim.epochs
            config = replace(config, data=source, optim=replace(config.optim, epochs=epochs))
        if options.split == "9:1":
            config = replace(config, test_fraction=0.1, valid_fraction=0.1)
        epochs = options.epochs or config.optim.epochs
        config = replace(config, device=options.device, optim=replace(config.optim, epochs=epochs))
        together: dict[str, Any] = {}
        if options.ranks:  # first, so that its processes share the making of features, which are kept for the others
            way, given = "implicit GRU, multigrid as published", as_arguments(config)
            found = attempt({}, lambda: over_ranks(way, options.ranks, given, 3600))
            together = {f"{way}, {options.ranks} processes": found}
        try:
            splits = split(load(config.data), config.valid_fraction, config.test_fraction, config.seed)
        except InputError as error:
            parser.error(str(error))
        results: dict[str, Any] = {"data": name, "machine": facts(options.device), "setting": setting(splits, config)}
        print(json.dumps({"data": name, **results["setting"]}), flush=True)
        results["ways"] = all_ways(splits, config, place, clock) | together
    print(table(results))
    write(file_name(options), results, folder_of(options, __file__), table, draw)


def file_name(options: argparse.Namespace) -> str:
    """Of the results: runs on other clips, nets, shares or devices do not take one another's place."""
    parts = ["generated", *([options.shape] if options.shape else [])]
    if options.data is not None:
        parts = [options.data.name, options.classes.replace("+", "_")]
        parts += [] if options.net == "resnet-18" else [Path(options.net).name]
        parts += [] if options.split == "official" else ["9_1"]
    return "_".join([*parts, *([] if options.device == "cpu" else [options.device])])


def as_arguments(config: TrainConfig) -> list[str]:
    """The options of `timeloom train` that make this configuration from its preset."""
    return [
        "--preset",
        "hmdb6",
        "--data",
        config.data,
        "--hidden",
        str(config.model.hidden),
        "--epochs",
        str(config.optim.epochs),
        "--batch",
        str(config.optim.batch),
        "--test-fraction",
        str(config.test_fraction),
        "--valid-fraction",
        str(config.valid_fraction),
    ]


if __name__ == "__main__":
    main()
