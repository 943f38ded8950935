"""Retrain a pruned VGG-11 with gradients by the scan; count what it costs along its critical path, and time it.

    python -m experiments.bppsa_vgg.run                                     # full width; minutes on one core
    python -m experiments.bppsa_vgg.run --data cifar-10-batches-bin         # CIFAR-10 itself (or cifar-10-batches-py)
    python -m experiments.bppsa_vgg.run --norm --device cuda                # with BatchNorm, on a GPU
    python -m experiments.bppsa_vgg.run --fast                              # all parts in small, seconds

As in the paper's study (Wang, Bai and Pekhimenko, "BPPSA", 2020): 97 % of the weights of all convolutions and linear
layers are pruned by size, and the network is retrained. Each retraining step is made by `chain_backward` and, on a
twin, by autograd. Without --data the images are ten classes of smooth patterns with noise.

Floating-point operations are counted for one image. The critical path takes the largest product of every level of the
scan: what is left with a processor for each product. Beside them stand the times of one process by the clock, and for
each layer how many entries of its Jacobian are certain to be zero, and how long writing it down takes against autograd.
A BatchNorm runs on its running statistics while the network is retrained (a diagonal in the scan).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune

import timeloom as tl
from experiments import cifar
from experiments.bppsa_vgg.report import draw, table
from experiments.bppsa_vgg.zeros import jacobian_table
from experiments.harness import Clock, Results, begin, command, facts, folder_of, now, save, share, whole, write
from timeloom.bppsa.scan import ScanTrace

CHANNELS = (64, "pool", 128, "pool", 256, 256, "pool", 512, 512, "pool", 512, 512, "pool")
FULL = {"share": 1, "train": 60, "retrain": 20, "batch": 4, "turns": 3, "images": 4096, "columns": 64}
FAST = {"share": 16, "train": 1, "retrain": 2, "batch": 2, "turns": 1, "images": 64, "columns": 8}
TRAIN_BATCH = 32

Data = tuple[Tensor, Tensor]


def vgg11(share: int, norm: bool) -> nn.Sequential:
    """VGG-11 for 32×32 images with 1/share of its channels: eight convolutions, three linear layers."""
    layers: list[nn.Module] = []
    width = 3
    for entry in CHANNELS:
        if isinstance(entry, str):
            layers.append(nn.MaxPool2d(2))
            continue
        layers += [nn.Conv2d(width, entry // share, 3, padding=1)]
        layers += [nn.BatchNorm2d(entry // share)] if norm else []
        layers += [nn.ReLU()]
        width = entry // share
    layers += [
        nn.Flatten(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, 10),
    ]
    model = nn.Sequential(*layers)
    for layer in weighty(model):
        nn.init.kaiming_normal_(layer.weight)
        nn.init.zeros_(layer.bias)
    return model


def weighty(model: nn.Module) -> list[nn.Conv2d | nn.Linear]:
    return [layer for layer in model.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]


def pruned(model: nn.Sequential, amount: float) -> nn.Sequential:
    """Without its smallest weights, layer by layer; the others are scaled up, or nothing would come through."""
    for layer in weighty(model):
        size = layer.weight.detach().norm()
        prune.l1_unstructured(layer, "weight", amount)
        with torch.no_grad():
            layer.weight_orig *= size / layer.weight.norm()
    return model


def batch_of(data: Data, size: int, generator: torch.Generator) -> Data:
    rows = torch.randint(len(data[0]), (size,), generator=generator).to(data[0].device)
    return data[0][rows], data[1][rows]


def train(model: nn.Sequential, data: Data, steps: int, generator: torch.Generator, clock: Clock) -> list[float]:
    """By autograd, the whole network."""
    optimiser, losses = torch.optim.Adam(model.parameters(), lr=1e-3), []
    for _ in range(steps):
        x, target = batch_of(data, TRAIN_BATCH, generator)
        loss = F.cross_entropy(model(x), target)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
        if clock.limit is not None and clock.left < 0.7 * clock.limit:
            break
    return losses


def retrain(
    models: dict[str, nn.Sequential], data: Data, sizes: dict[str, int], generator: torch.Generator, clock: Clock
) -> tuple[dict[str, list[float]], list[float], list[ScanTrace]]:
    """Both twins on the same images: losses, the gradients' largest relative difference in each step, and traces.

    The difference is taken on one network: the gradients of the scan against autograd's for the same weights.
    """
    optimisers = {name: torch.optim.Adam(model.parameters(), lr=3e-3) for name, model in models.items()}
    losses: dict[str, list[float]] = {name: [] for name in models}
    differences: list[float] = []
    traces: list[ScanTrace] = []
    for step in range(sizes["retrain"]):
        if step and clock.limit is not None and clock.left < 0.4 * clock.limit:
            break
        x, target = batch_of(data, sizes["batch"], generator)

        def loss(y: Tensor, target: Tensor = target) -> Tensor:
            return F.cross_entropy(y, target)

        for name, model in models.items():
            optimisers[name].zero_grad()
            exact = torch.autograd.grad(loss(model(x)), list(model.parameters()))
            if name == "scan":
                value = tl.chain_backward(model, x, loss, levels=1, record=traces.append)
                given = [parameter.grad for parameter in model.parameters()]
                differences.append(max(_difference(a, b) for a, b in zip(given, exact, strict=True)))
            else:
                value = loss(model(x))
                value.backward()
            optimisers[name].step()
            losses[name].append(value.item())
    return losses, differences, traces


def _difference(given: Tensor | None, exact: Tensor) -> float:
    assert given is not None
    return float((given - exact).abs().max()) / max(float(exact.abs().max()), 1e-30)


@torch.no_grad()
def accuracy(model: nn.Sequential, data: Data) -> float:
    x, target = data
    return float((torch.cat([model(part) for part in x.split(256)]).argmax(-1) == target).float().mean())


def dense_flops(model: nn.Sequential) -> list[float]:
    """Of each layer's gradient by its input, from the last layer to the second that has weights, zeros included."""
    point, flops = torch.zeros(1, 3, 32, 32, device=next(model.parameters()).device), []
    with torch.no_grad():
        for layer in model:
            out = layer(point)
            if isinstance(layer, nn.Conv2d):
                flops.append(2.0 * layer.weight[0].numel() * out.numel())
            elif isinstance(layer, nn.Linear):
                flops.append(2.0 * layer.weight.numel())
            elif not isinstance(layer, nn.Flatten):
                flops.append(2.0 * point.numel())
            point = out
    return flops[:0:-1]


