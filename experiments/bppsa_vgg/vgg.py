"""Retrain a pruned VGG-11 with gradients by the scan, and count what the scan costs along its critical path.

    python experiments/bppsa_vgg/vgg.py   # three minutes on one core; writes vgg.json and vgg.png beside this file

As in the paper's study (Wang, Bai and Pekhimenko, "BPPSA", 2020): 97 % of the weights of all convolutions and linear
layers are pruned by size, and the network is retrained. Each retraining step is made by `chain_backward` and,
on a twin, by autograd. Channels are a quarter of VGG-11's, so that one core is enough; images are 32×32×3, ten
classes of smooth patterns with noise, made from a seed.

Floating-point operations are counted for one image. The critical path takes the largest product of every level of the
scan: what is left with a processor for each product. Back-propagation is counted twice: over the layers as they are
(dense convolutions), and over the same sparse Jacobians.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune

import timeloom as tl
from timeloom.bppsa.scan import ScanTrace

HERE = Path(__file__).parent
CHANNELS = (64, "pool", 128, "pool", 256, 256, "pool", 512, 512, "pool", 512, 512, "pool")


def vgg11(share: int) -> nn.Sequential:
    """VGG-11 for 32×32 images with 1/share of its channels: eight convolutions, three linear layers."""
    layers: list[nn.Module] = []
    width = 3
    for entry in CHANNELS:
        if isinstance(entry, str):
            layers.append(nn.MaxPool2d(2))
            continue
        layers += [nn.Conv2d(width, entry // share, 3, padding=1), nn.ReLU()]
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


class Images:
    """Ten classes of smooth patterns, shifted and noisy."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        coarse = torch.randn(10, 3, 4, 4, generator=self.generator)
        self.patterns = F.interpolate(coarse, size=(32, 32), mode="bicubic")

    def batch(self, size: int) -> tuple[Tensor, Tensor]:
        target = torch.randint(0, 10, (size,), generator=self.generator)
        shifts = torch.randint(-4, 5, (size, 2), generator=self.generator).tolist()
        images = torch.stack([self.patterns[k].roll(s, (-2, -1)) for k, s in zip(target.tolist(), shifts, strict=True)])
        return images + 0.5 * torch.randn(images.shape, generator=self.generator), target


def train(model: nn.Sequential, images: Images, steps: int, batch: int) -> list[float]:
    """By autograd, the whole network."""
    optimiser, losses = torch.optim.Adam(model.parameters(), lr=1e-3), []
    for _ in range(steps):
        x, target = images.batch(batch)
        loss = F.cross_entropy(model(x), target)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses


def retrain(
    models: dict[str, nn.Sequential], images: Images, steps: int, batch: int
) -> tuple[dict[str, list[float]], list[float], list[ScanTrace]]:
    """Both twins on the same images: losses, the gradients' largest relative difference in each step, and traces.

    The difference is taken on one network: the gradients of the scan against autograd's for the same weights.
    """
    optimisers = {name: torch.optim.Adam(model.parameters(), lr=3e-3) for name, model in models.items()}
    losses: dict[str, list[float]] = {name: [] for name in models}
    differences: list[float] = []
    traces: list[ScanTrace] = []
    for _ in range(steps):
        x, target = images.batch(batch)

        def loss(y: Tensor, target: Tensor = target) -> Tensor:
            return F.cross_entropy(y, target)

        for name, model in models.items():
            optimisers[name].zero_grad()
            exact = torch.autograd.grad(loss(model(x)), list(model.parameters()))
            if name == "scan":
                value = tl.chain_backward(model, x, loss, record=traces.append)
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


def accuracy(model: nn.Sequential, images: Images) -> float:
    x, target = images.batch(500)
    with torch.no_grad():
        return float((model(x).argmax(-1) == target).float().mean())


def dense_flops(model: nn.Sequential) -> list[float]:
    """Of each layer's gradient by its input, from the last layer to the second that has weights, zeros included."""
    point, flops = torch.zeros(1, 3, 32, 32), []
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


