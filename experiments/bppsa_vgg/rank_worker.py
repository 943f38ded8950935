"""What one of many processes measures: a gradient of the pruned VGG-11. Started by `experiments.bppsa_vgg.ranks`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

import timeloom as tl
from experiments import cifar
from experiments.bppsa_vgg.run import pruned, vgg11
from experiments.harness import now
from timeloom.bppsa.scan import ScanTrace

LEVELS: dict[str, int | None] = {"levels=1": 1, "levels=2": 2, "all levels": None}


def measure(share: int, batch: int, turns: int) -> list[dict[str, Any]]:
    """Milliseconds of the slowest process, and the products of the scan with their FLOPs."""
    torch.manual_seed(0)
    model = pruned(vgg11(share, norm=False), 0.97)
    x, target = cifar.generated(batch, 0)

    def loss(y: Tensor) -> Tensor:
        return F.cross_entropy(y, target)

    rows = []
    for way, levels in LEVELS.items():
        taken, traces = list[float](), list[ScanTrace]()
        for turn in range(turns + 1):
            model.zero_grad()
            dist.barrier()
            began = now()
            tl.chain_backward(model, x, loss, levels, traces.append, dist.group.WORLD)
            seconds = torch.tensor(now() - began)
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            if turn:  # the first one warms up
                taken.append(1e3 * float(seconds))
        products = [[one.phase, one.level, one.flops] for one in traces[-1].operations]
        rows.append({"way": way, "ranks": dist.get_world_size(), "ms": min(taken), "products": products})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("share", "batch", "turns"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--to", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = measure(given.share, given.batch, given.turns)
    if dist.get_rank() == 0:
        given.to.write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
