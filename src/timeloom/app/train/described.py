"""The data and all that was chosen or given, in words, before a training begins."""

from __future__ import annotations

from timeloom.app.data import Splits
from timeloom.app.data.records import PER_STEP
from timeloom.app.machine import counted
from timeloom.app.train.config import ModelConfig, OptimConfig, TrainConfig
from timeloom.app.train.objective import chosen_by

OPTIMIZERS = {"adamw": "AdamW", "adam": "Adam"}


def described(config: TrainConfig, splits: Splits, device: str, threads: int) -> list[str]:
    """One line each for the data, the model, its training, and what it runs on."""
    return [
        _data(config, splits),
        f"Model: {_model(config.model)}{'' if splits.task in PER_STEP else _pooled(config.model)}.",
        f"Training: {_training(config.optim, splits)}.",
        f"Runs on {device} ({counted(threads, 'thread')}) in {config.precision} by --solver {config.solver}; "
        f"{_beside(config)}.",
    ]


def _data(config: TrainConfig, splits: Splits) -> str:
    longest = max(len(series) for series in splits.train.series)
    scaled = "channels scaled to mean 0 and deviation 1" if config.normalize else "channels as they are"
    filled = "" if config.fill == "none" else f", missing values filled ({config.fill})"
    return (
        f"{splits.source}: {splits.task}; {len(splits.train):,} training, {len(splits.valid):,} validation and "
        f"{len(splits.test):,} test series ({splits.drawn}) of {counted(splits.channels, 'channel')}, training "
        f"ones of up to {counted(longest, 'step')}; {scaled}{filled}."
    )


def _model(model: ModelConfig) -> str:
    parts = [
        "residual" if model.residual else "",
        "LayerNorm" if model.norm else "",
        "perceptrons" if model.mlp else "",
        f"dropout {model.dropout:g}" if model.dropout else "",
    ]
    both = "both directions" if model.bidirectional else "one direction"
    layers = f"{counted(model.layers, f'{model.cell.upper()} layer')} of {counted(model.hidden, 'unit')} in {both}"
    return ", ".join([layers, *filter(None, parts)])


def _pooled(model: ModelConfig) -> str:
    return ", the mean of all steps' answers" if model.pooling == "mean" else ", the last step's answer"


def _training(optim: OptimConfig, splits: Splits) -> str:
    warmup = f" after {counted(optim.warmup, 'step')} of warm-up" if optim.warmup else ""
    patience = f", patience {optim.patience}" if optim.patience else ", no early stop"
    weights = ", classes balanced" if optim.class_weights == "balanced" else ""
    return (
        f"{OPTIMIZERS[optim.optimizer]}, learning rate {optim.lr:g} ({optim.schedule}{warmup}), batches of "
        f"{optim.batch}, at most {counted(optim.epochs, 'epoch')}{patience}{weights}; the epoch with the best "
        f"validation {chosen_by(optim.metric, splits.task)} is kept"
    )


def _beside(config: TrainConfig) -> str:
    if not config.compare or config.solver == "sequential":
        return "no step is repeated for comparison"
    by = "torch's own layers" if config.model.beside == "torch" else "the same layers step by step"
    return f"{counted(config.compare, 'step')} repeated by {by} for comparison"
