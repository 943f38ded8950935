"""DEER's model on EigenWorms: training parallel in time beside training by torch's own layers.

    python -m experiments.deer_eigenworms.run                              # generated worms; ten minutes on one core
    python -m experiments.deer_eigenworms.run --data EigenWorms_TRAIN.ts   # the real ones (their TEST file beside them)
    python -m experiments.deer_eigenworms.run --data EigenWorms            # fetched by aeon
    python -m experiments.deer_eigenworms.run --data EigenWorms --protocol paper --twin   # 3 seeds, 70/15/15, patience
    python -m experiments.deer_eigenworms.run --fast                       # all parts in small, seconds

Five residual GRU layers of 32 units with norms and perceptrons (`--preset eigenworms` of `timeloom train`), batch 4.
At full length the network is trained parallel in time and a few steps are repeated by torch's layers. On the
generated worms it is also trained at a sixteenth of the length both ways from the same seeds, all steps. Names and
lengths are read from the data.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from experiments.deer_eigenworms.worms import STEPS, write_worms
from experiments.harness import (
    Results,
    begin,
    command,
    curve,
    facts,
    folder_of,
    made_on,
    only_with_data,
    plot_losses,
    save,
    whole,
    write,
)
from timeloom.app import cli
from timeloom.app.data import load, split
from timeloom.app.errors import InputError
from timeloom.app.train.metrics_file import read

FULL = {"each": 20, "steps": STEPS, "epochs": 12, "short_epochs": 20, "compared": 2}
FAST = {"each": 4, "steps": 512, "epochs": 2, "short_epochs": 2, "compared": 1}
SHORTER = 16
PAPER = "The paper, on EigenWorms: 88.0 ± 4.4 % over 3 seeds."
MOST_EPOCHS = {"given": 1000, "paper": 100_000}
"""The paper's command ends by its patience alone: 1000 epochs without a better accuracy."""
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
        "test_series",
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
        f"{results['data']}; {made_on(results['machine'])}.", "",
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
    for name, (mean, spread, seeds) in results.get("accuracy", {}).items():
        lines += ["", f"Trained by {name}: {mean:.1%} ± {spread:.1%} of the test series over {seeds} seed(s). {PAPER}"]
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


def about(data: str) -> dict[str, Any]:
    """The name of a set, how many series it has, and how long they are: from the data, not from what we expect."""
    splits = split(load(data), 0.15, 0.15, 0)
    series = [one for part in (splits.train, splits.valid, splits.test) for one in part.series]
    lengths = [len(one) for one in series]
    return {
        "name": Path(data).stem.removesuffix("_TRAIN").removesuffix("_TEST") or data,
        "series": len(series), "shortest": min(lengths), "longest": max(lengths),
        "channels": splits.channels, "classes": len(splits.classes),
    }  # fmt: skip


def on_real(options: Any, place: Path, results: Results, keep: Callable[[], object]) -> None:
    """One run a seed, and with --twin the same by torch's own layers; `keep` is called as they come."""
    found = about(options.data)
    results["set"] = found
    length = (
        f"{found['longest']:,}"
        if found["shortest"] == found["longest"]
        else f"{found['shortest']:,} to {found['longest']:,}"
    )
    results["data"] = (
        f"{found['name']}: {found['series']} series of {length} steps, {found['channels']} channels, "
        f"{found['classes']} classes"
    )
    paper = options.protocol == "paper"
    seeds = options.seeds or (3 if paper else 1)
    more = ["--device", options.device]
    if options.patience is not None or not paper:  # the preset's own patience is the paper's
        more += ["--patience", str(options.patience or 0)]
    more += [] if paper else ["--no-pool"]  # the preset's own shares are the paper's, 70/15/15 of all series
    epochs = options.epochs or (1 if options.fast else MOST_EPOCHS[options.protocol])
    results["protocol"] = {"name": options.protocol, "epochs": epochs, "shares": more}
    for seed in range(seeds):
        for name, solver in (("parallel", "auto"), ("torch", "sequential"))[: 2 if options.twin else 1]:
            if options.clock.over and results["runs"]:
                break
            compared = FULL["compared"] if name == "parallel" else 0
            run = train(options.data, place / f"{name}{seed}", solver, epochs, compared, *more, "--seed", str(seed))
            results["runs"][f"{name}, seed {seed}"] = {"length": found["longest"], **run}
            keep()
    for name in ("parallel", "torch"):
        accuracies = [run["test_quality"] for label, run in results["runs"].items() if label.startswith(name)]
        if accuracies:
            spread = statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0
            results.setdefault("accuracy", {})[name] = [statistics.mean(accuracies), spread, len(accuracies)]


def on_generated(options: Any, place: Path, results: Results, keep: Callable[[], object]) -> None:
    """At full length parallel in time; at a sixteenth of it both ways. `keep` is called as they come."""
    sizes = FAST if options.fast else FULL
    results["data"] = f"generated stand-in for EigenWorms, {5 * sizes['each']} series"
    rate = ("--lr", LEARNING_RATE, "--valid-fraction", "0.2", "--test-fraction", "0.2", "--device", options.device)
    for name, length, solver, epochs in (
        ("parallel", sizes["steps"], "auto", sizes["epochs"]),
        ("parallel, short", sizes["steps"] // SHORTER, "auto", sizes["short_epochs"]),
        ("torch, short", sizes["steps"] // SHORTER, "sequential", sizes["short_epochs"]),
    ):
        if options.clock.over and results["runs"]:
            return
        worms = str(write_worms(place / f"worms{length}", sizes["each"], length))
        run = train(worms, place / name, solver, epochs, sizes["compared"], *rate)
        results["runs"][name] = {"length": length, **run}
        keep()
    both = (results["runs"][name]["losses"] for name in ("parallel, short", "torch, short"))
    results["apart"] = f"{statistics.median(abs(a - b) for a, b in zip(*both, strict=True)):.1e}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command(__doc__)
    parser.add_argument("--data", help="a set as `timeloom train` takes it; without it, worms are generated")
    parser.add_argument("--protocol", choices=("given", "paper"), default="given",
                        help="with --data: the set's own split and one seed, or 70/15/15 by seed, 3 seeds, a stop "
                             "after 1000 epochs without a better one")  # fmt: skip
    parser.add_argument("--seeds", type=whole, help="with --data: so many runs (default: by the protocol)")
    parser.add_argument(
        "--patience", type=whole, help="with --data: epochs without a better validation before it stops"
    )
    parser.add_argument("--twin", action="store_true", help="with --data: train the same by torch's own layers too")
    parser.add_argument("--epochs", type=whole, help=f"with --data, at most (default: {MOST_EPOCHS})")
    options = begin(parser, arguments)
    only_with_data(parser, options, "protocol", "seeds", "patience", "twin", "epochs")
    results: Results = {"machine": facts(options.device), "runs": {}}
    folder = folder_of(options, __file__)

    def base() -> str:
        name = results["set"]["name"].lower() if options.data else "generated"
        name += "_paper" if options.protocol == "paper" else ""
        return name if options.device == "cpu" else f"{name}_{options.device}"

    with tempfile.TemporaryDirectory() as temporary:
        try:
            measure = on_real if options.data else on_generated
            measure(options, Path(temporary), results, lambda: save(base(), results, folder))
        except InputError as error:
            parser.error(str(error))
    print(table(results))
    write(base(), results, folder, table, plot)


if __name__ == "__main__":
    main()
