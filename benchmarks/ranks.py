"""One sequence over many processes on this machine: time, bytes and collectives of a training step, and a cost model.

    python -m benchmarks.ranks

Ranks exchange messages, as between machines. Every rank has one thread. With more ranks than cores they take turns: the
table shows that too. The model is fitted to all points but those of the longest sequence, which it must predict, and
then extrapolated. And how much slower one rank is than a plain call: both in turns, in one process.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import timeloom as tl
from benchmarks import rank_model
from benchmarks.rank_model import Model, fit, plot
from timeloom.distributed import TimeParallel, group, shard, sum_over_time, time_mesh, traffic
from timeloom.distributed.mesh import group_of

RESULTS = Path(__file__).parent / "results"
RANKS = (1, 2, 4)
STEPS = (2048, 8192, 32768)
BATCHES = (1, 8)
HIDDEN = 32
WARM_UPS, ROUNDS, REPEATS = 4, 10, 3
TURNS = 200
"""Turns of the plain call and of one rank."""


@dataclass(frozen=True)
class Point:
    """One measured training step (forward and backward)."""

    ranks: int
    steps: int
    batch: int
    milliseconds: float
    """The fastest round: ranks wait for each other, so other work on the machine delays all of them."""
    median: float
    computing: float
    """Milliseconds of processor time of one rank, the least of all rounds, without waiting and other programs."""
    collectives: int
    kilobytes: float
    """KiB sent by one rank."""
    warmup: int
    sweeps: tuple[int, int]


def measure(rank: int, ranks: int, port: int, send: Any) -> None:
    """Measure all points for one number of ranks, and the milliseconds of one exchange; rank 0 sends them."""
    mesh = _start(rank, ranks, port)
    points = [_point(mesh, ranks, steps, batch) for batch in BATCHES for steps in STEPS]
    team, message = group_of(mesh), torch.zeros(2 * HIDDEN + 5)
    exchange = min(_seconds(lambda: team.gather(message)) for _ in range(300))
    if rank == 0:
        send.send((points, 1e3 * exchange))
    dist.barrier()
    dist.destroy_process_group()


def measure_overhead(rank: int, ranks: int, port: int, send: Any) -> None:
    """Milliseconds of a plain training step and of one over a single rank, in turns: `{(T, B): [(plain, rank), …]}`."""
    mesh, found = _start(rank, ranks, port), {}
    for batch in BATCHES:
        for steps in STEPS[:2]:
            torch.manual_seed(0)
            plain, layer = tl.GRU(HIDDEN, HIDDEN), tl.GRU(HIDDEN, HIDDEN)
            wrapped, x = TimeParallel(layer, mesh), torch.randn(steps, batch, HIDDEN)
            calls = [_training_step(net, owner, x) for net, owner in ((plain, plain), (wrapped, layer))]
            for call in calls * WARM_UPS:
                call()
            found[steps, batch] = [[1e3 * _seconds(call) for call in calls] for _ in range(TURNS)]
    send.send(found)
    dist.destroy_process_group()


def _training_step(net: Any, owner: Any, x: torch.Tensor) -> Any:
    def step() -> None:
        owner.zero_grad()
        y, _ = net(x)
        y.square().sum().backward()

    return step


def _start(rank: int, ranks: int, port: int) -> Any:
    torch.set_num_threads(1)
    group.SHARE_MEMORY = False  # the measurements are to predict several machines
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(ranks)}
    return time_mesh(device="cpu")


def _point(mesh: Any, ranks: int, steps: int, batch: int) -> Point:
    torch.manual_seed(0)
    layer = tl.GRU(HIDDEN, HIDDEN)
    net, x = TimeParallel(layer, mesh), shard(torch.randn(steps, batch, HIDDEN), mesh)

    def step() -> None:
        layer.zero_grad()
        y, _ = net(x)
        sum_over_time(y.square().sum(), mesh).backward()

    for _ in range(WARM_UPS):
        step()
    before, taken, computed = traffic(mesh), [], []
    for _ in range(ROUNDS):
        dist.barrier()
        began = time.process_time()
        taken.append(_seconds(step))
        computed.append(time.process_time() - began)
    sent = traffic(mesh).since(before)
    report = layer.reports[0]
    sweeps = (report.iterations, report.backward.iterations if report.backward else 0)
    return Point(
        ranks, steps, batch, 1e3 * min(taken),
        1e3 * statistics.median(taken), 1e3 * min(computed), sent.collectives // ROUNDS,
        sent.bytes / ROUNDS / 1024, report.warmup, sweeps,
    )  # fmt: skip


def _seconds(call: Any) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def launch(ranks: int, work: Any = measure) -> Any:
    context = multiprocessing.get_context("spawn")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    receive, send = context.Pipe(duplex=False)
    processes = [context.Process(target=work, args=(rank, ranks, port, send)) for rank in range(ranks)]
    for process in processes:
        process.start()
    send.close()  # so that the end of the processes is noticed here
    found = receive.recv()
    for process in processes:
        process.join()
    return found


def together(repeats: list[tuple[list[Point], float]]) -> tuple[list[Point], float]:
    """The fastest of several runs, and the median of their medians."""
    points = []
    for same in zip(*(found for found, _ in repeats), strict=True):
        best = min(same, key=lambda point: point.milliseconds)
        median, computing = statistics.median(p.median for p in same), min(p.computing for p in same)
        points.append(replace(best, median=median, computing=computing))
    return points, min(exchange for _, exchange in repeats)


def overhead(taken: list[list[float]]) -> dict[str, float]:
    """Medians from turns of a plain call and of one rank."""
    plain, one = (statistics.median(column) for column in zip(*taken, strict=True))
    return {"plain": plain, "one rank": one, "ratio": statistics.median(ranked / alone for alone, ranked in taken)}


def overheads(found: dict[str, dict[str, float]]) -> list[str]:
    """How much slower one rank is than a plain call, in words."""
    lines = [f"One rank beside a plain call, {TURNS} turns each, one after the other, in one process:", ""]
    lines += ["| | plain, median ms | one rank, median ms | median of the ratios |", "|---|--:|--:|--:|"]
    lines += [f"| {name} | {m['plain']:.3f} | {m['one rank']:.3f} | {m['ratio']:.3f} |" for name, m in found.items()]
    return lines


def table(
    points: list[Point], models: dict[int, tuple[Model, Model]], exchanges: dict[int, float], facts: dict[str, Any]
) -> str:
    cores = facts["cores"]
    lines = [
        "# One GRU sequence over many processes, forward + backward, float32",
        "",
        f"{cores} cores, one thread a rank, torch {facts['torch']}, n = {HIDDEN}, default weights. Command:",
        "`python -m benchmarks.ranks`. Fastest and median training step, and the processor time of one rank in it. The",
        "model of a rank's processor time is `o + γ (T/R + warm-up)` (one rank by itself: `o₁ + γ T`), that of the",
        "fastest step `max(1, R/cores) · (o + γ (T/R + warm-up)) + collectives · α(R)`, with α the fastest exchange.",
        "The longest sequence was not fitted (held out).",
        f"Load average of this machine as the run began: {facts['load']:.1f}. Ranks wait for each other: well above 0,",
        "times of steps say little, and processor times tell what a rank does.",
        "",
        "| ranks | T | B | ms | median | speed over 1 rank | model ms | processor ms | model | collectives | KiB sent "
        "| warm-up | sweeps |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|---|",
    ]
    alone = {(p.steps, p.batch): p.milliseconds for p in points if p.ranks == 1}
    for p in points:
        held = " (held out)" if held_out(p) else ""
        model, warmup = (models[p.batch][0], 0) if p.ranks == 1 else (models[p.batch][1], p.warmup)
        compute = f"{model.compute(p.ranks, p.steps, warmup):.2f}{held}"
        step = f"{model.cost(p.ranks, p.steps, warmup, p.collectives * exchanges.get(p.ranks, 0), cores):.2f}{held}"
        lines.append(
            f"| {p.ranks} | {p.steps} | {p.batch} | {p.milliseconds:.2f} | {p.median:.2f} | "
            f"{alone[p.steps, p.batch] / p.milliseconds:.2f}× | {step} | {p.computing:.2f} | {compute} | "
            f"{p.collectives} | {p.kilobytes:.1f} | {p.warmup} | {list(p.sweeps)} |"
        )
    lines += ["", "| B | o₁, ms | o, ms | γ, µs a time step |", "|--:|--:|--:|--:|"]
    for batch, (alone_model, model) in models.items():
        lines.append(f"| {batch} | {alone_model.fixed:.2f} | {model.fixed:.2f} | {1e3 * model.per_step:.3f} |")
    lines += ["", "One exchange: " + ", ".join(f"{1e3 * ms:.0f} µs on {r} ranks" for r, ms in exchanges.items()) + "."]
    return "\n".join(lines) + "\n"


def held_out(point: Point) -> bool:
    return point.steps == max(STEPS)


def measured() -> dict[str, Any]:
    """All measurements, as they are stored."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    load, turns = os.getloadavg()[0], launch(1, measure_overhead)
    repeats = [{ranks: launch(ranks) for ranks in RANKS} for _ in range(REPEATS)]
    found = {ranks: together([repeat[ranks] for repeat in repeats]) for ranks in RANKS}
    return {
        "cores": cores,
        "load": load,
        "torch": torch.__version__,
        "points": [asdict(point) for points, _ in found.values() for point in points],
        "exchange_ms": {str(ranks): exchange for ranks, (_, exchange) in found.items() if ranks > 1},
        "overhead": {f"T = {steps}, B = {batch}": overhead(taken) for (steps, batch), taken in turns.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stored", action="store_true", help="measure nothing: fit and draw what is stored")
    stored = RESULTS / "ranks.json"
    facts = json.loads(stored.read_text()) if parser.parse_args().stored else measured()
    stored.write_text(json.dumps(facts, indent=1) + "\n")
    points = [Point(**point) for point in facts["points"]]
    exchanges = {int(ranks): exchange for ranks, exchange in facts["exchange_ms"].items()}
    fitted = [point for point in points if not held_out(point)]
    models = {batch: fit([point for point in fitted if point.batch == batch]) for batch in BATCHES}
    machines = [rank_model.cpu_cluster(*models[1], exchanges[2]), rank_model.h200_nodes()]
    text = table(points, models, exchanges, facts)
    text += "\n" + "\n".join([*overheads(facts["overhead"]), "", ASSUMED, "", *rank_model.table(machines)]) + "\n"
    print(text)
    (RESULTS / "ranks.md").write_text(text)
    alone = {p.steps: p.computing for p in points if p.ranks == 1 and p.batch == 1}
    speeds = [(p.ranks, alone[p.steps] / p.computing, p.steps) for p in points if p.batch == 1]
    plot(RESULTS / "ranks.png", machines, speeds)


ASSUMED = """Predictions for n = 32, B = 1, over one rank with the same sequence; seven small collectives, which go
round a ring up to 8 ranks and take log₂ R rounds beyond, and one sum of 25 KiB. CPU cluster: o and γ of this table;
every hop takes the exchange measured here between two processes; gloo's ring of 2 (R − 1) hops for the sum, 100 Gb
Ethernet. H200 nodes: a call of 3.0 ms and 0.194 ms for 16,384 steps, as measured on one H200; hops as NCCL's own model
assumes them (3.6 µs to start a ring, 4.4 µs a tree; 0.5 µs a hop on NVLink, 2.7 µs between nodes, 5 µs in a tree
between nodes: src/graph/tuning.cc), 20 µs to launch messages, 450 and 50 GB/s. Latencies and bandwidths are
assumptions; no GPUs and no network were measured."""


if __name__ == "__main__":
    main()
