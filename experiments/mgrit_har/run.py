"""The setting that the multigrid paper's code ships: activities told from a phone's motion, by several solvers.

    python -m experiments.mgrit_har.run                             # generated series; minutes on one core
    python -m experiments.mgrit_har.run --data "UCI HAR Dataset"    # the real ones
    python -m experiments.mgrit_har.run --fast                      # all parts in small, seconds

UCI-HAR: 128 steps of 9 channels, 6 activities; two layers of 100 units, batch 100, Adam at 1e-3, a label from the last
state. The same classifier is trained by torch's GRU, by timeloom's, and as implicit GRU in order, by multigrid as
published and by exact multigrid; each is tested as it was trained, and in order with the same weights. `timeloom train
--preset uci-har` is one such training alone.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.harness import begin, command, facts, folder_of, whole, write
from experiments.mgrit.classify import all_ways, draw, setting, table
from experiments.mgrit_har.har import NAME, STAND_IN, generated
from timeloom.app.data import split
from timeloom.app.data.uci_har import read_uci_har
from timeloom.app.errors import InputError
from timeloom.app.train.config import preset as config_of

FULL = {"each": 150, "steps": 128, "hidden": 100, "batch": 100}
FAST = {"each": 6, "steps": 32, "hidden": 4, "batch": 12}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command(__doc__)
    parser.add_argument("--data", type=Path, help='the folder "UCI HAR Dataset"; without it, series are generated')
    parser.add_argument("--epochs", type=whole, help="(default: the preset's)")
    options = begin(parser, arguments)
    preset = config_of("uci-har")
    sizes = FAST if options.fast else FULL
    try:
        series = generated(sizes["each"], sizes["steps"]) if options.data is None else read_uci_har(options.data)
        splits = split(series.checked(), 0.1, 0.2, 0)
    except InputError as error:
        parser.error(str(error))
    epochs = options.epochs or (2 if options.fast else preset.optim.epochs)
    config = replace(
        preset,
        device=options.device,
        compare=0,
        model=replace(preset.model, hidden=sizes["hidden"]),
        optim=replace(preset.optim, epochs=epochs, batch=sizes["batch"]),
    )
    name = STAND_IN if options.data is None else f"{NAME} ({options.data.name})"
    results: dict[str, Any] = {"data": name, "machine": facts(options.device), "setting": setting(splits, config)}
    print(json.dumps({"data": name, **results["setting"]}), flush=True)
    with tempfile.TemporaryDirectory() as place:
        results["ways"] = all_ways(splits, config, Path(place), options.clock)
    print(table(results))
    base = ("generated" if options.data is None else "har") + ("" if options.device == "cpu" else f"_{options.device}")
    write(base, results, folder_of(options, __file__), table, draw)


if __name__ == "__main__":
    main()
