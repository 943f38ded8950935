"""Runs a piece: row by row, within its time, whatever happens in single rows."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import torch

from benchmarks.gpu import table
from benchmarks.gpu.compare import Row, first_line
from benchmarks.gpu.pieces import Job, Piece
from benchmarks.gpu.record import Record

OUT_OF_TIME = "out of time"
DEVICE_LOST = "the device failed; go on with --resume in a new process"


def run(
    piece: Piece, record: Record, minutes: float, clock: Callable[[], float] = time.monotonic, spent: float = 0.0
) -> None:
    """Measure the rows that the record lacks, writing it after every row; rows beyond the time are left out.

    `spent`: seconds of the minutes that are used already.
    """
    jobs = {job.name: job for job in piece.jobs}
    began, stopped = clock() - spent, None
    record.left_out = dict(piece.left_out)
    try:
        for name in record.missing():
            left = 60 * minutes - (clock() - began)
            if left <= 0:
                stopped = stopped or f"{OUT_OF_TIME} after {minutes:g} minutes"
            if stopped is not None:
                record.left_out[name] = stopped
                continue
            row = attempt(jobs[name], left)
            record.add(row)
            print(table.line(piece.columns, row), flush=True)
            record.write(document(piece, record))
            if not tidy():
                stopped = DEVICE_LOST
    finally:
        piece.finish()
    record.write(document(piece, record))


def attempt(job: Job, left: float) -> Row:
    """The job's row, or one with the error if it fails."""
    try:
        return job.measure(left)
    except Exception as error:
        return {"name": job.name, "case": job.name, "error": first_line(error)}


def tidy() -> bool:
    """Free memory between rows; returns False if the device no longer answers."""
    gc.collect()
    if not torch.cuda.is_available():
        return True
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError:
        return False
    return True


def document(piece: Piece, record: Record) -> str:
    """The Markdown page."""
    content = record.content()
    cases = list(dict.fromkeys(row["case"] for row in content["rows"]))
    rows = sorted(content["rows"], key=lambda row: cases.index(row["case"]))
    lines = table.head(piece.title, content, piece.note)
    lines += table.markdown(piece.columns, rows) + piece.verdict(rows) + table.left_out(record.left_out)
    for above, columns in piece.more.items():
        lines += ["", above, "", *table.markdown(columns, [row for row in rows if "error" not in row])]
    return "\n".join(lines) + "\n"
