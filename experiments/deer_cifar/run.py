"""Images as sequences of 1,024 pixels: DEER's multi-head strided GRU, parallel in time and by torch's layers.

    python -m experiments.deer_cifar.run                                        # generated images; minutes on one core
    python -m experiments.deer_cifar.run --data cifar-10-batches-bin --size large --device cuda
    python -m experiments.deer_cifar.run --fast                                 # all parts in small, seconds

Every layer has several small GRUs side by side, head k with steps of 2^k, behind them a gated linear unit. The same
network is trained on the same batches by torch's layers, by timeloom's default and by DEER; losses and the time of a
training step are compared, and the accuracy on images to test on is measured after every epoch.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from experiments import cifar
from experiments.deer_cifar.model import Classifier
from experiments.harness import (
    Clock,
    Results,
    attempt,
    begin,
    command,
    errors,
    facts,
    folder_of,
    made_on,
    markdown,
    now,
    plot_losses,
    save,
    whole,
    write,
)  # fmt: skip

WAYS = {"torch": None, "parallel": "auto", "DEER": "deer"}
SIZES = {
    "small": {
        "channels": 32,
        "heads": 4,
        "layers": 2,
        "strides": 4,
        "batch": 16,
        "images": 640,
        "test": 200,
        "epochs": 2,
    },
    "large": {
        "channels": 256,
        "heads": 32,
        "layers": 6,
        "strides": 8,
        "batch": 50,
        "images": 50_000,
        "test": 10_000,
        "epochs": 5,
    },
    "fast": {"channels": 8, "heads": 2, "layers": 1, "strides": 2, "batch": 4, "images": 12, "test": 8, "epochs": 1},
}
PIXELS = {"fast": 64}
PAPER = "The paper: 90.25 % on sequential CIFAR-10."


def pixels(images: Tensor, most: int | None) -> Tensor:
    """`(N, 3, 32, 32)` to `(1024, N, 3)`, row by row."""
    return images.flatten(2).permute(2, 0, 1)[:most].contiguous()


@torch.no_grad()
def accuracy(model: nn.Module, data: tuple[Tensor, Tensor], batch: int) -> float:
    x, target = data
    answers = torch.cat([model(part).argmax(-1) for part in x.split(batch, 1)])
    return float((answers == target).float().mean())


def train(
    way: str, start: Results, data: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], sizes: Results, options: Any
) -> Results:
    """Losses, times, and accuracy by epoch."""
    model = Classifier(*(sizes[key] for key in ("channels", "heads", "layers", "strides")), WAYS[way])
    model.load_state_dict(start)
    model = model.to(options.device)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    generator, clock = torch.Generator().manual_seed(0), Clock(sizes["minutes_a_way"])
    losses, seconds, elapsed, accuracies = list[float](), list[float](), list[float](), list[float]()
    for _ in range(sizes["epochs"]):
        for rows in torch.randperm(len(data[1]), generator=generator).split(sizes["batch"]):
            if clock.over and losses:
                break
            x, target = data[0][:, rows.to(options.device)], data[1][rows.to(options.device)]
            began = now(options.device)
            optimizer.zero_grad()
            loss = cross_entropy(model(x), target)
            loss.backward()
            optimizer.step()
            seconds.append(now(options.device) - began)
            losses.append(round(loss.item(), 6))
            elapsed.append(round(sum(seconds), 4))
        accuracies.append(round(accuracy(model, test, 4 * sizes["batch"]), 4))
        if clock.over:
            break
    return {
        "seconds_a_step": statistics.median(seconds),
        "losses": losses,
        "elapsed": elapsed,
        "accuracy_by_epoch": accuracies,
    }


def table(results: Results) -> str:
    sizes, ways = results["sizes"], {name: one for name, one in results["ways"].items() if "error" not in one}
    base = ways.get("torch")
    cells = []
    for name, one in ways.items():
        ratio = f"{base['seconds_a_step'] / one['seconds_a_step']:.2f}×" if base else "–"
        alike = min(50, len(one["losses"]), len(base["losses"]) if base else 0)
        apart = (
            max((abs(a - b) for a, b in zip(one["losses"][:alike], base["losses"][:alike], strict=True)), default=0.0)
            if base
            else 0
        )
        cells.append(
            [
                name,
                f"{1e3 * one['seconds_a_step']:.1f} ms",
                ratio,
                len(one["losses"]),
                f"{one['losses'][-1]:.3f}",
                f"{one['accuracy_by_epoch'][-1]:.1%}",
                f"{apart:.0e}",
            ]
        )
    lines = [
        f"{results['data']}: {sizes['images']} images of {results['pixels']} pixels, {sizes['layers']} layer(s) of "
        f"{sizes['heads']} heads, "
        f"{sizes['channels']} channels, batch {sizes['batch']}; {made_on(results['machine'])}. {PAPER}",
        "",
        *markdown(
            ["way", "a training step", "over torch", "steps", "last loss", "test accuracy", "losses apart (first 50)"],
            cells,
        ),
    ]
    return "\n".join([*lines, *errors([{"way": n, **o} for n, o in results["ways"].items()], ("way",))]) + "\n"


def draw(results: Results, path: Path) -> None:
    ways = {name: one for name, one in results["ways"].items() if "error" not in one}
    plot_losses(ways, f"{results['data']}, pixel by pixel", path, "accuracy_by_epoch")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command(__doc__)
    parser.add_argument(
        "--data", type=Path, help="CIFAR-10's folder, binary or pickled; without it, images are generated"
    )
    parser.add_argument("--size", choices=("small", "large"), default="small", help="of the network (default: small)")
    parser.add_argument("--epochs", type=whole)
    parser.add_argument("--images", type=whole, help="most images to train on")
    options = begin(parser, arguments)
    size = "fast" if options.fast else options.size
    sizes: Results = dict(SIZES[size])
    sizes |= {name: getattr(options, name) for name in ("epochs", "images") if getattr(options, name)}
    if options.data is None:  # as many as a few minutes can learn from
        sizes |= {"images": min(sizes["images"], 5000), "test": min(sizes["test"], 1000)}
    sizes["minutes_a_way"] = options.minutes / len(WAYS) if options.minutes else None
    try:
        name, data, test = cifar.given(options.data, sizes["images"], sizes["test"])
    except ValueError as error:
        parser.error(str(error))
    most = PIXELS.get(size)
    data, test = (
        (pixels(images, most).to(options.device), labels.to(options.device)) for images, labels in (data, test)
    )
    torch.manual_seed(0)
    start = copy.deepcopy(
        Classifier(*(sizes[key] for key in ("channels", "heads", "layers", "strides")), None).state_dict()
    )
    results: Results = {
        "data": name,
        "machine": facts(options.device),
        "sizes": sizes,
        "pixels": len(data[0]),
        "ways": {},
    }
    base = ("cifar10" if options.data else "generated") + ("_large" if size == "large" else "")
    base += "" if options.device == "cpu" else f"_{options.device}"
    folder = folder_of(options, __file__)
    for way in WAYS:
        results["ways"][way] = attempt({}, lambda w=way: train(w, start, data, test, sizes, options))
        save(base, results, folder)
    print(table(results))
    write(base, results, folder, table, draw)


if __name__ == "__main__":
    main()