def by_levels(model: nn.Sequential, images: Images, batch: int) -> list[dict[str, float]]:
    """Critical path and total work of the scan by how many levels it multiplies matrices in."""
    x, target = images.batch(batch)
    traces: list[ScanTrace] = []
    model.zero_grad()
    tl.chain_backward(model, x, lambda y: F.cross_entropy(y, target), record=traces.append)
    levels = 1 + max(level for _, level, _ in traces[0].steps())
    for level in range(levels):
        tl.chain_backward(model, x, lambda y: F.cross_entropy(y, target), levels=level, record=traces.append)
    rows = []
    for level, trace in zip(range(levels), traces[1:], strict=True):
        sizes = {"critical_flops": trace.critical_flops, "total_flops": trace.total_flops}
        rows.append({"levels": level, "critical_steps": len(trace.steps()), **sizes})
    return rows


def plot(results: dict[str, object], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.2), layout="constrained")
    steps = results["scan_steps"]
    colours = {"up": "tab:blue", "middle": "tab:gray", "down": "tab:green"}
    for i, step in enumerate(steps):
        left.bar(i, step["flops"], color=colours[step["phase"]], zorder=2)
    for phase in ("up", "down"):
        left.bar(0, 0, color=colours[phase], label=f"scan, {phase}-sweep: largest product of a level")
    for name, style in (("dense_steps", "tab:red"), ("sparse_steps", "tab:orange")):
        label = f"back-propagation, {name.removesuffix('_steps')} layers"
        left.step(range(len(results[name])), results[name], color=style, where="mid", label=label)
    left.set(yscale="log", xlabel="step of the critical path", ylabel="FLOPs for one image")
    left.set_ylim(bottom=1)
    left.legend(fontsize=8)
    losses = results["losses"]
    right.plot(losses["autograd"], color="tab:red", label="autograd")
    right.plot(losses["scan"], "--", color="tab:blue", label="scan")
    right.set(
        xlabel="retraining step",
        ylabel="loss",
        title=f"gradients differ by {results['largest_difference']:.0e} at most",
    )
    right.legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--share", type=int, default=4, help="by what the channels are divided")
    parser.add_argument("--amount", type=float, default=0.97, help="share of the weights that are pruned")
    parser.add_argument("--train", type=int, default=80, help="steps before pruning")
    parser.add_argument("--retrain", type=int, default=80, help="steps after it")
    parser.add_argument("--batch", type=int, default=16, help="images in a retraining step")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = vgg11(options.share)
    images = Images(1)
    first = train(model, images, options.train, 32)
    before = accuracy(model, images)
    print(f"trained: loss {first[0]:.2f} -> {first[-1]:.2f}, accuracy {before:.2f}", flush=True)
    twins = {}
    for name in ("scan", "autograd"):
        twins[name] = vgg11(options.share)
        twins[name].load_state_dict(model.state_dict())
        pruned(twins[name], options.amount)
    cut = accuracy(twins["scan"], images)
    losses, differences, traces = retrain(twins, images, options.retrain, options.batch)
    after = accuracy(twins["scan"], images)
    last = traces[-1]
    dense = dense_flops(twins["scan"])
    results: dict[str, object] = {
        "options": vars(options),
        "accuracy": {"trained": before, "pruned": cut, "retrained": after},
        "losses": losses,
        "largest_difference": max(differences),
        "serial_dense_flops": sum(dense),
        "serial_sparse_flops": last.serial_flops,
        "scan_critical_flops": last.critical_flops,
        "scan_total_flops": last.total_flops,
        "levels": by_levels(twins["scan"], images, options.batch),
        "dense_steps": dense,
        "sparse_steps": last.serial,
        "scan_steps": [{"phase": phase, "level": level, "flops": flops} for phase, level, flops in last.steps()],
    }
    for key in (
        "accuracy",
        "largest_difference",
        "serial_dense_flops",
        "serial_sparse_flops",
        "scan_critical_flops",
        "scan_total_flops",
    ):
        print(key, results[key])
    for row in results["levels"]:
        print(row)
    assert all(math.isfinite(value) for value in losses["scan"])
    (HERE / "vgg.json").write_text(json.dumps(results, indent=1) + "\n")
    plot(results, HERE / "vgg.png")


if __name__ == "__main__":
    main()
