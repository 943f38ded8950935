"""Training on a GPU, end to end: DEER's EigenWorms model on data of that shape, with torch.nn.GRU and with timeloom.

python -m benchmarks.gpu_training          # five GRU layers of 32 units, 17,984 steps of 6 channels, batch 4
python -m benchmarks.gpu_training --scale  # a million steps; 16,384 steps of 64 sequences and 512 units
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import timeloom
from benchmarks.gpu import clock
from benchmarks.results import new_file

RESULTS = Path(__file__).parent / "results"
STEPS, CHANNELS, CLASSES, BATCH = 17984, 6, 5, 4
TRAINING_STEPS = 30


class Classifier(nn.Module):
    """An encoder, five residual GRU layers with LayerNorm, mean pooling."""

    def __init__(self, hidden: int = 32, layers: int = 5) -> None:
        super().__init__()
        self.encoder = nn.Linear(CHANNELS, hidden)
        self.layers = nn.ModuleList(nn.GRU(hidden, hidden) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(layers))
        self.head = nn.Linear(hidden, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.encoder(x)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            h = norm(h + layer(h)[0])
        scores: Tensor = self.head(h.mean(0))
        return scores


def batch_of(index: int) -> tuple[Tensor, Tensor]:
    """Generated series of EigenWorms' shape, whose class is the frequency of one channel."""
    generator = torch.Generator(device=clock.DEVICE).manual_seed(index)
    labels = torch.randint(CLASSES, (BATCH,), generator=generator, device=clock.DEVICE)
    x = torch.randn(STEPS, BATCH, CHANNELS, generator=generator, device=clock.DEVICE)
    time_axis = torch.arange(STEPS, device=clock.DEVICE)[:, None] / 400
    x[..., 0] += torch.sin(time_axis * (1 + labels))
    return x, labels


def train_steps(model: nn.Module, calls: Iterable[Callable[[Tensor], Tensor]]) -> tuple[list[float], list[float]]:
    """Losses and seconds of training steps, one for each of the calls: the model, or its compiled form."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses, seconds = [], []
    for index, call in enumerate(calls):
        x, labels = batch_of(index)
        torch.compiler.cudagraph_mark_step_begin()
        torch.cuda.synchronize()
        began = time.perf_counter()
        loss = nn.functional.cross_entropy(call(x), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - began)
    return losses, seconds


def train(parallel: bool) -> tuple[list[float], float]:
    """Losses, and the median seconds per step after the first ten."""
    torch.manual_seed(0)
    model = Classifier().to(clock.DEVICE)
    if parallel:
        timeloom.parallelize(model)
    losses, seconds = train_steps(model, [model] * TRAINING_STEPS)
    return losses, sorted(seconds[10:])[len(seconds[10:]) // 2]


def large(length: int, batch: int, hidden: int) -> dict[str, Any]:
    """Milliseconds and peak memory of a training step at a size where memory matters."""
    layer = timeloom.GRU(hidden, hidden).to(clock.DEVICE)
    x = torch.randn(length, batch, hidden, device=clock.DEVICE, requires_grad=True)
    samples = []
    torch.cuda.reset_peak_memory_stats()
    for _ in range(6):
        torch.cuda.synchronize()
        began = time.perf_counter()
        layer(x)[0].mean().backward()
        torch.cuda.synchronize()
        samples.append(1e3 * (time.perf_counter() - began))
    trajectory = length * batch * hidden * 4
    return {
        "length": length,
        "batch": batch,
        "hidden": hidden,
        "milliseconds": sorted(samples[2:])[2],
        "peak_over_trajectory": torch.cuda.max_memory_allocated() / trajectory,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "report": str(layer.reports[0]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_training", description=__doc__.split("\n")[0])
    parser.add_argument("--scale", action="store_true", help="sizes where memory is the question, instead")
    where = "file of the JSON (default: gpu-training.json in benchmarks/results, with --scale gpu-scale.json)"
    parser.add_argument("--out", type=new_file, help=where)
    arguments = parser.parse_args()
    out: Path = arguments.out or RESULTS / ("gpu-scale.json" if arguments.scale else "gpu-training.json")
    if not torch.cuda.is_available():
        sys.exit("benchmarks.gpu_training needs a CUDA device")
    facts: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    if arguments.scale:
        facts["large"] = [large(2**20, 1, 64), large(16384, 64, 512)]
    else:
        (theirs, slow), (ours, fast) = train(False), train(True)
        facts |= {"torch_seconds": slow, "timeloom_seconds": fast, "ratio": slow / fast}
        facts |= {"torch_losses": theirs, "timeloom_losses": ours}
        facts["largest_difference"] = max(abs(a - b) for a, b in zip(theirs, ours, strict=True))
    print(json.dumps({name: value for name, value in facts.items() if "losses" not in name}, indent=1))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
