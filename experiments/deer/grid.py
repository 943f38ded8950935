"""The speed grid of the DEER paper: a GRU by DEER, its relatives, shooting, torch's layer and a plain loop.

    python -m experiments.deer.grid --device cuda --minutes 4             # n 1 … 64, T 1,000 … 1,000,000, B 1 … 16
    python -m experiments.deer.grid --device cuda --minutes 4 --resume    # goes on where the last run ended
    python -m experiments.deer.grid --hidden 8 16 --steps 16384 --batch 1

Forward alone and forward + backward in float32, the fastest of several turns, with the error of outputs and of the
weights' gradient against torch in float64. torch's layer runs in windows with its state carried on beyond 32,768 steps,
where cuDNN refuses. On a GPU, DEER is also timed as a CUDA graph that is replayed. The plain loop calls
`torch.nn.GRUCell` step by step; beyond 500 steps it is timed over 500 and scaled (marked). Coarse points come first, so
that a run of few minutes spans the grid.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import timeloom as tl
from experiments.harness import (
    COLOURS,
    Clock,
    Results,
    attempt,
    begin,
    command,
    errors,
    facts,
    figure,
    folder_of,
    good,
    made_on,
    markdown,
    now,
    save,
    whole,
    write,
)  # fmt: skip

SIZES = (1, 2, 4, 8, 16, 32, 64)
LENGTHS = (1000, 3000, 10_000, 30_000, 100_000, 300_000, 1_000_000)
BATCHES = (1, 2, 4, 8, 16)
COARSE = ({1, 4, 16, 64}, {1000, 10_000, 100_000, 1_000_000}, {1, 16})
FAST = ((2, 5), (40, 90), (2,))
CAPTURED = "DEER, captured"
WAYS = ("torch", "loop", "DEER", CAPTURED, "quasi-DEER", "ELK", "shooting", "default")
SOLVERS = {"DEER": "deer", "quasi-DEER": "quasi-deer", "ELK": "elk", "shooting": "shooting", "default": "auto"}
SOLVERS[CAPTURED] = "deer"
"""The same in a CUDA graph that is replayed, without the host's time."""
INPUTS, TURNS, ENOUGH = 4, 10, 0.5
"""Input width; most turns, and seconds after which no further turn of a case begins."""
WINDOW = 32768
"""Steps that cuDNN takes at once."""
LOOPED = 500
"""Steps that the plain loop is timed over."""
PATIENCE = 6.0
"""Seconds of forward + backward beyond which a case is not begun, as a shorter sequence of the same way foretells."""
MOST_JACOBIANS = 2**32
"""Entries of all Jacobians, 16 GiB, beyond which DEER and ELK are not measured."""
FUSED = 32
"""Units up to which DEER on a GPU has no Jacobians in memory."""
PAPER = "its GPU evaluation up to 3 orders of magnitude faster than its sequential loop, training more than 10 times"

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


def turns(forward: Forward, weights: nn.Module, device: str, clock: Clock) -> tuple[float, float, Tensor]:
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
        if (turn and (after > end or clock.over)) or after - began > PATIENCE:
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


def case(way: str, hidden: int, steps: int, batch: int, device: str, clock: Clock) -> Results:
    """One way at one size."""
    held = way == "ELK" or (way.startswith("DEER") and (device == "cpu" or hidden > FUSED))
    if held and steps * batch * hidden**2 > MOST_JACOBIANS:
        raise MemoryError(f"not run: Jacobians of {steps * batch * hidden**2 * 4 / 2**30:.0f} GiB")
    torch.manual_seed(0)
    x, state = torch.randn(steps, batch, INPUTS), nn.GRU(INPUTS, hidden).state_dict()
    x = x.to(device)
    if way == "loop":
        return looped(x, state, hidden, device, clock)
    layer = nn.GRU(INPUTS, hidden) if way == "torch" else tl.GRU(INPUTS, hidden, solver=SOLVERS[way])
    layer.load_state_dict(state)
    layer = layer.to(device)
    run = (lambda: outputs(layer, x)) if way == "torch" else (lambda: layer(x)[0])
    forward, both, y = replays(layer, x, clock) if way == CAPTURED else turns(run, layer, device, clock)
    found: Results = {"forward_ms": forward, "both_ms": both}
    if steps <= WINDOW:
        exact = nn.GRU(INPUTS, hidden, device=device, dtype=torch.float64)
        exact.load_state_dict(state)
        truth = exact(x.double())[0]
        truth.square().mean().backward()
        found["output_error"] = _difference(y, truth.detach())
        found["gradient_error"] = _difference(layer.weight_hh_l0.grad, exact.weight_hh_l0.grad)
    if way != "torch":
        report = layer.reports[0]
        found["sweeps"] = [report.iterations, report.backward.iterations if report.backward else 0]
        found["fell_back"] = bool(report.fell_back or (report.backward and report.backward.fell_back))
    return found


def looped(x: Tensor, state: dict[str, Tensor], hidden: int, device: str, clock: Clock) -> Results:
    short = x[:LOOPED]
    loop = Loop(INPUTS, hidden)
    loop.cell.load_state_dict({name.removesuffix("_l0"): value for name, value in state.items()})
    loop = loop.to(device)
    times = len(x) / len(short)
    forward, both, _ = turns(lambda: loop(short), loop, device, clock)
    return {"forward_ms": times * forward, "both_ms": times * both, "scaled": times > 1}


