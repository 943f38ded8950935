"""Checkpoints: one safetensors file with weights, optimiser state and everything else that a training is made of."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as deserialize
from safetensors.torch import save as serialize
from torch import Tensor, nn

from timeloom.app.errors import InputError
from timeloom.app.files import write_whole
from timeloom.app.train.config import TrainConfig
from timeloom.app.train.run_files import folds_of
from timeloom.auto.experience import Experience
from timeloom.auto.layer_experience import LayerExperience
from timeloom.auto.rounding import Rounding
from timeloom.auto.sweep_counts import SweepCounts
from timeloom.auto.warmups import Miss, WarmupSearch
from timeloom.nn.base import Recurrent

FORMAT = "timeloom-checkpoint-1"
LAST, BEST = "last.safetensors", "best.safetensors"
Experiences = Callable[[Recurrent], dict[int, LayerExperience]]
"""Where the experience with a layer is kept."""


@dataclass
class Progress:
    """How far a training has come."""

    step: int = 0
    elapsed: float = 0.0
    """Seconds spent in training steps."""
    best_loss: float = float("inf")
    """Validation loss of the best epoch so far."""
    best_metric: float = float("-inf")
    """What the metric that chooses says of it; larger is better."""
    best_epoch: int = 0
    """From 1 on; of equally good epochs the latest."""
    epochs_without: int = 0
    """Epochs since the validation was last better than ever before."""


@dataclass(frozen=True)
class Checkpoint:
    """What a file holds."""

    config: TrainConfig
    task: str
    classes: tuple[str, ...]
    channels: int
    progress: Progress
    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor] = field(default_factory=dict)
    """State of the optimiser by parameter, `<index>.<name>`; empty in a file of weights alone."""
    experience: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What `auto` had learned of each layer: with it, a resumed run takes the same sweeps as one that never stopped."""
    columns: tuple[str, ...] = ()
    """Names of the channels, where the data had them."""


def save(path: Path, checkpoint: Checkpoint) -> None:
    """Write a file that is whole or not there."""
    tensors = {f"model.{name}": tensor for name, tensor in checkpoint.weights.items()}
    tensors |= {f"optimizer.{name}": tensor for name, tensor in checkpoint.optimizer.items()}
    about = {
        "config": checkpoint.config.to_dict(),
        "task": checkpoint.task,
        "classes": list(checkpoint.classes),
        "channels": checkpoint.channels,
        "columns": list(checkpoint.columns),
        "progress": asdict(checkpoint.progress),
        "experience": checkpoint.experience,
    }
    whole = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
    metadata = {"format": FORMAT, "about": json.dumps(about)}
    write_whole(path, serialize(whole, metadata))


def load(path: Path) -> Checkpoint:
    """Read a checkpoint; `path` is its file, or the folder of a run, whose best weights are then meant."""
    if path.is_dir():
        path = path / BEST if (path / BEST).is_file() else path / LAST
    if not path.is_file():
        if folds := folds_of(path.parent):
            raise InputError(f"{path.parent} holds {len(folds)} folds, each a run of its own; give one: {folds[0]}")
        raise InputError(f"{path}: no such checkpoint; give the folder of a run or a .safetensors file in it")
    try:
        data = path.read_bytes()  # in one go: a training may put a newer file in its place at any moment
        tensors, metadata = deserialize(data), _metadata(data)
    except (SafetensorError, OSError) as error:
        raise InputError(
            f"{path}: not a whole safetensors file ({error}); give another checkpoint of the run, or train again"
        ) from None
    if metadata.get("format") != FORMAT:
        raise InputError(f"{path}: not a checkpoint of this version of timeloom; expected {FORMAT}")
    about = json.loads(metadata["about"])
    return Checkpoint(
        config=TrainConfig.from_dict(about["config"]),
        task=about["task"],
        classes=tuple(about["classes"]),
        channels=about["channels"],
        progress=Progress(**about["progress"]),
        weights=_part(tensors, "model."),
        optimizer=_part(tensors, "optimizer."),
        experience=about["experience"],
        columns=tuple(about.get("columns", ())),
    )


def _metadata(data: bytes) -> dict[str, str]:
    """The texts in the header of a whole safetensors file: eight bytes with its length, then JSON."""
    length = int.from_bytes(data[:8], "little")
    found: dict[str, str] = json.loads(data[8 : 8 + length]).get("__metadata__", {})
    return found


def _part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The state of every parameter, flat."""
    state = optimizer.state_dict()["state"]
    return {f"{index}.{name}": value for index, entry in state.items() for name, value in entry.items()}


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Put that state back."""
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        index, _, name = key.partition(".")
        state.setdefault(int(index), {})[name] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def experience_of(model: nn.Module, held_by: Experiences) -> dict[str, dict[str, Any]]:
    """What `auto` has learned, by the name of the layer and the index of its recurrence."""
    return {
        name: {str(index): asdict(learned) for index, learned in held_by(module).items()}
        for name, module in model.named_modules()
        if isinstance(module, Recurrent)
    }


def restore_experience(model: nn.Module, experience: dict[str, dict[str, Any]], held_by: Experiences) -> None:
    """Put that back."""
    for name, module in model.named_modules():
        if isinstance(module, Recurrent):
            held = held_by(module)
            held.clear()
            for index, learned in experience.get(name, {}).items():
                sides = {side: _experience(kept) for side, kept in learned.items() if kept is not None}
                held[int(index)] = LayerExperience(sides["forward"], sides["backward"], sides.get("warm"))


def _experience(kept: dict[str, Any]) -> Experience:
    """What one direction has shown; of a checkpoint by another version, as far as this one knows what it means. Device
    times are not taken over: it may be another device.
    """
    known = _known(Experience, kept)
    known.pop("trials", None)
    search = _known(WarmupSearch, known.pop("search", {}))
    missed = tuple(Miss(*one) for one in search.pop("missed", ()))
    counted = _known(SweepCounts, known.pop("counts", {}))
    counted.pop("tried", None)  # as device times: other chunks are tried anew
    rounding = Rounding(**_known(Rounding, known.pop("rounding", {})))
    searched, counts = WarmupSearch(**search, missed=missed), SweepCounts(**counted)
    return Experience(**known, search=searched, counts=counts, rounding=rounding)


def _known(kind: type, kept: Any) -> dict[str, Any]:
    """Those of the values that are fields of a kind of experience; none where another version kept something else by
    its name. What JSON made a list of is a tuple again.
    """
    if not isinstance(kept, dict):
        return {}
    names = {one.name for one in fields(kind)}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in kept.items() if name in names}
