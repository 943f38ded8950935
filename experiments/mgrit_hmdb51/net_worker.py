"""What one of many processes measures: features of its frames, then the network over all. Started by `nets`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from experiments.harness import now
from experiments.mgrit.rank_worker import WARM, Team, layer_of
from experiments.processes import RowsTogether
from timeloom.distributed import TimeParallel, slice_of, sum_over_time
from timeloom.solvers import MGRIT

FEATURES, ENOUGH = 1000, 2e3
"""Of a frame; milliseconds after which features are not made once more."""
SHAPES: dict[str, dict[str, Any]] = {
    "resnet-18": {"layer_type": "basic", "depths": [2, 2, 2, 2], "hidden_sizes": [64, 128, 256, 512]},
    "resnet-34": {"layer_type": "basic", "depths": [3, 4, 6, 3], "hidden_sizes": [64, 128, 256, 512]},
    "resnet-50": {"layer_type": "bottleneck", "depths": [3, 4, 6, 3], "hidden_sizes": [256, 512, 1024, 2048]},
    "small": {"layer_type": "basic", "depths": [1, 1], "hidden_sizes": [8, 16]},
}
"""As transformers names them; weights are random, which changes no time."""


def net_of(name: str) -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    torch.manual_seed(0)
    return ResNetForImageClassification(ResNetConfig(num_labels=FEATURES, **SHAPES[name])).eval()


def features(net: nn.Module, frames: Tensor) -> Tensor:
    """`(T, B, 3, size, size)` to `(T, B, 1000)`, a batch of frames at a time."""
    with torch.no_grad():
        return torch.stack([net(some).logits for some in frames])


def measure(name: str, given: argparse.Namespace, team: Team) -> dict[str, Any]:
    """Milliseconds of the slowest process: features, and a training step of the network as published."""
    net, mesh = net_of(name), team.mesh
    layer = layer_of(MGRIT.paper(), FEATURES, given.hidden)
    model = TimeParallel(layer, mesh)
    mine = slice_of(given.frames, mesh)
    frames = torch.rand(
        given.frames, given.batch, 3, given.size, given.size, generator=torch.Generator().manual_seed(0)
    )
    frames = frames[mine]
    features(net, frames[:1])

    def slowest(began: float) -> float:
        taken = torch.tensor(now() - began)
        dist.all_reduce(taken, dist.ReduceOp.MAX, team.everyone)
        return 1e3 * float(taken)

    made, stepped = list[float](), list[float]()
    while len(made) < given.turns and sum(made) < ENOUGH:
        dist.barrier(team.everyone)
        began = now()
        x = features(net, frames)
        made.append(slowest(began))
    for _ in range(given.turns + WARM):
        layer.zero_grad()
        dist.barrier(team.everyone)
        began = now()
        sum_over_time(model(x)[0].square().sum(), mesh).backward()
        stepped.append(slowest(began))
    return {"features_ms": min(made), "network_ms": min(stepped[WARM:])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for option in ("frames", "size", "batch", "hidden", "turns"):
        parser.add_argument(f"--{option}", type=int, required=True)
    parser.add_argument("--ranks", type=int, nargs="+", required=True)
    parser.add_argument("--nets", choices=tuple(SHAPES), nargs="+", required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--to", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = RowsTogether(given.seconds, given.to)
    for ranks in given.ranks:
        team = Team.of(ranks, ranks)
        for name in given.nets:
            where = {"net": name, "ranks": ranks, "way": "multigrid as published"}
            rows.add(ranks, lambda where=where, name=name, team=team: where | measure(name, given, team))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
