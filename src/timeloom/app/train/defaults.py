"""Settings that fit the data, for what the user has not said.

Chosen on real sets of 20 to 900 series, and compared with the settings of the built-in task, on these and on sets that
had no part in the choice: `python -m benchmarks.defaults`, stored in benchmarks/results/defaults.md.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace

from timeloom.app.data import Splits
from timeloom.app.train.config import ModelConfig, TrainConfig

UPDATES = 600
"""Training steps that small sets need to be learned; fewer where an epoch is long."""
MOST_EPOCHS, FEWEST_EPOCHS = 120, 10
MOST_WORK = 40_000_000
"""Time steps, of all series and epochs together, that a training should take: minutes on a CPU."""
LONG = 4096
"""Steps of a series from which on one direction and one layer are the default: two of each cost four times as much."""


def fitted(config: TrainConfig, splits: Splits, given: Collection[str] = ()) -> TrainConfig:
    """The default settings for these data; those of a named preset, and of the built-in task, are left alone.

    given: names of settings that others follow where they are the user's: `batch` and `epochs`.
    """
    if config.preset != "default" or splits.source == "turning":
        return config
    count = len(splits.train)
    steps = sum(len(series) for series in splits.train.series)
    longest = max(len(series) for series in splits.train.series)
    batch = config.optim.batch if "batch" in given else min(16, max(4, count // 8))
    an_epoch = math.ceil(count / batch)
    by_work = MOST_WORK // steps
    epochs = max(FEWEST_EPOCHS, min(MOST_EPOCHS, math.ceil(UPDATES / an_epoch), by_work))
    epochs = config.optim.epochs if "epochs" in given else epochs
    deep = longest < LONG
    model = ModelConfig(hidden=64, layers=2 if deep else 1, bidirectional=deep, residual=True, norm=True, dropout=0.1)
    patience = max(20, epochs // 2)
    optim = replace(
        config.optim, lr=3e-3, batch=batch, epochs=epochs, warmup=epochs * an_epoch // 20,
        patience=patience if patience < epochs else 0,
    )  # fmt: skip
    return replace(config, model=model, optim=optim)
