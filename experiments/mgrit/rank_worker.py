"""What one of many processes measures: multigrid on its slice of time. Started by `experiments.mgrit.ranks`."""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

import timeloom as tl
from experiments.harness import Clock, now, summary
from timeloom.distributed import TimeParallel, shard, slice_of, sum_over_time, traffic
from timeloom.distributed.mesh import group_of
from timeloom.mgrit import marched
from timeloom.solvers import MGRIT, Shooting, Solver

REMEMBERS = "exact multigrid, long memory"
WAYS = ("exact multigrid", REMEMBERS, "multigrid as published", "multigrid as published, more levels")
"""As initialised, the network forgets so soon that the first relaxation is exact. As published, three levels leave T/16
steps to run one after the other, which 128 frames do not mind."""
BIAS = 4.0
"""Added to that of the update gate of a network that remembers."""
FIRST = tuple(WAYS[k] for k in (0, 2, 1, 3))
"""What is measured first where time is short. Groups that share data are timed by the first alone."""
COARSEST = 8
"""Steps of the coarsest level as published, at 128 frames."""
PATIENCE, SLOW = 0.5, 0.1
"""Seconds of turns after which there are enough of them, and of a turn that counts from the second one on."""
WARM = 3
"""Turns that are not counted: kernels are made in the first, and solvers learn in the next."""
EXCHANGES, MADE_AT = 50, 4096


def layer_of(solver: Solver | str, inputs: int, hidden: int, bias: float = 0.0) -> tl.ImplicitGRU:
    torch.manual_seed(0)
    layer = tl.ImplicitGRU(inputs, hidden, solver=solver)
    with torch.no_grad():
        layer.bias_ih_l0[hidden : 2 * hidden] += bias
    return layer


def network_of(way: str, steps: int, given: argparse.Namespace) -> tl.ImplicitGRU:
    return layer_of(solver_of(way, steps), given.inputs, given.hidden, BIAS if way == REMEMBERS else 0.0)


def solver_of(way: str, steps: int) -> MGRIT:
    if way.startswith("exact"):
        return MGRIT(tol=1e-5)
    return MGRIT.paper(levels=levels_for(steps)) if way.endswith("more levels") else MGRIT.paper()


def levels_for(steps: int) -> int:
    """Levels that leave as few steps on the coarsest one as are left of 128 by three of them."""
    levels = 2
    while steps >= COARSEST * 4**levels:
        levels += 1
    return levels


def inputs_of(steps: int, batch: int, inputs: int) -> Tensor:
    return torch.randn(steps, batch, inputs, generator=torch.Generator().manual_seed(1))


def make_kernels(inputs: int, hidden: int) -> None:
    """A call that is long enough for kernels to be made: short ones would wait for more of their like."""
    layer_of(Shooting(chunk=MADE_AT), inputs, hidden)(inputs_of(MADE_AT, 1, inputs))[0].sum().backward()


class Team(NamedTuple):
    """The first processes as a mesh, and as one group for what has nothing to do with time."""

    mesh: DeviceMesh
    everyone: dist.ProcessGroup

    @staticmethod
    def of(ranks: int, time: int) -> Team:
        """All processes must call this, those that do not belong to it, too."""
        mesh = DeviceMesh("cpu", torch.arange(ranks).view(-1, time), mesh_dim_names=("data", "time"))
        return Team(mesh, dist.new_group(list(range(ranks))))


def measure(way: str, steps: int, given: argparse.Namespace, team: Team) -> dict[str, Any]:
    """Milliseconds of the slowest rank, forward and backward apart; what was sent; how far it is from one process."""
    mesh, layer = team.mesh, network_of(way, steps, given)
    net: torch.nn.Module = TimeParallel(layer, mesh)
    groups, mine = mesh["data"].size(), mesh.get_local_rank("data")
    if groups > 1:
        net = DistributedDataParallel(net, process_group=mesh.get_group("data"))
    whole = inputs_of(steps, given.batch, given.inputs)
    local = shard(whole.chunk(groups, 1)[mine], mesh)
    forwards, backwards = [], []
    for turn in range(given.turns + WARM):
        layer.zero_grad()
        dist.barrier(team.everyone)
        group_of(mesh).gather(torch.zeros(1))  # ranks leave the barrier one by one, this nearly together
        before, began = traffic(mesh), now()
        y, _ = net(local)
        loss = sum_over_time(y.square().sum(), mesh)
        middle = now()
        loss.backward()
        taken = torch.tensor([middle - began, now() - middle])
        sent = traffic(mesh).since(before)
        dist.all_reduce(taken, dist.ReduceOp.MAX, team.everyone)
        slow = float(taken.sum()) > SLOW
        if turn >= WARM or (turn and slow):
            forwards.append(1e3 * float(taken[0]))
            backwards.append(1e3 * float(taken[1]))
            if sum(forwards) + sum(backwards) > 1e3 * PATIENCE:
                break
    report, both = layer.reports[0], [a + b for a, b in zip(forwards, backwards, strict=True)]
    found: dict[str, Any] = {
        "forward_ms": summary(forwards)[given.statistic],
        "backward_ms": summary(backwards)[given.statistic],
        "both_ms": summary(both)[given.statistic],
        "median_ms": summary(both)["median"],
        "turns": len(forwards),
        "cycles": [report.iterations, report.backward.iterations if report.backward else 0],
        "collectives": sent.collectives,
        "messages": sent.messages,
        "kilobytes": sent.bytes / 1024,
    }
    same_grids = not way.endswith("more levels") or steps % (team.mesh.size() * 4 ** (levels_for(steps) - 1)) == 0
    if steps <= given.compared and groups == 1 and same_grids:
        found |= apart(way, y, layer, whole, given, team)
    return found


