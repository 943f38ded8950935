"""A GRU that hears instruments, trained with gradients by torch, by timeloom's default and by scans.

    python -m experiments.bppsa_irmas.run                               # generated clips; about two minutes on one core
    python -m experiments.bppsa_irmas.run --data IRMAS-TrainingData     # the real ones, all of them
    python -m experiments.bppsa_irmas.run --features paper              # the paper's inputs: 38, 24 and 12 a frame
    python -m experiments.bppsa_irmas.run --device cuda --batch 64      # against cuDNN
    python -m experiments.bppsa_irmas.run --fast                        # all parts in small, seconds

The second recurrent task of the BPPSA paper: a GRU of 20 units reads the MFCC of three-second clips, in 259, 517 or
1034 steps by the hop between frames, batch 16, and its last state tells the instrument. Every method trains a copy of
the same network on the same batches. Measured are the gradients against float64, as initialised and as trained, and
the time of the backward pass alone and of a whole training step.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import timeloom as tl
from experiments.bppsa_bitstream.streams import IN_ORDER
from experiments.bppsa_irmas import report
from experiments.bppsa_irmas.clips import FEATURES, features, find, split
from experiments.bppsa_irmas.instruments import INSTRUMENTS, generate
from experiments.harness import begin, command, facts, folder_of, now, save, summary, whole, write
from timeloom.solvers import Auto, Shooting, Solver

HOPS, FAST_HOPS = (512, 256, 128), (4096, 2048, 1024)
"""Samples between two frames."""
HIDDEN, BATCH, RATE_OF_LEARNING, MOST_NORM = 20, 16, 2e-2, 1.0
METHODS: dict[str, Solver | None] = {
    "torch": None,
    "default": Auto(),
    "scan": Shooting(chunk=IN_ORDER, adjoint="scan"),
    "scan, 2 levels": Shooting(chunk=IN_ORDER, adjoint="scan", adjoint_levels=2),
    "scan, all levels": Shooting(chunk=IN_ORDER, adjoint="scan", adjoint_levels=30),
}
"""Solvers by name; None is torch's own layer. The forward pass of a scan is in order, as the paper's: networks in
training need not contract.
"""


@dataclass(frozen=True)
class Data:
    """Features `(T, N, D)` of one hop, standardised by those to train on, and instruments `(N,)`."""

    x: Tensor
    target: Tensor
    test_x: Tensor
    test_target: Tensor

    def to(self, device: str) -> Data:
        return Data(*(tensor.to(device) for tensor in (self.x, self.target, self.test_x, self.test_target)))


@dataclass(frozen=True)
class Setting:
    """Sizes of a run, and where it runs."""

    batch: int
    steps: int
    turns: int
    device: str


class Classifier(nn.Module):
    """A GRU whose last state tells the class."""

    def __init__(self, solver: Solver | None, inputs: int, classes: int) -> None:
        super().__init__()
        self.gru = nn.GRU(inputs, HIDDEN) if solver is None else tl.GRU(inputs, HIDDEN, solver=solver)
        self.head = nn.Linear(HIDDEN, classes)

    def forward(self, x: Tensor) -> Tensor:
        _, last = self.gru(x)
        return self.head(last[0])


def load(folder: Path, most: int, hops: Sequence[int], kind: str = "ours") -> tuple[list[str], dict[int, Data]]:
    """Instruments, and the data by hop."""
    instruments, clips = find(folder, most)
    train, test = split(clips)
    (x, target), (test_x, test_target) = features(train, hops, kind=kind), features(test, hops, kind=kind)
    data = {}
    for hop in hops:
        mean, spread = x[hop].mean((0, 1)), x[hop].std((0, 1)) + 1e-6
        data[hop] = Data((x[hop] - mean) / spread, target, (test_x[hop] - mean) / spread, test_target)
    return instruments, data


def train(model: Classifier, data: Data, setting: Setting) -> list[float]:
    """The loss of every step."""
    generator = torch.Generator().manual_seed(0)
    optimizer, losses = torch.optim.Adam(model.parameters(), RATE_OF_LEARNING), []
    rows: Tensor = torch.empty(0, dtype=torch.long)
    for _ in range(setting.steps):
        while len(rows) < setting.batch:
            rows = torch.cat([rows, torch.randperm(len(data.target), generator=generator)])
        taken, rows = rows[: setting.batch].to(setting.device), rows[setting.batch :]
        optimizer.zero_grad()
        loss = cross_entropy(model(data.x[:, taken]), data.target[taken])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MOST_NORM)
        optimizer.step()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def answers(model: Classifier, data: Data) -> Tensor:
    """The instruments that it hears in the clips to test on, `(N,)`."""
    return model(data.test_x).argmax(-1)


def gradients(model: Classifier, x: Tensor, target: Tensor) -> list[Tensor]:
    """Of the loss by the inputs and all parameters."""
    x = x.clone().requires_grad_()
    return list(torch.autograd.grad(cross_entropy(model(x), target), [x, *model.parameters()]))


def errors(models: dict[str, Classifier], x: Tensor, target: Tensor) -> dict[str, float]:
    """By method, the largest error of any gradient against float64, relative to that gradient's largest entry."""
    truth = gradients(copy.deepcopy(models["torch"]).double(), x.double(), target)
    return {
        name: max(
            float((given - true).abs().max() / true.abs().max())
            for given, true in zip(gradients(model, x, target), truth, strict=True)
        )
        for name, model in models.items()
    }


