"""BPPSA's two speedups over torch's layer, of the backward pass and of a training step, by length and by batch.

    python -m experiments.bppsa_bitstream.grid --device cuda --minutes 3   # against cuDNN, batch 16 … 256, T to 30,000
    python -m experiments.bppsa_bitstream.grid --device cuda --minutes 3 --resume   # goes on where the last run ended
    python -m experiments.bppsa_bitstream.grid --cell gru                  # the network of its second task

An Elman network of 20 tanh units (or a GRU of 20) on bit streams, the loss on the last state, float32. All ways run in
turn; times are those of the clock, the fastest of several turns. Gradients are compared with torch's in float64.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import timeloom as tl
from experiments.bppsa_bitstream.streams import HIDDEN, SOLVERS, Classifier, bits
from experiments.harness import (
    COLOURS,
    Clock,
    Results,
    attempt,
    begin,
    command,
    earlier_runs,
    errors,
    facts,
    figure,
    folder_of,
    good,
    in_turns,
    kept,
    made_on,
    markdown,
    passes,
    save,
    whole,
    write,
)  # fmt: skip
from timeloom.solvers import Auto, Shooting, Solver

LENGTHS, BATCHES = (1000, 3000, 10000, 30000), (16, 32, 64, 128, 256)
PAPERS = (*((steps, 16) for steps in (10, 30, 100, 300)), *((1000, batch) for batch in (2, 4, 8)))
"""`(T, B)` of the paper's two sweeps that are not among those above."""
FAST_LENGTHS, FAST_BATCHES = (40, 90), (2, 3)
WAYS: dict[str, Solver | None] = {**SOLVERS, "default": Auto()}
WAYS["scan, 8 levels"] = Shooting(adjoint="scan", adjoint_levels=8)
ON_GPU = ("chunked adjoint", "scan", "scan, all levels", "scan, 8 levels", "default")
"""Without the scan of 2 levels, which leaves a quarter of all steps to run one after the other, launch by launch."""
ON_CPU = ("chunked adjoint", "scan", "default")
"""Without products of matrices: they never pay there (experiments.bppsa_bitstream.run measures them)."""
TURNS = 5
COMPARED = 3000 * 256
"""Steps of all sequences up to which gradients are compared with float64."""
PAPER = {"backward": 108.0, "both": 2.75}
"""Its largest speedups, on its GPUs and against its baseline (arXiv; 8.8 in the backward pass in the proceedings)."""


def model_of(cell: str, solver: Solver | None, device: str) -> Classifier:
    torch.manual_seed(0)
    model = Classifier(solver)
    if cell == "gru":
        torch.manual_seed(0)
        model.rnn = nn.GRU(1, HIDDEN) if solver is None else tl.GRU(1, HIDDEN, solver=solver)
    return model.to(device)


def gradients(model: nn.Module, x: Tensor, classes: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(cross_entropy(model(x), classes), list(model.parameters())))


def case(cell: str, way: str, steps: int, batch: int, device: str, clock: Clock) -> Results:
    """One way at one size, torch's layer beside it in turns."""
    x, classes = bits(steps, batch, 0, device)
    models = {name: model_of(cell, WAYS[name], device) for name in dict.fromkeys(("torch", way))}
    calls = {
        name: lambda model=model: passes(lambda: cross_entropy(model(x), classes), device)
        for name, model in models.items()
    }
    taken = in_turns(calls, TURNS, clock, warm=2)
    found: dict[str, Any] = {}
    for prefix, name in (("torch_", "torch"), ("", way)):
        found |= {
            f"{prefix}forward_ms": min(pair[0] for pair in taken[name]),
            f"{prefix}backward_ms": min(pair[1] for pair in taken[name]),
            f"{prefix}both_ms": min(sum(pair) for pair in taken[name]),
        }
    if steps * batch <= COMPARED:
        truth = gradients(copy.deepcopy(models["torch"]).double(), x.double(), classes)
        given = gradients(models[way], x, classes)
        found["gradient_error"] = max(
            float((g - t).abs().max() / t.abs().max()) for g, t in zip(given, truth, strict=True)
        )
    reports = getattr(models[way].rnn, "reports", None)
    if reports and reports[0].backward is not None:
        found["backward_by"] = f"{reports[0].backward.solver}, {reports[0].backward.iterations} sweep(s)"
    if device == "cuda":
        found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        torch.cuda.reset_peak_memory_stats()
    return found


def order(lengths: Sequence[int], batches: Sequence[int]) -> list[tuple[int, int]]:
    """All `(T, B)`, the corners first: a run that ends early has seen the whole range."""
    ordered = sorted(batches, key=lambda b: (b not in (batches[0], batches[-1]), b))
    return [(steps, batch) for batch in ordered for steps in sorted(lengths, reverse=True)]