def _difference(given: Tensor, expected: Tensor) -> float:
    return float((given.double() - expected).abs().max() / expected.abs().max())


def by_place(rows: list[Results]) -> dict[tuple[int, int, int], dict[str, Results]]:
    """Rows by `(n, T, B)` and way."""
    places: dict[tuple[int, int, int], dict[str, Results]] = {}
    for row in good(rows):
        places.setdefault((row["n"], row["T"], row["B"]), {})[row["way"]] = row
    return dict(sorted(places.items(), key=lambda item: (item[0][2], item[0][0], item[0][1])))


def table(results: Results) -> str:
    lines = [
        "GRU on random inputs, float32, milliseconds of forward + backward and, in brackets, how many times as fast "
        "as torch's layer "
        f"and as the plain loop. {results.get('note') or made_on(results['machine'])}",
        "",
        f"The paper: {PAPER}.",
        "",
    ]
    cells, ways = [], [way for way in WAYS if any(row["way"] == way for row in results["rows"])]
    for place, found in by_place(results["rows"]).items():
        row: list[object] = [*place]
        for way in ways:
            row.append(_cell(way, found))
        cells.append(row)
    lines += markdown(["n", "T", "B", *ways], cells)
    skipped = [row for row in results["rows"] if row.get("error", "").split(": ")[1:2] == ["not run"]]
    wrong = [row for row in results["rows"] if row not in skipped]
    lines += errors(wrong, ("way", "n", "T", "B"))
    lines += (
        ["", f"{len(skipped)} cases were left out for their memory or their time (the JSON file says which)."]
        if skipped
        else []
    )
    return "\n".join([*lines, "", *verdict(results["rows"])]) + "\n"


def _cell(way: str, found: dict[str, Results]) -> str:
    if way not in found:
        return "–"
    ms, ratios = found[way]["both_ms"], []
    for base in ("torch", "loop"):
        if base in found and base != way:
            ratios.append(f"{found[base]['both_ms'] / ms:.2g}×")
    mark = "~" if found[way].get("scaled") else ""
    sweeps = f", {'/'.join(map(str, found[way]['sweeps']))}" if found[way].get("sweeps") else ""
    return f"{mark}{ms:.3g}{sweeps} ({', '.join(ratios)})" if ratios else f"{mark}{ms:.3g}"


def verdict(rows: list[Results]) -> list[str]:
    """Where each way is best over torch's layer and over the loop."""
    lines = []
    for base in ("torch", "loop"):
        for way in WAYS[2:]:
            ratios = [
                (found[base]["both_ms"] / found[way]["both_ms"], place)
                for place, found in by_place(rows).items()
                if base in found and way in found
            ]
            if ratios:
                best, (n, steps, batch) = max(ratios)
                over = "torch's layer" if base == "torch" else "the loop"
                lines.append(
                    f"- {way} over {over}: {best:.3g}× at best (n = {n}, T = {steps:,}, B = {batch}), "
                    f"{min(ratios)[0]:.2g}× at worst."
                )
    return lines


def draw(results: Results, path: Path) -> None:
    """Forward + backward over torch's layer by length: a picture for each batch and number of units."""
    places = by_place(results["rows"])
    sizes, batches = sorted({n for n, _, _ in places}), sorted({b for _, _, b in places})
    if not places:
        return
    drawn, axes = figure(
        2.6 * len(sizes) + 1, 2.4 * len(batches) + 0.8, len(batches), len(sizes), sharex=True, sharey=True
    )
    for line, batch in zip(axes, batches, strict=True):
        for axis, n in zip(line, sizes, strict=True):
            for colour, way in zip(COLOURS, WAYS[1:], strict=False):
                here = sorted(
                    (steps, found["torch"]["both_ms"] / found[way]["both_ms"])
                    for (size, steps, b), found in places.items()
                    if (size, b) == (n, batch) and way in found and "torch" in found
                )
                axis.loglog([t for t, _ in here], [r for _, r in here], marker=".", color=colour, label=way)
            axis.axhline(1.0, color="grey", linewidth=0.6)
            axis.set_title(f"n = {n}, B = {batch}", fontsize=8)
    axes[-1][0].set_xlabel("steps")
    axes[-1][0].set_ylabel("over torch's layer")
    drawn.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=len(WAYS))
    drawn.suptitle(f"forward + backward; {results.get('note') or made_on(results['machine'])}", fontsize=8)
    drawn.savefig(path, dpi=90)


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
    if options.resume and (folder / f"{name}.json").exists():
        results["rows"] = json.loads((folder / f"{name}.json").read_text())["rows"]
    done = {(row["way"], row["n"], row["T"], row["B"]) for row in results["rows"]}
    for n, steps, batch in order(sizes, lengths, batches):
        for way in options.ways:
            if way == CAPTURED and options.device == "cpu":
                continue
            if options.clock.over or (way, n, steps, batch) in done:
                continue
            where = {"way": way, "n": n, "T": steps, "B": batch}

            def run(way: str = way, n: int = n, steps: int = steps, batch: int = batch) -> Results:
                seconds = foretold(results["rows"], way, n, steps, batch)
                if seconds > PATIENCE:
                    raise TimeoutError(f"not run: about {seconds:.0f} s, as shorter sequences foretell")
                return case(way, n, steps, batch, options.device, options.clock)

            results["rows"].append(attempt(where, run))
        save(name, results, folder)
    print(table(results))
    write(name, results, folder, table, draw)


if __name__ == "__main__":
    main()
