"""`python -m benchmarks.zoo`: trained networks, torch's layer beside timeloom's, forward and backward, eager.

Every row: milliseconds of torch's layer, of ours in one chunk (the kernel alone) and as `auto` runs it (kernel and
time-parallelism), and the errors of all results against float64, as the largest of relative norms. Times are of calls
as a training makes them: after 30 calls, in which `auto` learns, eight in a row by each side in turns, and the median
of three turns. Then the largest Lyapunov exponent, the steps after which a difference has shrunk to 1e-6, and the
sweeps, forward/backward, that each correction takes over chunks of 256 steps until all jumps are below 1e-4 (`python
-m benchmarks.corrections` has more). Torch has no resets: episodes are packed for its layers, which is not timed.
Cells of one's own stand beside the plain loop over their steps, and count neither for the median nor for the worst.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.zoo.layers import OWN_CELLS
from benchmarks.zoo.measure import Subject, measured
from benchmarks.zoo.networks import WEIGHTS, ZOO, Network, model_of, store_weights, stored_weights, unseen_loss
from benchmarks.zoo.public import UNITS, speech_lstm, talk, weights_file
from benchmarks.zoo.tasks import TASKS

SPEECH = "speech LSTM 128, public"
SPEECH_SIZES = ((16384, 1), (16384, 4))


def main(arguments: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser(prog="python -m benchmarks.zoo", description=__doc__)
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--out", default="build/zoo", help="folder for trained-DEVICE.json and .md")
    options.add_argument("--only", default="", help="networks whose name has this word")
    options.add_argument("--minutes", type=float, default=8.0, help="no network is begun after so long")
    options.add_argument("--steps", type=int, default=0, help="measure at so many steps instead of each network's own")
    options.add_argument("--updates", type=int, default=0, help="train all anew, by so many instead of their own")
    options.add_argument(
        "--trained", type=Path, default=WEIGHTS, help="state_dicts by name, in place of those that come along"
    )
    options.add_argument("--anew", action="store_true", help="train all of them anew, from their seeds")
    options.add_argument("--store", type=Path, help="put the weights of those that were trained into this file, too")
    options.add_argument(
        "--own", action="store_true", help="leave out torch's layer and all errors: one chunk and `auto` alone"
    )
    options.add_argument(
        "--brief", action="store_true", help="leave out what networks remember, and sweeps by correction"
    )
    options.add_argument(
        "--weights", type=Path, help="silero_vad.jit, for its LSTM (default: the installed package's, where it is)"
    )
    given = options.parse_args(arguments)
    device, began, rows = torch.device(given.device), time.perf_counter(), []
    left_out: dict[str, str] = {}
    networks = [network for network in ZOO if given.only in network.name]
    stored = {} if given.anew or given.updates else stored_weights(given.trained)
    for name, subjects in candidates(networks, given, device, left_out, stored):
        if time.perf_counter() - began > 60 * given.minutes:
            left_out[name] = f"{given.minutes:g} minutes were over"
            continue
        for subject, loss in subjects:
            row = measured(subject, given.brief, not given.own) | {"loss": loss}
            print(line(row), flush=True)
            rows.append(row)
            save(rows, left_out, device, Path(given.out))  # after every row: a run that is stopped keeps its rows
    for name, why in left_out.items():
        print(f"{name}: left out, {why}")
    print(save(rows, left_out, device, Path(given.out)))
    return 0


def candidates(
    networks: Sequence[Network],
    given: argparse.Namespace,
    device: torch.device,
    left_out: dict[str, str],
    stored: dict[str, Any],
) -> Iterator[tuple[str, Iterator[tuple[Subject, float]]]]:
    """Networks by name, each with its subjects to measure and the loss after training; trained only when iterated."""

    def at_sizes(network: Network) -> Iterator[tuple[Subject, float]]:
        model = model_of(network, stored, device, given.updates)
        if given.store is not None and network.name not in stored:
            store_weights({network.name: model}, given.store)
        loss = unseen_loss(network, model, device)
        for steps, batch in network.sizes:
            yield Subject.of(network, model, given.steps or steps, batch, device), loss

    def of_speech(file: Path) -> Iterator[tuple[Subject, float]]:
        weights, hear = speech_lstm(file)
        for steps, batch in SPEECH_SIZES:
            x = talk(given.steps or steps, batch, hear, torch.Generator().manual_seed(1)).to(device)
            yield Subject(SPEECH, "LSTM", UNITS, weights, x), float("nan")

    for network in networks:
        if TASKS[network.task].needs():
            left_out[network.name] = TASKS[network.task].needs()
        else:
            yield network.name, at_sizes(network)
    if given.only in SPEECH:
        file = weights_file(given.weights)
        if file is None:
            left_out[SPEECH] = "no package silero-vad; --weights names its silero_vad.jit"
        else:
            yield SPEECH, of_speech(file)


def line(row: dict[str, Any]) -> str:
    times = f"one chunk {row['one chunk ms']:.2f} ms, auto {row['auto ms']:.2f} ms ({over(row, 'one chunk', 'auto')})"
    if "torch ms" in row:
        ratios = f"{over(row, 'torch', 'one chunk')}, {over(row, 'torch', 'auto')}"
        errors = f"error {row['torch error']:.0e}, ours {row['auto error']:.0e}"
        times = f"torch {row['torch ms']:.1f} ms, {times}: {ratios}; {errors}"
    return (
        f"{row['network']}, T={row['T']}, B={row['B']}: {times}; loss {row['loss']:.3g}; memory "
        f"{row.get('memory', '–')}; {row['forward']}; back: {row['backward']}"
    )


COLUMNS = (
    "network", "loss", "T", "B", "torch, ms", "one chunk, ms", "auto, ms", "one chunk over torch", "auto over torch",
    "auto over one chunk", "torch's error", "ours", "exponent", "memory", "sweeps", "forward",
)  # fmt: skip


def over(row: dict[str, Any], slow: str, fast: str) -> str:
    """The speedup of one side over another; a dash if that was not measured."""
    return f"{row[f'{slow} ms'] / row[f'{fast} ms']:.1f}×" if f"{slow} ms" in row else "–"


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """A row of the table."""
    errors = (f"{row[f'{name} error']:.0e}" if f"{name} error" in row else "–" for name in ("torch", "auto"))
    times = (f"{row[f'{name} ms']:.2f}" if f"{name} ms" in row else "–" for name in ("torch", "one chunk", "auto"))
    ratios = (over(row, *sides) for sides in (("torch", "one chunk"), ("torch", "auto"), ("one chunk", "auto")))
    steps = "–" if "memory" not in row else "never" if row["memory"] is None else f"{row['memory']:,}"
    return (
        row["network"],
        f"{row['loss']:.2g}",
        f"{row['T']:,}",
        str(row["B"]),
        *times,
        *ratios,
        *errors,
        f"{row['exponent']:+.2g}" if "exponent" in row else "–",
        steps,
        ", ".join(f"{name} {text}" for name, text in row.get("sweeps", {}).items()) or "–",
        row["forward"],
    )


def filled(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> tuple[Sequence[str], list[Sequence[str]]]:
    """Only the columns that have an entry."""
    kept = [place for place in range(len(columns)) if any(row[place] != "–" for row in rows)]
    return [columns[place] for place in kept], [[row[place] for place in kept] for row in rows]


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ("---",) * len(columns), *rows]
    return "".join(f"| {' | '.join(entries)} |\n" for entries in lines)


def save(rows: list[dict[str, Any]], left_out: dict[str, str], device: torch.device, folder: Path) -> Path:
    """Write the results as JSON and as a page; returns the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"
    where = f"{name}, torch {torch.__version__}, {torch.get_num_threads()} threads, {time.strftime('%Y-%m-%d')}"
    target = folder / f"trained-{device.type}"
    content = {"where": where, "rows": rows, "left_out": left_out}
    target.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n")
    layers = [row for row in rows if not any(cell in row["network"] for cell in OWN_CELLS)]
    summary = ""
    for side, name in (("torch", "torch"), ("one chunk", "one chunk of our own")):
        ratios = [row[f"{side} ms"] / row["auto ms"] for row in layers if f"{side} ms" in row]
        if ratios:
            summary += f"Over {name}: median {statistics.median(ratios):.1f}×, worst {min(ratios):.1f}×.\n"
    missing = "".join(f"\nNot measured: {name}: {why}.\n" for name, why in left_out.items())
    shown = table(*filled(COLUMNS, [cells(row) for row in rows]))
    text = f"# Trained networks\n\n{where}. `python -m benchmarks.zoo`.\n{__doc__}\n{shown}\n{summary}"
    target.with_suffix(".md").write_text(text + missing)
    return target.with_suffix(".md")


if __name__ == "__main__":
    raise SystemExit(main())