def table(results: Results) -> str:
    rows = results["rows"]
    lines = [
        f"Bit streams (generated, as in the paper), {results['cell'].upper()} of {HIDDEN} units, float32, against "
        "torch's layer in "
        f"turns; fastest of {TURNS}. {made_on(results['machine'])}.{earlier_runs(results)}",
        "",
        f"The paper, on its GPUs and against its baseline: up to {PAPER['backward']:.0f}× in the backward pass, "
        f"{PAPER['both']}× in all.",
        "",
    ]
    head = [
        "T",
        "B",
        "way",
        "backward",
        "torch's",
        "speedup",
        "both passes",
        "torch's",
        "speedup",
        "gradient error",
        "by",
    ]
    cells = []
    for row in good(rows):
        cell: list[object] = [row["steps"], row["batch"], row["way"]]
        for key in ("backward_ms", "both_ms"):
            ours, theirs = row[key], row[f"torch_{key}"]
            cell += [f"{ours:.3g} ms", f"{theirs:.3g} ms", f"{theirs / ours:.2f}×"]
        cell += [f"{row['gradient_error']:.0e}" if "gradient_error" in row else "–", row.get("backward_by", "–")]
        cells.append(cell)
    lines += [*markdown(head, cells), *errors(rows, ("way", "steps", "batch")), ""]
    for key, words in (("backward", "backward pass"), ("both", "both passes")):
        for family in ("scan", ""):
            here = [row for row in good(rows) if row["way"].startswith(family) and row["way"] != "torch"]
            best = max(here, key=lambda row: row[f"torch_{key}_ms"] / row[f"{key}_ms"], default=None)
            if best:
                ratio = best[f"torch_{key}_ms"] / best[f"{key}_ms"]
                who = "a scan" if family else "any way"
                lines.append(
                    f"- Best of {who}, {words}: {ratio:.2f}× by {best['way']} at T = {best['steps']}, B = "
                    f"{best['batch']}."
                )
    return "\n".join(lines) + "\n"


def draw(results: Results, path: Path) -> None:
    """Both speedups by length, a line for each batch; a column of pictures for each way."""
    rows = good(results["rows"])
    ways = [way for way in dict.fromkeys(row["way"] for row in rows) if way != "torch"] or ["nothing measured"]
    drawn, axes = figure(3.1 * len(ways) + 1, 7.2, 2, len(ways), sharex=True, sharey="row")
    batches = sorted({row["batch"] for row in rows})
    for line, (key, words) in zip(axes, (("backward", "backward pass"), ("both", "both passes")), strict=True):
        for axis, way in zip(line, ways, strict=True):
            for colour, batch in zip(COLOURS, batches, strict=False):
                here = sorted(
                    (row["steps"], row[f"torch_{key}_ms"] / row[f"{key}_ms"])
                    for row in rows
                    if (row["way"], row["batch"]) == (way, batch)
                )
                axis.loglog([t for t, _ in here], [r for _, r in here], "o-", color=colour, label=f"B = {batch}")
            axis.axhline(PAPER[key], color="black", linestyle="--", linewidth=0.9, label="the paper, at best")
            axis.text(0.03, PAPER[key], f"the paper, at best: {PAPER[key]:g}×", va="bottom", fontsize=8,
                      transform=axis.get_yaxis_transform())  # fmt: skip
            axis.axhline(1.0, color="grey", linewidth=0.6)
            axis.set_title(f"{way}: {words}", fontsize=10)
        line[0].set_ylabel("times as fast as torch's layer")
    for axis in axes[-1]:
        axis.set_xlabel("steps T")
    drawn.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=len(batches) + 1)
    drawn.suptitle(f"{results['cell'].upper()} of {HIDDEN} units, {made_on(results['machine'])}", fontsize=9)
    drawn.savefig(path, dpi=90)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command(__doc__)
    parser.add_argument("--cell", choices=("rnn", "gru"), default="rnn")
    parser.add_argument("--steps", type=whole, nargs="+", help=f"lengths (default: {LENGTHS})")
    parser.add_argument("--batch", type=whole, nargs="+", help=f"batches (default: {BATCHES})")
    parser.add_argument(
        "--ways", nargs="+", choices=[way for way in WAYS if way != "torch"], help="(default: by device)"
    )
    parser.add_argument("--resume", action="store_true", help="keep the rows that the folder already has")
    options = begin(parser, arguments)
    lengths = options.steps or (FAST_LENGTHS if options.fast else LENGTHS)
    batches = options.batch or (FAST_BATCHES if options.fast else BATCHES)
    on_device = ON_GPU if options.device == "cuda" else ON_CPU
    ways = options.ways or [way for way in (WAYS if options.fast else on_device) if way != "torch"]
    results: dict[str, Any] = {"machine": facts(options.device), "cell": options.cell, "rows": []}
    folder, name = folder_of(options, __file__), f"grid_{options.cell}_{options.device}"
    if options.resume:
        results |= kept(folder / f"{name}.json")
    done = {(row["way"], row["steps"], row["batch"]) for row in results["rows"]}
    whole_grid = not (options.fast or options.steps or options.batch)
    for steps, batch in [*order(lengths, batches), *(PAPERS if whole_grid else ())]:
        for way in ways:
            if not options.clock.over and (way, steps, batch) not in done:
                where = {"way": way, "steps": steps, "batch": batch}
                results["rows"].append(
                    attempt(
                        where,
                        lambda w=way, s=steps, b=batch: case(options.cell, w, s, b, options.device, options.clock),
                    )
                )
                save(name, results, folder)
    print(table(results))
    write(name, results, folder, table, draw)


if __name__ == "__main__":
    main()
