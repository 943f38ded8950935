"""The multigrid paper's example over many processes: an implicit GRU on sequences of 128 … 16384 steps, in one command.

    torchrun --nproc-per-node 2 -m experiments.mgrit.ranks

Every process holds its slice of time. The published setting (`MGRIT.paper()`) and exact multigrid (`MGRIT()`), forward
and backward, float64; beside the times stands how far states and gradients are from one process in the same setting,
and what was sent. Adds to results/ranks.json under the number of processes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import timeloom as tl
from experiments.mgrit.results import FOLDER, facts, save
from timeloom.distributed import TimeParallel, shard, slice_of, sum_over_time, time_mesh, traffic
from timeloom.solvers import MGRIT, Solver

BATCH, INPUTS, SIZE, TURNS = 4, 8, 16, 3
LENGTHS = tuple(2**k for k in range(7, 15))
SOLVERS: dict[str, Solver] = {"as published": MGRIT.paper(), "exact": MGRIT(tol=1e-12)}


def layer_of(solver: Solver) -> tl.ImplicitGRU:
    torch.manual_seed(0)
    return tl.ImplicitGRU(INPUTS, SIZE, solver=solver, dtype=torch.float64)


def measure(steps: int, solver: Solver, mesh: DeviceMesh) -> dict[str, Any]:
    layer, x = layer_of(solver), torch.randn(steps, BATCH, INPUTS, dtype=torch.float64)
    net, local = TimeParallel(layer, mesh), shard(x, mesh)
    taken = []
    for _ in range(TURNS):
        layer.zero_grad()
        dist.barrier()
        before, began = traffic(mesh), time.perf_counter()
        y, _ = net(local)
        sum_over_time(y.square().sum(), mesh).backward()
        taken.append(1e3 * (time.perf_counter() - began))
    sent, report = traffic(mesh).since(before), layer.reports[0]
    found = {
        "steps": steps,
        "milliseconds": statistics.median(taken),
        "cycles": [report.iterations, report.backward.iterations if report.backward else 0],
        "collectives": sent.collectives,
        "messages": sent.messages,
        "kilobytes": sent.bytes / 1024,
    }
    alone = layer_of(solver)
    whole, _ = alone(x)  # one process, all of time
    whole.square().sum().backward()
    off = float((y - whole[slice_of(steps, mesh)]).detach().abs().max())
    grads = [(mine.grad, true.grad) for mine, true in zip(layer.parameters(), alone.parameters(), strict=True)]
    apart = max(float((mine - true).norm() / true.norm()) for mine, true in grads)
    worst = torch.tensor([off, apart], dtype=torch.float64)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return found | {"states off by": float(worst[0]), "gradients off by": float(worst[1])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--longest", type=int, default=LENGTHS[-1])
    parser.add_argument("--out", type=Path, default=FOLDER)
    options = parser.parse_args()
    torch.set_num_threads(1)
    mesh = time_mesh(device="cpu")
    ranks, lengths = dist.get_world_size(), [steps for steps in LENGTHS if steps <= options.longest]
    measured = {name: [measure(steps, solver, mesh) for steps in lengths] for name, solver in SOLVERS.items()}
    if dist.get_rank() == 0:
        kept = options.out / "ranks.json"
        results = json.loads(kept.read_text()) if kept.exists() else {"facts": facts(), "ranks": {}}
        results["ranks"] = dict(sorted((results["ranks"] | {str(ranks): measured}).items()))
        save("ranks", results, options.out)
        for name, points in measured.items():
            for point in points:
                print(f"{ranks} ranks, {name}: " + ", ".join(f"{key} {value}" for key, value in point.items()))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