def times(models: dict[str, Classifier], x: Tensor, target: Tensor, setting: Setting) -> dict[str, dict[str, Any]]:
    """Milliseconds of the backward pass and of the whole step (forward, backward, update), methods in turn."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    optimizers = {name: torch.optim.Adam(model.parameters(), 0.0) for name, model in models.items()}
    for turn in range(setting.turns + 1):
        for name, model in models.items():
            began = now(setting.device)
            backward = _step(model, optimizers[name], x, target, setting.device)
            if turn:  # the first one warms up; a step's tape is gone when it returns: that costs time too
                taken[name].append((1e3 * backward, 1e3 * (now(setting.device) - began)))
    found: dict[str, dict[str, Any]] = {}
    for name, pairs in taken.items():
        backwards, steps = zip(*pairs, strict=True)
        found[name] = {
            kind: {**summary(column), "slowest": max(column)}
            for kind, column in (("backward_ms", backwards), ("step_ms", steps))
        }
        solved = models[name].gru.reports[0].backward if METHODS[name] is not None else None
        if solved is not None:
            found[name]["backward_solve"] = {"solver": solved.solver, "sweeps": solved.iterations}
    return found


def _step(model: Classifier, optimizer: torch.optim.Optimizer, x: Tensor, target: Tensor, device: str) -> float:
    """One training step; the seconds of its backward pass."""
    optimizer.zero_grad()
    loss = cross_entropy(model(x), target)
    began = now(device)
    loss.backward()
    taken = now(device) - began
    optimizer.step()
    return taken


def compare(data: Data, classes: int, setting: Setting) -> dict[str, Any]:
    """All methods on one length."""
    data = data.to(setting.device)
    torch.manual_seed(0)
    start = Classifier(None, data.x.shape[-1], classes).state_dict()
    models = {
        name: Classifier(solver, data.x.shape[-1], classes).to(setting.device) for name, solver in METHODS.items()
    }
    # clips are in order of instruments: some of each
    batch = torch.arange(setting.batch, device=setting.device) * len(data.target) // setting.batch
    x, target = data.x[:, batch].contiguous(), data.target[batch]
    for model in models.values():
        model.load_state_dict(start)
    at_start, losses, heard = errors(models, x, target), {}, {}
    for name, model in models.items():
        losses[name] = train(model, data, setting)
        heard[name] = answers(model, data)
    for model in models.values():
        model.load_state_dict(models["torch"].state_dict())
    at_end, taken = errors(models, x, target), times(models, x, target, setting)
    return {
        name: {
            **taken[name],
            "gradient_error": {"as_initialised": at_start[name], "as_trained": at_end[name]},
            "accuracy": float((heard[name] == data.test_target).float().mean()),
            "answers_unlike_torch": int((heard[name] != heard["torch"]).sum()),
            "largest_loss_difference": max(abs(a - b) for a, b in zip(losses[name], losses["torch"], strict=True)),
            "losses": [round(loss, 6) for loss in losses[name]],
        }
        for name in METHODS
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command(__doc__)
    parser.add_argument("--data", type=Path, help="a folder in IRMAS's layout; without it, clips are generated")
    parser.add_argument(
        "--clips", type=whole, help="most clips of an instrument (default: 32 generated, all real ones)"
    )
    parser.add_argument("--steps", type=whole, help="training steps (default: 80; ten epochs of real clips)")
    parser.add_argument("--batch", type=whole, default=BATCH, help=f"clips in a step (default: {BATCH})")
    parser.add_argument("--features", choices=tuple(FEATURES), default="ours", help="inputs of a frame (default: ours)")
    options = begin(parser, arguments)
    hops = FAST_HOPS if options.fast else HOPS
    few = (4, 3) if options.fast else (32, 80)
    defaults = few if options.data is None else (1 << 30, 0)
    most = options.clips or defaults[0]
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.data or Path(temporary)
        if options.data is None:
            generate(folder, most, tuple(INSTRUMENTS)[: 3 if options.fast else None])
        try:
            instruments, data = load(folder, most, hops, options.features)
        except ValueError as error:
            parser.error(str(error))
    first = next(iter(data.values()))
    steps = options.steps or defaults[1] or 10 * max(1, len(first.target) // options.batch)
    setting = Setting(options.batch, steps, 2 if options.fast else 7, options.device)
    results: dict[str, Any] = {
        "data": "generated stand-in" if options.data is None else options.data.name,
        "features": options.features,
        "features_in_words": FEATURES[options.features],
        "inputs": [one.x.shape[-1] for one in data.values()],
        "instruments": instruments,
        "clips": {"train": len(first.target), "test": len(first.test_target)},
        "hidden": HIDDEN,
        "batch": setting.batch,
        "forward": "in order",
        "training_steps": steps,
        "turns": setting.turns,
        "machine": facts(options.device),
        "lengths": {},
    }
    print(f"{results['data']} clips: {results['clips']}", flush=True)
    base = "irmas" if options.data else "generated"
    base += "" if options.features == "ours" else "_paper_features"
    base += "" if options.batch == BATCH else f"_batch_{options.batch}"
    base += "" if options.device == "cpu" else f"_{options.device}"
    out = folder_of(options, __file__)
    for hop in hops:
        if options.clock.over and results["lengths"]:
            break
        found = compare(data[hop], len(instruments), setting)
        results["lengths"][str(len(data[hop].x))] = {"hop": hop, "methods": found}
        print(report.row(len(data[hop].x), found), flush=True)
        save(base, results, out)
    write(base, results, out, report.table, report.plot)


if __name__ == "__main__":
    main()
