"""The speed grid of the DEER paper: a GRU by DEER, its relatives, shooting, torch's layer and a plain loop.

    python -m experiments.deer.grid --device cuda --minutes 4             # n 1 … 64, T 1,000 … 1,000,000, B 1 … 16
    python -m experiments.deer.grid --device cuda --minutes 4 --resume    # goes on where the last run ended
    python -m experiments.deer.grid --device cuda --batch 1 16 --ways torch loop DEER "DEER, captured" --resume
    python -m experiments.deer.grid --hidden 8 16 --steps 16384 --batch 1

Forward alone and forward + backward in float32, the fastest of several turns, with the error of outputs and of the
weights' gradient against torch in float64. torch's layer runs in windows with its state carried on beyond 32,768 steps,
where cuDNN refuses. On a GPU, DEER is also timed as a CUDA graph that is replayed. The plain loop calls
`torch.nn.GRUCell` step by step; beyond 500 steps it is timed over 500 and scaled (marked): one timing serves all of
them. Coarse points come first, so that a run of few minutes spans the grid.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

import timeloom as tl
from experiments.deer.grid_report import CAPTURED, WAYS, draw, table
from experiments.harness import (
    Clock,
    Results,
    attempt,
    begin,
    command,
    facts,
    folder_of,
    good,
    kept,
    now,
    save,
    whole,
    write,
)  # fmt: skip

SIZES = (1, 2, 4, 8, 16, 32, 64)
LENGTHS = (1000, 3000, 10_000, 30_000, 100_000, 300_000, 1_000_000)
BATCHES = (1, 2, 4, 8, 16)
COARSE = ({1, 4, 16, 64}, {1000, 10_000, 100_000, 1_000_000}, {1, 16})
BETWEEN = ("torch", "loop", "DEER", CAPTURED)
"""Ways that are wanted between the coarse points, too."""
FAST = ((2, 5), (40, 90), (2,))
SOLVERS = {"DEER": "deer", "quasi-DEER": "quasi-deer", "ELK": "elk", "shooting": "shooting", "default": "auto"}
SOLVERS[CAPTURED] = "deer"
"""The same in a CUDA graph that is replayed, without the host's time."""
INPUTS, TURNS, ENOUGH = 4, 10, 0.5
"""Input width; most turns, and seconds after which no further turn of a case begins."""
ONCE = {"torch": 1.0}
ONCE_OF_OURS = 4.0
"""Seconds of a first turn that is not repeated: ours may make kernels in it."""
WARM_UP = 1000
"""Steps of a first pass that no clock sees: kernels are made in it."""
WINDOW = 32768
"""Steps that cuDNN takes at once."""
LOOPED = 500
"""Steps that the plain loop is timed over."""
PATIENCE = {"torch": 6.0}
PATIENT = 1.5
"""Seconds of forward + backward beyond which a case is not begun, as a shorter sequence of the same way foretells."""
MOST_JACOBIANS = 2**32
"""Entries of all Jacobians, 16 GiB, beyond which DEER and ELK are not measured."""
FUSED = 32
"""Units up to which DEER on a GPU has no Jacobians in memory."""

Forward = Callable[[], Tensor]


class Loop(nn.Module):
    """A GRU as users write it: one call of a cell for each step."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.cell, self.hidden = nn.GRUCell(inputs, hidden), hidden

    def forward(self, x: Tensor) -> Tensor:
        state, outputs = x.new_zeros(x.shape[1], self.hidden), []
        for step in x.unbind(0):
            state = self.cell(step, state)
            outputs.append(state)
        return torch.stack(outputs)


def outputs(layer: nn.GRU, x: Tensor) -> Tensor:
    """torch's layer, in windows where it refuses the whole."""
    if x.device.type == "cpu" or len(x) <= WINDOW:
        return layer(x)[0]
    parts, state = [], None
    for window in x.split(WINDOW):
        part, state = layer(window, state)
        parts.append(part)
    return torch.cat(parts)


