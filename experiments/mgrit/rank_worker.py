"""What one of many processes measures: multigrid on its slice of time. Started by `experiments.mgrit.ranks`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

import timeloom as tl
from experiments.harness import Clock, now, summary
from timeloom.distributed import TimeParallel, shard, slice_of, sum_over_time, time_mesh, traffic
from timeloom.distributed.group import group_of
from timeloom.solvers import MGRIT, Solver

WAYS: dict[str, Solver] = {"exact multigrid": MGRIT(tol=1e-5), "multigrid as published": MGRIT.paper()}
PATIENCE = 1.0
"""Seconds of a step beyond which one turn is enough."""
EXCHANGES = 50


def layer_of(solver: Solver | str, inputs: int, hidden: int) -> tl.ImplicitGRU:
    torch.manual_seed(0)
    return tl.ImplicitGRU(inputs, hidden, solver=solver)


def inputs_of(steps: int, batch: int, inputs: int) -> Tensor:
    return torch.randn(steps, batch, inputs, generator=torch.Generator().manual_seed(1))


def measure(way: str, steps: int, given: argparse.Namespace, mesh: DeviceMesh) -> dict[str, Any]:
    """Milliseconds of the slowest rank, forward and backward apart; what was sent; how far it is from one process."""
    layer = layer_of(WAYS[way], given.inputs, given.hidden)
    net: torch.nn.Module = TimeParallel(layer, mesh)
    groups, mine = mesh["data"].size(), mesh.get_local_rank("data")
    if groups > 1:
        net = DistributedDataParallel(net, process_group=mesh.get_group("data"))
    whole = inputs_of(steps, given.batch, given.inputs)
    local = shard(whole.chunk(groups, 1)[mine], mesh)
    forwards, backwards = [], []
    for turn in range(given.turns + 1):
        layer.zero_grad()
        dist.barrier()
        before, began = traffic(mesh), now()
        y, _ = net(local)
        loss = sum_over_time(y.square().sum(), mesh)
        middle = now()
        loss.backward()
        taken = torch.tensor([middle - began, now() - middle])
        sent = traffic(mesh).since(before)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        if turn:  # the first one warms up
            forwards.append(1e3 * float(taken[0]))
            backwards.append(1e3 * float(taken[1]))
            if float(taken.sum()) > PATIENCE:
                break
    report = layer.reports[0]
    found: dict[str, Any] = {
        "forward_ms": summary(forwards)["fastest"],
        "backward_ms": summary(backwards)["fastest"],
        "both_ms": min(a + b for a, b in zip(forwards, backwards, strict=True)),
        "median_ms": summary([a + b for a, b in zip(forwards, backwards, strict=True)])["median"],
        "cycles": [report.iterations, report.backward.iterations if report.backward else 0],
        "collectives": sent.collectives,
        "messages": sent.messages,
        "kilobytes": sent.bytes / 1024,
    }
    if steps <= given.compared and groups == 1:
        found |= apart(way, y, layer, whole, given, mesh)
    return found


def apart(
    way: str, y: Tensor, layer: tl.ImplicitGRU, x: Tensor, given: argparse.Namespace, mesh: DeviceMesh
) -> dict[str, float]:
    """The largest difference of states and of gradients from one process in the same setting."""
    alone = layer_of(WAYS[way], given.inputs, given.hidden)
    states, _ = alone(x)
    states.square().sum().backward()
    off = float((y - states[slice_of(len(x), mesh)]).detach().abs().max())
    grads = [(mine.grad, true.grad) for mine, true in zip(layer.parameters(), alone.parameters(), strict=True)]
    worst = torch.tensor([off, max(float((mine - true).norm() / true.norm()) for mine, true in grads)])
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return {"states_off": float(worst[0]), "gradients_off": float(worst[1])}


def exchange(hidden: int, batch: int, mesh: DeviceMesh) -> float:
    """Milliseconds of the fastest exchange of one state between all ranks of a sequence."""
    group, state, taken = group_of(mesh), torch.zeros(batch, hidden), []
    for _ in range(EXCHANGES):
        began = now()
        group.gather(state)
        taken.append(now() - began)
    return 1e3 * min(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("time", "batch", "inputs", "hidden", "turns", "compared"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--lengths", type=int, nargs="+", required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--to", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    mesh, clock = time_mesh(given.time, device="cpu"), Clock(given.seconds / 60)
    rows: list[dict[str, Any]] = []
    hop = exchange(given.hidden, given.batch, mesh)
    ranks, size = dist.get_world_size(), mesh["time"].size()
    for steps in sorted(given.lengths, reverse=True):  # the longest counts most, and has the kernels compiled
        for way in WAYS:
            over = torch.tensor(float(clock.over))
            dist.broadcast(over, 0)  # all ranks stop together
            if over:
                continue
            where = {"way": way, "ranks": ranks, "time_ranks": size, "steps": steps}
            rows.append({**where, **measure(way, steps, given, mesh), "exchange_ms": hop})
            if dist.get_rank() == 0:
                given.to.write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
