"""Forward + backward on a GPU, in pieces of a few minutes; each writes JSON and Markdown after every row.

python -m benchmarks.gpu                      # the headline
python -m benchmarks.gpu regimes half grid    # others: solvers, rivals, runs
python -m benchmarks.gpu grid --resume        # what an earlier run did not come to
python -m benchmarks.gpu plot                 # pictures of what is there; needs no GPU
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.floor import bandwidth
from benchmarks.gpu.pieces import PIECES
from benchmarks.gpu.record import Record
from benchmarks.gpu.run import run
from benchmarks.gpu.warm import warm
from benchmarks.results import machine_facts

RESULTS = Path(__file__).parents[1] / "results"
PLOT = "plot"
MINUTES = 7.5
MOST_PROCESSES = 16
"""Most processes to compile in: each holds a CUDA context and a case."""
SHARE_TO_WARM = 0.4
"""Largest share of a piece's minutes that compiling first may take."""
PROGRAM = "python -m benchmarks.gpu"


def parse(arguments: Sequence[str] | None, program: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=program, description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "pieces",
        nargs="*",
        metavar="piece",
        help=f"what to measure: {', '.join(PIECES)} (default: headline); or {PLOT}: pictures of what is there",
    )
    where = "folder of the results (default: benchmarks/results; of `timeloom bench`: runs/bench)"
    parser.add_argument("--out", type=Path, default=RESULTS, help=where)
    parser.add_argument(
        "--minutes", type=float, default=MINUTES, help="of each piece; what is left out is named (default: %(default)s)"
    )
    parser.add_argument("--resume", action="store_true", help="keep the rows that are there, measure the others")
    parser.add_argument(
        "--warm",
        type=int,
        default=min(os.cpu_count() or 1, MOST_PROCESSES),
        metavar="N",
        help="processes that compile a piece's kernels first, side by side; 0: none (default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    options.pieces = options.pieces or ["headline"]
    unknown = [piece for piece in options.pieces if piece not in (*PIECES, PLOT)]
    if unknown:
        parser.error(f"no piece {unknown[0]!r}; choose from {', '.join((*PIECES, PLOT))}")
    if options.warm < 0:
        parser.error(f"argument --warm: expected 0 or more, got {options.warm}")
    if not options.minutes > 0:
        parser.error(f"argument --minutes: expected more than 0, got {options.minutes:g}")
    return options


def device_facts() -> dict[str, Any]:
    """What the numbers depend on."""
    return {"device": torch.cuda.get_device_name(), "bandwidth": bandwidth(), **machine_facts()}


def main(arguments: Sequence[str] | None = None, program: str = PROGRAM) -> int:
    options = parse(arguments, program)
    measured = [piece for piece in options.pieces if piece != PLOT]
    if measured and not torch.cuda.is_available():
        print(
            f"error: {program} {measured[0]} needs a CUDA device; without one, `timeloom bench` or "
            "`python -m benchmarks headline` measures the CPU",
            file=sys.stderr,
        )
        return 1
    facts = device_facts() if measured else {}
    for name in measured:
        piece = PIECES[name]()
        order = [job.name for job in piece.jobs]
        record = Record(options.out, name, {**facts, "command": f"{PROGRAM} {name}"}, order)
        if options.resume:
            print(f"{name}: {record.resume()} of {len(order)} rows are there")
        began, missing = time.monotonic(), set(record.missing())
        jobs = [job.warms for job in piece.jobs if job.warms is not None and job.name in missing]
        if options.warm and len(jobs) > 1:
            print(f"{name}: {warm(jobs, options.warm, SHARE_TO_WARM * 60 * options.minutes)}", flush=True)
        run(piece, record, options.minutes, spent=time.monotonic() - began)
        print(f"{record.path.with_suffix('.md')}: {len(record.rows)} rows, {len(record.left_out)} left out")
    return plot(options.out) if PLOT in options.pieces else 0


def plot(folder: Path) -> int:
    """Draw pictures of the results that are there."""
    from benchmarks.gpu import pictures, run_pictures  # matplotlib is imported only where it is used

    drawn = [*pictures.draw(folder), *run_pictures.draw(folder)]
    if not drawn:
        print(f"error: no results of {PROGRAM} to draw in {folder}", file=sys.stderr)
        return 1
    print("\n".join(map(str, drawn)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
