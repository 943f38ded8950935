"""What a training is told, as typed dataclasses; the command line is made from them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, Literal, get_args

import tyro

from timeloom.app.data.reading import Fill, Reading
from timeloom.app.errors import InputError
from timeloom.options import did_you_mean

Cell = Literal["gru", "implicit-gru", "lstm", "rnn"]
Pooling = Literal["mean", "last"]
Precision = Literal["float32", "float64", "bf16"]
Preset = Literal["default", "eigenworms", "hmdb6", "hmdb51", "uci-har"]
Metric = Literal["auto", "loss", "accuracy", "balanced-accuracy", "macro-f1", "r2", "mae"]


@dataclass(frozen=True)
class ModelConfig:
    """The network: a stack of recurrent layers and a head."""

    cell: Cell = "gru"
    """Kind of the recurrent layers; implicit-gru is the multigrid paper's."""
    hidden: int = 32
    """Units of each layer; for data of your own 64 where it is not given."""
    layers: int = 1
    """Recurrent layers; for data of your own 1 or 2, by their length, where it is not given."""
    bidirectional: bool = False
    """Run every layer forwards and backwards in time."""
    residual: bool = False
    """Add each layer's input to its output."""
    norm: bool = False
    """LayerNorm before each layer, and after the sum where residual is set."""
    mlp: bool = False
    """A small perceptron before the first layer, after every layer and as the head, in place of linear maps."""
    dropout: float = 0.0
    """Share of each layer's outputs that is dropped in training."""
    pooling: Pooling = "mean"
    """How the answers of all steps become one: their mean, or the last one. A label for each step needs none."""

    def __post_init__(self) -> None:
        at_least("hidden", self.hidden, 1)
        at_least("layers", self.layers, 1)
        if not 0 <= self.dropout < 1:
            raise InputError(f"--dropout must be at least 0 and below 1, got {self.dropout}")

    @property
    def beside(self) -> str:
        """What runs beside for comparison: torch's layers, or the same ones step by step where torch has none."""
        return "step by step" if self.cell == "implicit-gru" else "torch"