def apart(
    way: str, y: Tensor, layer: tl.ImplicitGRU, x: Tensor, given: argparse.Namespace, team: Team
) -> dict[str, float]:
    """The largest difference of states and of gradients from one process in the same setting."""
    alone = network_of(way, len(x), given)
    states, _ = alone(x)
    states.square().sum().backward()
    off = float((y - states[slice_of(len(x), team.mesh)]).detach().abs().max())
    grads = [(mine.grad, true.grad) for mine, true in zip(layer.parameters(), alone.parameters(), strict=True)]
    worst = torch.tensor([off, max(float((mine - true).norm() / true.norm()) for mine, true in grads)])
    dist.all_reduce(worst, dist.ReduceOp.MAX, team.everyone)
    return {"states_off": float(worst[0]), "gradients_off": float(worst[1])}


def exchange(hidden: int, batch: int, mesh: DeviceMesh) -> float:
    """Milliseconds of the fastest exchange of one state between all ranks of a sequence."""
    group, state, taken = group_of(mesh), torch.zeros(batch, hidden), []
    for _ in range(EXCHANGES):
        began = now()
        group.gather(state)
        taken.append(now() - began)
    return 1e3 * min(taken)


def shape(text: str) -> tuple[int, int]:
    """`16x8`: 16 processes, 8 of which share a sequence."""
    ranks, time = map(int, text.split("x"))
    return ranks, time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("batch", "inputs", "hidden", "turns", "compared"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--statistic", choices=("fastest", "median"), default="fastest")
    parser.add_argument("--shapes", type=shape, nargs="+", required=True)
    parser.add_argument("--lengths", type=int, nargs="+", required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--to", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = json.loads(given.to.read_text()) if given.to.exists() else []
    dist.init_process_group("gloo")  # all have read when one writes
    make_kernels(given.inputs, given.hidden)
    if max(given.lengths) >= MADE_AT:
        marched.PAYS_FROM = (
            0  # the turns here are few, and a training has these kernels after its first dozens of steps
        )
    clock = Clock(given.seconds / 60)
    teams = {shape: Team.of(*shape) for shape in given.shapes}
    parts = list(itertools.product(range(given.rounds), teams.items()))
    for number, (turn, ((ranks, time), team)) in enumerate(parts):
        if dist.get_rank() < ranks:
            share = Clock(clock.left / (len(parts) - number) / 60)
            rows += rows_of(team, ranks, time, turn, given, share, rows)
        dist.barrier()  # the others wait, and leave their cores alone
    dist.destroy_process_group()


def rows_of(
    team: Team, ranks: int, time: int, turn: int, given: argparse.Namespace, clock: Clock, before: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Lengths and ways of one team in one round that are not among those before, as far as its time goes; written as
    they come.
    """
    rows: list[dict[str, Any]] = []
    hop = exchange(given.hidden, given.batch, team.mesh)
    lengths = sorted((steps for steps in given.lengths if steps >= time), reverse=True)
    keys = ("way", "ranks", "time_ranks", "steps")
    done = {(*(row[key] for key in keys), row.get("round", 0)) for row in before if "time_ranks" in row}
    for way in FIRST if time == ranks else WAYS[:1]:
        for steps in lengths:
            if (way, ranks, time, steps, turn) in done:
                continue
            over = torch.tensor(float(clock.over))
            dist.broadcast(over, 0, team.everyone)  # all ranks stop together
            if over:
                return rows
            where = {"way": way, "ranks": ranks, "time_ranks": time, "steps": steps}
            if given.rounds > 1:
                where["round"] = turn
            rows.append({**where, **measure(way, steps, given, team), "exchange_ms": hop})
            if dist.get_rank() == 0:
                given.to.write_text(json.dumps(before + rows))
    return rows


if __name__ == "__main__":
    main()
