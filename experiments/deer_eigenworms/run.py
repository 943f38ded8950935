"""DEER's model on EigenWorms: training parallel in time beside training by torch's own layers.

    python -m experiments.deer_eigenworms.run                              # generated worms; ten minutes on one core
    python -m experiments.deer_eigenworms.run --data EigenWorms_TRAIN.ts   # the real ones (their TEST file beside them)
    python -m experiments.deer_eigenworms.run --data EigenWorms            # fetched by aeon
    python -m experiments.deer_eigenworms.run --fast                       # all parts in small, seconds

Five residual GRU layers of 32 units with norms and perceptrons (`--preset eigenworms` of `timeloom train`), batch 4.
At full length the network is trained parallel in time and a few steps are repeated by torch's layers. On the
generated worms it is also trained at a sixteenth of the length both ways from the same seeds, all steps.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.deer_eigenworms.worms import STEPS, write_worms
from experiments.harness import command, facts, target, write
from timeloom.app import cli
from timeloom.app.train.metrics import read

FULL = {"each": 20, "steps": STEPS, "epochs": 12, "short_epochs": 20, "compared": 2}
FAST = {"each": 4, "steps": 512, "epochs": 2, "short_epochs": 2, "compared": 1}
SHORTER = 16
LEARNING_RATE = "2e-3"
"""Of the generated worms: the paper's 3e-5 takes thousands of epochs."""


def train(data: str, folder: Path, solver: str, epochs: int, compared: int, *more: str) -> dict[str, Any]:
    """A run of `timeloom train`: its summary, and loss and time of every step."""
    arguments = ["--preset", "eigenworms", "--data", data, "--out", str(folder), "--solver", solver]
    arguments += ["--epochs", str(epochs), "--compare", str(compared), *more]
    if cli.run("train", arguments):
        raise SystemExit("the training was not finished; what was wrong is told above")
    rows = [row for row in read(folder / "metrics.jsonl") if row["kind"] == "step"]
    summary = json.loads((folder / "summary.json").read_text())
    kept = (
        "test_quality",
        "test_loss",
        "seconds_a_step",
        "torch_seconds_a_step",
        "speedup",
        "loss_difference",
        "steps",
    )
    return {
        **{key: summary[key] for key in (*kept, "most_sweeps", "fallbacks", "data_share")},
        **curve(rows),
        "validation": [
            round(row["quality"], 4) for row in read(folder / "metrics.jsonl") if row["kind"] == "validation"
        ],
    }


def table(results: dict[str, Any]) -> str:
    """The runs in words."""
    lines = [
        f"{results['data']}, {results['machine']['threads']} thread(s).", "",
        "| run | steps of a series | test accuracy | a training step | by torch | ratio | waits for data |",
        "| --- | --: | --: | --: | --: | --: | --: |",
    ]  # fmt: skip
    for name, run in results["runs"].items():
        timed = run["speedup"] is not None
        cells = [
            name, f"{run['length']:,}", f"{run['test_quality']:.1%}", f"{run['seconds_a_step']:.2f} s",
            f"{run['torch_seconds_a_step']:.2f} s" if timed else "–", f"{run['speedup']:.0f}×" if timed else "–",
            f"{run['data_share']:.1%}",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    if "apart" in results:
        lines += [
            "",
            f"Trained both ways at the shorter length, the losses are apart by {results['apart']} (median).",
        ]
    return "\n".join(lines) + "\n"


def plot(results: dict[str, Any], path: Path) -> None:
    """Losses over steps and over time."""
    runs = {f"{name}, T = {run['length']:,}": run for name, run in results["runs"].items()}
    plot_losses(runs, results["data"], path)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command(__doc__)
    parser.add_argument("--data", help="a set as `timeloom train` takes it; without it, worms are generated")
    parser.add_argument("--epochs", type=int, help="with --data (default 1000)")
    options = parser.parse_args(arguments)
    sizes = FAST if options.fast else FULL
    results: dict[str, Any] = {"machine": facts(), "runs": {}}
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        if options.data:
            results["data"] = f"EigenWorms ({Path(options.data).name})"
            run = train(options.data, place / "run", "auto", options.epochs or 1000, sizes["compared"])
            results["runs"]["parallel"] = {"length": STEPS, **run}
        else:
            results["data"] = f"generated stand-in for EigenWorms, {5 * sizes['each']} series"
            rate = ("--lr", LEARNING_RATE, "--valid-fraction", "0.2", "--test-fraction", "0.2")
            for name, length, solver, epochs in (
                ("parallel", sizes["steps"], "auto", sizes["epochs"]),
                ("parallel, short", sizes["steps"] // SHORTER, "auto", sizes["short_epochs"]),
                ("torch, short", sizes["steps"] // SHORTER, "sequential", sizes["short_epochs"]),
            ):
                worms = str(write_worms(place / f"worms{length}", sizes["each"], length))
                run = train(worms, place / name, solver, epochs, sizes["compared"], *rate)
                results["runs"][name] = {"length": length, **run}
            both = (results["runs"][name]["losses"] for name in ("parallel, short", "torch, short"))
            results["apart"] = f"{statistics.median(abs(a - b) for a, b in zip(*both, strict=True)):.1e}"
    print(table(results))
    folder = target(options, __file__)
    if folder is not None:
        write("eigenworms" if options.data else "generated", results, folder, table, plot)


if __name__ == "__main__":
    main()
