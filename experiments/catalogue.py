"""All experiments, by the name that `python -m experiments` knows them by."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType

MGRIT, BPPSA, DEER, OURS = "multigrid", "BPPSA", "DEER", "ours"


@dataclass(frozen=True)
class Experiment:
    """A script with a `main(arguments)`; `name` is its module below `experiments`, without `.run`."""

    name: str
    paper: str
    shows: str
    real_data: str = ""
    """What `--data` takes; nothing where the paper's own data are generated."""
    gpu: bool = True
    """Whether `--device cuda` is for it."""

    @property
    def module_name(self) -> str:
        return f"experiments.{self.name}" if "." in self.name else f"experiments.{self.name}.run"

    def module(self) -> ModuleType:
        return importlib.import_module(self.module_name)


EXPERIMENTS = (
    Experiment("mgrit.ranks", MGRIT, "one sequence over 1 … 16 processes against the serial networks", gpu=False),
    Experiment("mgrit_hmdb51", MGRIT, "video: accuracy and time of five ways to train", "HMDB51"),
    Experiment("mgrit_hmdb51.nets", MGRIT, "time by preprocessor, ResNet-18, 34 and 50, and processes", gpu=False),
    Experiment("mgrit_har", MGRIT, "activities told from motion, the setting of the published code", "UCI HAR Dataset"),
    Experiment("mgrit.gradient_error", MGRIT, "how wrong gradients are after so many cycles", gpu=False),
    Experiment(
        "mgrit.instability", MGRIT, "what explicit, implicit and frozen coarse steps do to convergence", gpu=False
    ),
    Experiment("mgrit.accuracy", MGRIT, "whether inexact training costs accuracy", gpu=False),
    Experiment("mgrit.scaling", MGRIT, "time of a training step by length"),
    Experiment("bppsa_bitstream.grid", BPPSA, "both speedups over torch's layer by length and batch"),
    Experiment("bppsa_bitstream", BPPSA, "bit streams: backward pass, gradients, training"),
    Experiment("bppsa_bitstream.levels", BPPSA, "the backward pass by levels of the scan"),
    Experiment("bppsa_irmas", BPPSA, "instruments: backward pass, gradients, training", "IRMAS-TrainingData"),
    Experiment("bppsa_vgg", BPPSA, "a pruned VGG-11: FLOPs, time, zeros of its Jacobians", "cifar-10-batches-bin"),
    Experiment("bppsa_vgg.ranks", BPPSA, "the scan's products over 1 … 16 processes, measured and modelled", gpu=False),
    Experiment("deer.grid", DEER, "the speed grid: DEER, its relatives, shooting, torch, a loop"),
    Experiment("deer_eigenworms", DEER, "series of 17,984 steps: training and accuracy", "EigenWorms_TRAIN.ts"),
    Experiment("deer_two_body", DEER, "a Hamiltonian learned from orbits of 10,000 steps"),
    Experiment("deer_cifar", DEER, "images pixel by pixel by a multi-head strided GRU", "cifar-10-batches-bin"),
    Experiment("deer.warm", DEER, "what the last epoch's states save the next one"),
    Experiment("deer.iterations", DEER, "sweeps of every solver on every kind of network", gpu=False),
    Experiment("deer.tolerance", DEER, "sweeps and errors by tolerance", gpu=False),
    Experiment("deer.scan", DEER, "time of `linear_scan` by its methods"),
    Experiment("ode", OURS, "neural ODEs against a loop of Runge–Kutta steps"),
)


def find(name: str) -> Experiment:
    """By its name; an unknown one is answered with those there are."""
    for experiment in EXPERIMENTS:
        if name in (experiment.name, experiment.module_name):
            return experiment
    raise ValueError(f"there is no experiment {name!r}; there are {', '.join(one.name for one in EXPERIMENTS)}")