class Place:
    """Weights and inputs `(T, B, 4)` of one size, the same for all ways, and what torch finds in float64."""

    def __init__(self, hidden: int, steps: int, batch: int, device: str) -> None:
        torch.manual_seed(0)
        self.hidden, self.batch, self.device = hidden, batch, device
        self.state = nn.GRU(INPUTS, hidden).state_dict()
        self.x = torch.randn(steps, batch, INPUTS, device=device)

    @cached_property
    def truth(self) -> tuple[Tensor, Tensor]:
        """Outputs, and the gradient of the recurrent weights."""
        exact = nn.GRU(INPUTS, self.hidden, device=self.device, dtype=torch.float64)
        exact.load_state_dict(self.state)
        y = exact(self.x.double())[0]
        y.square().mean().backward()
        return y.detach(), exact.weight_hh_l0.grad


def turns(forward: Forward, weights: nn.Module, device: str, clock: Clock, once: float) -> tuple[float, float, Tensor]:
    """Milliseconds of the fastest pass without a tape, of the fastest with the backward pass, and the outputs."""
    alone, both, end = list[float](), list[float](), None
    for turn in range(TURNS + 1):
        began = now(device)
        with torch.no_grad():
            forward()
        middle = now(device)
        weights.zero_grad()
        y = forward()
        y.square().mean().backward()
        after = now(device)
        alone, both = [*alone, middle - began], [*both, after - middle]
        end = end or after + ENOUGH
        if (turn and (after > end or clock.over)) or after - began > once:
            break
    return 1e3 * min(alone[1:] or alone), 1e3 * min(both[1:] or both), y.detach()


def replays(layer: nn.GRU, x: Tensor, clock: Clock) -> tuple[float, float, Tensor]:
    """`turns` of a CUDA graph of each of the two."""

    def forward() -> Tensor:
        with torch.no_grad():
            return layer(x)[0]

    def both() -> Tensor:
        y = layer(x)[0]
        y.square().mean().backward()
        return y

    taken = []
    for run in (forward, both):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                run()
        torch.cuda.current_stream().wait_stream(side)
        layer.zero_grad()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = run()
        graph.replay()
        times: list[float] = []
        while len(times) < TURNS and not (times and clock.over):
            began = now("cuda")
            graph.replay()
            times.append(1e3 * (now("cuda") - began))
        taken.append(min(times))
    layer.zero_grad(set_to_none=False)  # replays have added up
    graph.replay()
    return taken[0], taken[1], y.detach().clone()


def foretold(rows: list[Results], way: str, hidden: int, steps: int, batch: int) -> float:
    """Seconds that a case may take: those of the longest shorter sequence of no more units and sequences, scaled."""
    seen = [
        row for row in good(rows) if row["way"] == way and row["n"] <= hidden and row["B"] <= batch and row["T"] < steps
    ]
    return max((1e-3 * row["both_ms"] * steps / row["T"] for row in seen if not row.get("scaled")), default=0.0)


def case(way: str, place: Place, clock: Clock) -> Results:
    """One way at one size."""
    steps, hidden, device, x = len(place.x), place.hidden, place.device, place.x
    held = way == "ELK" or (way.startswith("DEER") and (device == "cpu" or hidden > FUSED))
    if held and steps * place.batch * hidden**2 > MOST_JACOBIANS:
        raise MemoryError(f"not run: Jacobians of {steps * place.batch * hidden**2 * 4 / 2**30:.0f} GiB")
    if way == CAPTURED and hidden > FUSED:
        raise ValueError(f"not run: beyond {FUSED} units a graph holds a run from step to step, not DEER")
    layer = nn.GRU(INPUTS, hidden) if way == "torch" else tl.GRU(INPUTS, hidden, solver=SOLVERS[way])
    layer.load_state_dict(place.state)
    layer = layer.to(device)
    layer(x[:WARM_UP])[0].square().mean().backward()
    run = (lambda: outputs(layer, x)) if way == "torch" else (lambda: layer(x)[0])
    once = ONCE.get(way, ONCE_OF_OURS)
    forward, both, y = replays(layer, x, clock) if way == CAPTURED else turns(run, layer, device, clock, once)
    found: Results = {"forward_ms": forward, "both_ms": both}
    if steps <= WINDOW:
        states, gradient = place.truth
        found["output_error"] = _difference(y, states)
        found["gradient_error"] = _difference(layer.weight_hh_l0.grad, gradient)
    if device == "cuda":  # of all that the case holds: inputs, outputs, and what the way itself needs
        found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        torch.cuda.reset_peak_memory_stats()
    if way != "torch":
        report = layer.reports[0]
        found["sweeps"] = [report.iterations, report.backward.iterations if report.backward else 0]
        found["fell_back"] = bool(report.fell_back or (report.backward and report.backward.fell_back))
    return found


