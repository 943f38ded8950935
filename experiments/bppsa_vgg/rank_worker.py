"""What one of many processes measures: a gradient of the pruned VGG-11. Started by `experiments.bppsa_vgg.ranks`."""

from __future__ import annotations

import argparse
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
from experiments.processes import RowsTogether
from timeloom.bppsa.scan import ScanTrace

LEVELS: dict[str, int | None] = {"levels=1": 1, "levels=2": 2, "all levels": None}


def measure(levels: int | None, team: dist.ProcessGroup, given: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of the slowest process, and the products of the scan with their FLOPs."""
    torch.manual_seed(0)
    model = pruned(vgg11(given.share, norm=False), 0.97)
    x, target = cifar.generated(given.batch, 0)

    def loss(y: Tensor) -> Tensor:
        return F.cross_entropy(y, target)

    taken, traces = list[float](), list[ScanTrace]()
    for turn in range(given.turns + 1):
        model.zero_grad()
        dist.barrier(team)
        began = now()
        tl.chain_backward(model, x, loss, levels, traces.append, team)
        seconds = torch.tensor(now() - began)
        dist.all_reduce(seconds, dist.ReduceOp.MAX, team)
        if turn:  # the first one warms up
            taken.append(1e3 * float(seconds))
    products = [[one.phase, one.level, one.flops] for one in traces[-1].operations]
    return {"ms": min(taken), "products": products}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("share", "batch", "turns"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--ranks", type=int, nargs="+", required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--to", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = RowsTogether(given.seconds, given.to)
    done = {(row["way"], row["ranks"]) for row in rows.held}
    teams = {ranks: dist.new_group(list(range(ranks))) for ranks in given.ranks}
    for way, levels in LEVELS.items():
        for ranks, team in teams.items():
            where = {"way": way, "ranks": ranks}
            if (way, ranks) in done:
                continue
            rows.add(ranks, lambda where=where, levels=levels, team=team: where | measure(levels, team, given))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
