"""Why a training went no further, and how to go on with it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from timeloom.app.machine import counted
from timeloom.app.train.objective import chosen_by

if TYPE_CHECKING:
    from timeloom.app.train.trainer import Trainer


def resume_command(folder: Path) -> str:
    return f"timeloom train --resume {shlex.quote(str(folder))}"


def ending(trainer: Trainer) -> str:
    """Of a run that has ended by itself."""
    optim, progress, again = trainer.config.optim, trainer.progress, resume_command(trainer.folder)
    if not trainer.out_of_patience:
        return f"All its epochs ({optim.epochs}) were run. To train on: {again} --epochs {2 * optim.epochs}"
    metric, without = chosen_by(optim.metric, trainer.splits.task), progress.epochs_without
    equal = ", the latest of those as good" if progress.best_epoch > trainer.epoch - without else ""
    return (
        f"Stopped after epoch {trainer.epoch} of at most {optim.epochs}: for {counted(without, 'epoch')} the "
        f"validation {metric} was no better than before (--patience {optim.patience}); the best epoch was "
        f"{progress.best_epoch}{equal}. To train on: {again} --patience {2 * optim.patience} (0: to the last epoch)"
    )