def looped(place: Place, clock: Clock) -> Results:
    """The plain loop over the first steps."""
    loop = Loop(INPUTS, place.hidden)
    loop.cell.load_state_dict({name.removesuffix("_l0"): value for name, value in place.state.items()})
    loop, short = loop.to(place.device), place.x[:LOOPED]
    forward, both, _ = turns(lambda: loop(short), loop, place.device, clock, ONCE_OF_OURS)
    return {"forward_ms": forward, "both_ms": both, "steps": len(short)}


def scaled(timed: Results, steps: int) -> Results:
    """What the loop was timed over, scaled to so many steps."""
    times = steps / timed["steps"]
    return {"forward_ms": times * timed["forward_ms"], "both_ms": times * timed["both_ms"], "scaled": times > 1}


def _difference(given: Tensor, expected: Tensor) -> float:
    return float((given.double() - expected).abs().max() / expected.abs().max())


def order(sizes: Sequence[int], lengths: Sequence[int], batches: Sequence[int]) -> list[tuple[int, int, int]]:
    """All `(n, T, B)`, coarse points first, and among them the largest batch and the shortest length."""
    cases = itertools.product(sizes, lengths, batches)
    return sorted(
        cases, key=lambda c: (sum(value not in some for value, some in zip(c, COARSE, strict=True)), c[1], -c[2], c[0])
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command(__doc__)
    parser.add_argument("--hidden", type=whole, nargs="+", help=f"units (default: {SIZES})")
    parser.add_argument("--steps", type=whole, nargs="+", help=f"lengths (default: {LENGTHS})")
    parser.add_argument("--batch", type=whole, nargs="+", help=f"sequences (default: {BATCHES})")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="(default: all)")
    parser.add_argument("--resume", action="store_true", help="keep the rows that the folder already has")
    options = begin(parser, arguments)
    sizes, lengths, batches = (
        given or default
        for given, default in zip(
            (options.hidden, options.steps, options.batch),
            FAST if options.fast else (SIZES, LENGTHS, BATCHES),
            strict=True,
        )
    )
    folder, name = folder_of(options, __file__), f"grid_{options.device}"
    results: dict[str, Any] = {"machine": facts(options.device), "rows": []}
    if options.resume:
        results |= kept(folder / f"{name}.json")
    done = {(row["way"], row["n"], row["T"], row["B"]) for row in results["rows"]}
    loops = {
        (row["n"], row["B"], LOOPED): scaled({**row, "steps": row["T"]}, LOOPED) | {"steps": LOOPED}
        for row in good(results["rows"])
        if row["way"] == "loop" and row["T"] >= LOOPED
    }
    for n, steps, batch in order(sizes, lengths, batches):
        ways = [way for way in options.ways if (way, n, steps, batch) not in done]
        ways = [way for way in ways if options.device == "cuda" or way != CAPTURED]
        if options.clock.over or not ways:
            continue
        place = Place(n, steps, batch, options.device)

        def run(way: str, place: Place = place, key: tuple[int, int, int] = (n, batch, min(steps, LOOPED))) -> Results:
            if way == "loop":
                loops[key] = loops.get(key) or looped(place, options.clock)
                return scaled(loops[key], len(place.x))
            seconds = foretold(results["rows"], way, place.hidden, len(place.x), place.batch)
            if seconds > PATIENCE.get(way, PATIENT):
                raise TimeoutError(f"not run: about {seconds:.0f} s, as shorter sequences foretell")
            return case(way, place, options.clock)

        for way in ways:
            if not options.clock.over:
                where = {"way": way, "n": n, "T": steps, "B": batch}
                results["rows"].append(attempt(where, lambda way=way, run=run: run(way)))
        save(name, results, folder)
    print(table(results))
    write(name, results, folder, table, draw)


if __name__ == "__main__":
    main()