def by_levels(model: nn.Sequential, batch: Data, turns: int, device: str, clock: Clock) -> tuple[list[Results], float]:
    """Critical path, total work and time of the scan by the levels in which it multiplies matrices; autograd's time."""
    x, target = batch

    def loss(y: Tensor) -> Tensor:
        return F.cross_entropy(y, target)

    def seconds(levels: int | None, traces: list[ScanTrace]) -> float:
        began = now(device)
        tl.chain_backward(model, x, loss, levels=levels, record=traces.append)
        return now(device) - began

    def autograd() -> float:
        began = now(device)
        loss(model(x)).backward()
        return now(device) - began

    rows: list[Results] = []
    for level in range(math.ceil(math.log2(len(model))) + 1):
        if rows and (clock.over or rows[-1]["all_levels"]):
            break
        traces: list[ScanTrace] = []
        taken = [1e3 * seconds(level, traces) for _ in range(turns)]
        trace = traces[-1]
        complete = not any(phase == "middle" for phase, _, _ in trace.steps())
        sizes = {"critical_flops": trace.critical_flops, "total_flops": trace.total_flops}
        steps = [{"phase": phase, "level": at, "flops": flops} for phase, at, flops in trace.steps()]
        rows.append({"levels": level, "critical_steps": len(steps), **sizes, "ms": min(taken), "all_levels": complete})
        print(rows[-1], flush=True)
        rows[-1]["steps"] = steps
    return rows, 1e3 * min(autograd() for _ in range(turns + 1))


def measure(data: Data, test: Data, sizes: dict[str, int], options: Any, keep: Callable[[Results], object]) -> Results:
    """All parts of the study; `keep` is given what is found as it comes."""
    device, clock = options.device, options.clock
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(0)
    model = vgg11(sizes["share"], options.norm).to(device)
    first = train(model, data, sizes["train"], generator, clock)
    model.eval()
    before = accuracy(model, test)
    print(f"trained: loss {first[0]:.2f} -> {first[-1]:.2f}, accuracy {before:.2f}", flush=True)
    twins = {name: pruned(copy.deepcopy(model), options.amount) for name in ("scan", "autograd")}
    cut = accuracy(twins["scan"], test)
    losses, differences, traces = retrain(twins, data, sizes, generator, clock)
    last, dense = traces[-1], dense_flops(twins["scan"])
    found: Results = {
        "trained_steps": len(first),
        "accuracy": {"trained": before, "pruned": cut, "retrained": accuracy(twins["scan"], test)},
        "losses": losses,
        "largest_difference": max(differences),
        "serial_dense_flops": sum(dense),
        "serial_sparse_flops": last.serial_flops,
        "dense_steps": dense,
        "sparse_steps": last.serial,
    }
    keep(found)
    batch = batch_of(data, sizes["batch"], generator)
    found["jacobians"] = jacobian_table(twins["scan"], batch[0], sizes["columns"], device)
    keep(found)
    levels, found["autograd_ms"] = by_levels(twins["scan"], batch, sizes["turns"], device, clock)
    steps = [row.pop("steps") for row in levels]
    best = min(row["critical_flops"] for row in levels)
    return {**found, "scan_critical_flops": best, "levels": levels, "scan_steps": steps[-1]}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command(__doc__)
    parser.add_argument(
        "--data", type=Path, help="CIFAR-10's folder, binary or pickled; without it, images are generated"
    )
    parser.add_argument("--norm", action="store_true", help="BatchNorm behind every convolution")
    parser.add_argument(
        "--amount", type=share, default=0.97, help="share of the weights that are pruned (default: 0.97)"
    )
    for name, what in (
        ("share", "by what the channels are divided"),
        ("train", "steps before pruning"),
        ("retrain", "steps after it"),
        ("batch", "images in a retraining step"),
    ):
        parser.add_argument(f"--{name}", type=whole, help=f"{what} (default: {FULL[name]})")
    options = begin(parser, arguments)
    sizes = dict(FAST if options.fast else FULL)
    sizes |= {name: getattr(options, name) for name in ("share", "train", "retrain", "batch") if getattr(options, name)}
    try:
        name, data, test = cifar.given(options.data, 50_000 if options.data else sizes["images"], 1000)
    except ValueError as error:
        parser.error(str(error))
    data, test = (tuple(tensor.to(options.device) for tensor in part) for part in (data, test))
    results: Results = {
        "data": name,
        "machine": facts(options.device),
        "norm": options.norm,
        "amount": options.amount,
        "sizes": sizes,
    }
    base = ("cifar10" if options.data else "generated") + ("_norm" if options.norm else "")
    base += "" if options.device == "cpu" else f"_{options.device}"
    folder = folder_of(options, __file__)
    results |= measure(data, test, sizes, options, lambda found: save(base, {**results, **found}, folder))
    print(table(results))
    write(base, results, folder, table, draw)


if __name__ == "__main__":
    main()