@dataclass(frozen=True)
class OptimConfig:
    """How the weights are found."""

    optimizer: Literal["adamw", "adam"] = "adamw"
    """AdamW, or Adam."""
    lr: float = 5e-3
    """Learning rate at its highest; for data of your own 0.003 where it is not given."""
    schedule: Literal["constant", "cosine", "linear"] = "cosine"
    """How the learning rate goes to zero, or that it does not."""
    warmup: int = 0
    """Steps over which the learning rate first rises from zero."""
    weight_decay: float = 0.01
    """Decay of the weights a step, times the learning rate."""
    betas: tuple[float, float] = (0.9, 0.99)
    """Memory of past gradients and of their squares."""
    clip: float = 1.0
    """Largest norm of the gradients; larger ones are scaled down. 0 leaves them alone."""
    epochs: int = 4
    """Passes over the training series; for data of your own chosen by their size where it is not given."""
    batch: int = 4
    """Series in a batch; chosen likewise."""
    patience: int = 0
    """Epochs without a better validation after which to stop, chosen likewise; 0 never stops early."""
    metric: Metric = "auto"
    """What the best epoch is best by, on the validation series; auto takes accuracy for classes, the loss for numbers.
    Of epochs that are equal by it the latest is taken."""
    class_weights: Literal["none", "balanced"] = "none"
    """balanced: a class counts in the loss as much as any other, however few series or steps it has."""

    def __post_init__(self) -> None:
        for name, least in (("epochs", 1), ("batch", 1), ("warmup", 0), ("patience", 0)):
            at_least(name, getattr(self, name), least)
        if not self.lr > 0:
            raise InputError(f"--lr must be positive, got {self.lr}")
        for name in ("clip", "weight_decay"):
            if not getattr(self, name) >= 0:
                raise InputError(f"--{name.replace('_', '-')} must not be negative, got {getattr(self, name)}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise InputError(f"--betas must be at least 0 and below 1, got {self.betas}")


@dataclass(frozen=True)
class TrainConfig:
    """Train a recurrent network parallel in time, and write weights, metrics and a report to a folder."""

    data: str = "turning"
    """turning[:length=16384,train=128,…] (built in), a folder, a .ts file, a set's name in the UEA/UCR archive, or
    video:FOLDER[,net=resnet-18,classes=hmdb6,…]."""
    out: str = ""
    """Folder of the run; by default a new one in runs/."""
    preset: Preset = "default"
    """Settings to begin from; eigenworms is the model of the DEER paper, hmdb6 and hmdb51 are the multigrid paper's,
    uci-har is the example published with its code."""
    solver: str = "auto"
    """auto, sequential, shooting, mgrit, deer …, with options: shooting:chunk=256,correction=newton."""
    device: str = "auto"
    """cpu, cuda, cuda:1 …; auto takes a GPU where there is one."""
    time_ranks: int = 0
    """Under torchrun: processes that share every series in time, 0 for all; the others take other series of a batch."""
    precision: Annotated[Precision, tyro.conf.arg(aliases=["--dtype"])] = "float32"
    """Numbers of the weights; bf16 is mixed: float32 weights, computed with under autocast."""
    seed: int = 0
    """Of weights, order, dropout and the split of the data."""
    columns: str = ""
    """Columns of the files to take as channels, a,b,c; by default all of them."""
    time: str = ""
    """Column of times, to be taken as the seconds since the step before."""
    fill: Fill = "none"
    """What takes the place of a missing value, channel by channel: the last value before it, a line between its
    neighbours, the mean of the series, zero; none refuses it."""
    valid_fraction: float = 0.2
    """Share of the training series that chooses the best weights, where the data name none."""
    test_fraction: float = 0.2
    """Share of all series that measures the result, where the data name none."""
    pool: bool = False
    """Mix the data's own train, valid and test series, and split them anew by these shares."""
    folds: int = 0
    """k: train k times, every series being tested on once; 0 trains once."""
    fold: int = 0
    """Train only this one of the folds, from 1 on; 0 for all of them."""
    normalize: bool = True
    """Scale every channel to mean 0 and deviation 1 over the training series."""
    compare: int = 3
    """Training steps that torch's own layer repeats beside ours, for the speedup; 0 for none."""
    warm_starts: int = 1024
    """MiB on a GPU for the states of an epoch, at which series begin in the next one, to save work; 0 for none."""
    save_every: int = 50
    """Steps between two checkpoints; one is written at the end of every epoch too."""
    tensorboard: bool = False
    """Write event files for TensorBoard beside metrics.jsonl."""
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)

    def __post_init__(self) -> None:
        for name in ("seed", "compare", "warm_starts", "time_ranks", "fold"):
            at_least(name, getattr(self, name), 0)
        at_least("save_every", self.save_every, 1)
        if self.folds < 0 or self.folds == 1:
            raise InputError(f"--folds must be at least 2, or 0 for none, got {self.folds}")
        if self.fold > self.folds:
            raise InputError(f"--fold {self.fold} is none of the {self.folds} folds; give --folds too")
        for name in ("valid_fraction", "test_fraction"):
            if not 0 < getattr(self, name) < 1:
                raise InputError(f"--{name.replace('_', '-')} must be between 0 and 1, got {getattr(self, name)}")

    @property
    def reading(self) -> Reading:
        """How the files are to be read."""
        return Reading.of(self.columns, self.time, self.fill)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainConfig:
        """From what `to_dict` gave; JSON turned the pair of betas into a list."""
        try:
            given = dict(values)
            model, optim = ModelConfig(**given.pop("model")), dict(given.pop("optim"))
            optim["betas"] = tuple(optim["betas"])
            return cls(**given, model=model, optim=OptimConfig(**optim))
        except (TypeError, KeyError) as error:
            raise InputError(f"the configuration is of another version of timeloom ({error})") from None


def preset(name: str) -> TrainConfig:
    """The settings that a preset begins from."""
    if name == "default":
        return TrainConfig()
    if name == "eigenworms":
        model = ModelConfig(layers=5, residual=True, norm=True, mlp=True)
        optim = OptimConfig(
            "adam", lr=3e-5, schedule="constant", weight_decay=0.0, betas=(0.9, 0.999), epochs=1000, patience=1000
        )
        of_all = replace(TrainConfig(), pool=True, valid_fraction=0.15 / 0.85, test_fraction=0.15)
        return replace(of_all, preset="eigenworms", data="EigenWorms", model=model, optim=optim)
    if name == "hmdb51":
        model = ModelConfig(hidden=256, pooling="last")
        optim = OptimConfig(
            "adam", lr=1e-3, schedule="constant", weight_decay=0.0, betas=(0.9, 0.999), clip=0.0, epochs=50, batch=100
        )
        return TrainConfig(
            "video:hmdb51", preset="hmdb51", valid_fraction=0.1, test_fraction=0.1, model=model, optim=optim
        )
    if name == "hmdb6":
        return replace(preset("hmdb51"), preset="hmdb6", data="video:hmdb51,classes=hmdb6")
    if name == "uci-har":
        model = ModelConfig(hidden=100, layers=2, pooling="last")
        optim = OptimConfig(
            "adam", lr=1e-3, schedule="constant", weight_decay=0.0, betas=(0.9, 0.999), clip=0.0, epochs=6, batch=100
        )
        return TrainConfig("UCI HAR Dataset", preset="uci-har", model=model, optim=optim)
    known = get_args(Preset)
    raise InputError(f"no preset {name!r}; there are: {', '.join(known)}{did_you_mean(name, known)}")


def at_least(name: str, value: int, least: int) -> None:
    """Refuse an option below its least value."""
    if value < least:
        raise InputError(f"--{name.replace('_', '-')} must be at least {least}, got {value}")
