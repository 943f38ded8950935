"""`python -m tests.gpu [PIECE …] --device cuda|cpu`: all checks for real hardware, against float64.

Each piece runs in its own process, several at once; results go to benchmarks/results/test-gpu.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.fuzz.judge import context_lost, first_line
from benchmarks.fuzz.record import facts
from benchmarks.process import surroundings
from tests.gpu import (
    around,
    dropout,
    faulty,
    gates,
    layers,
    operations,
    own_cells,
    processes,
    products,
    replays,
    sums,
    transforms,
    warm,
)
from tests.gpu.checks import Check, Unfit

PIECES: dict[str, Callable[[], list[Check]]] = {
    "modules": layers.modules,
    "ragged": layers.ragged,
    "dtypes": layers.dtypes,
    "solvers": layers.solvers,
    "newton": layers.newton,
    "cells": layers.cells,
    "own-cells": own_cells.own_cells,
    "more-cells": own_cells.more_cells,
    "random-cells": own_cells.random_cells,
    "regimes": layers.regimes,
    "gates": gates.gates,
    "products": products.products,
    "sums": sums.sums,
    "dropout": dropout.dropout,
    "transforms": transforms.transforms,
    "scans": operations.scans,
    "odes": operations.odes,
    "chains": operations.chains,
    "compile": around.compiled,
    "graphs": around.graphs,
    "streams": around.streams,
    "replays": replays.replays,
    "machines": around.machines,
    "faults": faulty.faulty,
    "processes": processes.processes,
    "warm": warm.warm_starts,
}
LONGEST = ("replays", "regimes", "newton", "own-cells", "warm", "dropout")
"""Pieces that are begun first, so that none of them is left to run alone at the end."""
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
Row = dict[str, Any]


def run_piece(piece: str, device: str, tell: Callable[[Row], None]) -> None:
    """Run every check of a piece; after the device is lost the rest fail without being tried."""
    lost = False
    for check in PIECES[piece]():
        row: Row = {"piece": piece, "name": check.name}
        began = time.perf_counter()
        try:
            if lost:
                raise RuntimeError("the device was lost before")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                row |= {"outcome": "passed", "said": check.run(device)}
        except Unfit as reason:
            row |= {"outcome": "skipped", "said": str(reason)}
        except Exception as error:
            lost = lost or context_lost(error)
            row |= {"outcome": "failed", "said": f"{type(error).__name__}: {first_line(error)}"}
            row["trace"] = traceback.format_exc(limit=-6)
        tell(row | {"seconds": round(time.perf_counter() - began, 2)})


def run_all(pieces: list[str], device: str, workers: int, seconds: float) -> list[Row]:
    """Run all pieces, each in its own process."""

    def one(piece: str) -> list[Row]:
        command = [sys.executable, "-m", "tests.gpu", piece, "--device", device, "--rows"]
        began = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=surroundings()) as process:
            assert process.stdout is not None
            try:
                text, _ = process.communicate(timeout=seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                text, _ = process.communicate()
        rows = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
        if process.returncode != 0:
            said = f"its process ended with status {process.returncode} after {len(rows)} checks"
            rows.append({"piece": piece, "name": "all of it", "outcome": "failed", "said": said, "seconds": 0.0})
        failed = [row for row in rows if row["outcome"] == "failed"]
        told = [f"{piece}: {len(rows)} checks, {len(failed)} failed, {time.perf_counter() - began:.0f} s"]
        told += [f"FAILED {piece} · {row['name']}\n    {row['said']}\n{row.get('trace', '')}" for row in failed]
        print("\n".join(told), flush=True)  # at once, in case the output is cut off later
        return rows

    with ThreadPoolExecutor(workers) as pool:
        running = {piece: pool.submit(one, piece) for piece in sorted(pieces, key=lambda piece: piece not in LONGEST)}
        return [row for piece in pieces for row in running[piece].result()]


def document(rows: list[Row], about: dict[str, Any], seconds: float) -> str:
    """The page of results."""
    counts = {outcome: sum(row["outcome"] == outcome for row in rows) for outcome in ("passed", "failed", "skipped")}
    where = about.get("gpu") or about["processor"]
    lines = ["# Checks on hardware, against float64", "", "Written by `make test-gpu` (`python -m tests.gpu`).", ""]
    lines += [
        f"{about['date']}, {where}, torch {about['torch']}, Python {about['python']}, timeloom {about['timeloom']} "
        f"of sources {about['code']}:"
    ]
    lines += [
        f"**{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped** in {seconds:.0f} s."
    ]
    lines += ["", "| piece | passed | failed | skipped | seconds |", "|---|---|---|---|---|"]
    for piece in dict.fromkeys(row["piece"] for row in rows):
        own = [row for row in rows if row["piece"] == piece]
        numbers = [sum(row["outcome"] == outcome for row in own) for outcome in counts]
        lines.append(f"| {piece} | {' | '.join(map(str, numbers))} | {sum(row['seconds'] for row in own):.0f} |")
    for outcome in ("failed", "skipped"):
        chosen = [row for row in rows if row["outcome"] == outcome]
        lines += ["", f"{outcome.capitalize()}:", ""] if chosen else []
        lines += [f"- {row['piece']} · `{row['name']}`: {row['said']}" for row in chosen]
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description="Checks on hardware, against float64.")
    parser.add_argument("pieces", nargs="*", metavar="PIECE", help=f"of {', '.join(PIECES)}; all where none is named")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--workers", type=int, default=4, help="pieces at once")
    parser.add_argument("--seconds", type=float, default=900, help="most for a piece")
    parser.add_argument("--out", type=Path, default=None, help="the page to write (by default only for all on a GPU)")
    parser.add_argument("--rows", action="store_true", help="run one piece here, a line of JSON for each check")
    given = parser.parse_args(arguments)
    unknown = set(given.pieces) - set(PIECES)
    if unknown:
        parser.error(f"there is no piece {', '.join(sorted(unknown))}; there are {', '.join(PIECES)}")
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU here; --device cpu runs what a CPU can")
    pieces = given.pieces or list(PIECES)
    if given.rows:
        torch.set_num_threads(1 if given.device == "cpu" else 4)
        for piece in pieces:
            run_piece(piece, given.device, lambda row: print(json.dumps(row), flush=True))
        return 0
    about, began = facts(given.device), time.perf_counter()
    rows = run_all(pieces, given.device, given.workers, given.seconds)
    page = document(rows, about, time.perf_counter() - began)
    out = given.out or (RESULTS / "test-gpu.md" if not given.pieces and given.device == "cuda" else None)
    if out is not None:
        out.write_text(page)
    print(page.split("\n| piece")[0])
    print(datetime.now(UTC).strftime("%H:%M UTC"), out or "")
    return 1 if any(row["outcome"] == "failed" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
