"""Turns measurements into a table for the terminal, Markdown, and JSON."""

from __future__ import annotations

import json
import os
import platform
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import Measurement

HEADER = (
    "cell", "T", "B", "n", "regime", "torch ms", "timeloom ms", "ratio", "goal", "torch error", "timeloom error",
    "sweeps", "chunk", "fell back",
)  # fmt: skip
LEFT_ALIGNED = {"cell", "regime", "fell back"}
MEMORY_HEADER = ("torch MiB", "timeloom MiB")
NOTE = (
    "Milliseconds of forward + backward, medians of steps taken in turn; ratio in bold: below its goal. Errors are "
    "the largest over outputs and all gradients, each relative to the tensor's largest value, against torch.nn in "
    "float64; in bold: above twice torch's own. Sweeps and chunk: forward + backward; a chunk of T is sequential."
)


def new_file(text: str) -> Path:
    """A path to write to, for argparse: a folder is refused before anything is measured."""
    path = Path(text)
    if path.is_dir():
        raise ArgumentTypeError(f"{text} is a folder; give a file such as {path / 'results.json'}")
    return path


def need_gpu(parser: ArgumentParser, device: str) -> None:
    """End the command line with an error where the device is a GPU, and torch sees none."""
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU here: use --device cpu")


def machine_facts() -> dict[str, Any]:
    """Facts that the numbers depend on, without names of the machine or its user; to be called before measuring."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load": round(os.getloadavg()[0], 2),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def _processor() -> str:
    listing = Path("/proc/cpuinfo")
    if listing.exists():
        for line in listing.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def cells(measurement: Measurement) -> tuple[str, ...]:
    """One row of the table, as plain text."""
    case, solve = measurement.case, measurement.solve
    memory = measurement.peak_bytes
    row = (
        case.cell,
        str(case.length),
        str(case.batch),
        str(case.hidden),
        case.regime.name,
        _milliseconds(measurement.timings["torch"].median),
        _milliseconds(measurement.timings["timeloom"].median),
        f"{measurement.ratio:.2f}x",
        f"{case.goal:g}x",
        f"{measurement.worst_error('torch'):.1e}",
        f"{measurement.worst_error('timeloom'):.1e}",
        _both(solve.sweeps, solve.backward_sweeps),
        _both(solve.chunk, solve.backward_chunk),
        "yes" if solve.fell_back else "no",
    )
    return row if memory is None else (*row, *(f"{memory[side] / 2**20:.0f}" for side in memory))


def _milliseconds(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def _both(forward: int, backward: int | None) -> str:
    return f"{forward}+{'?' if backward is None else backward}"


def header(with_memory: bool) -> tuple[str, ...]:
    return (*HEADER, *MEMORY_HEADER) if with_memory else HEADER


def markdown(measurements: Sequence[Measurement], facts: dict[str, Any]) -> str:
    """The table with its notes."""
    titles = header(any(measurement.peak_bytes for measurement in measurements))
    lines = [
        f"{facts['processor']}, {facts['cores']} cores, {facts['threads']} threads, torch {facts['torch']}, "
        f"{facts['date']}. Command: `{facts['command']}`.",
        "",
        NOTE,
        "",
        "| " + " | ".join(titles) + " |",
        "|" + "|".join("---" if title in LEFT_ALIGNED else "--:" for title in titles) + "|",
    ]
    for measurement in measurements:
        row = dict(zip(titles, cells(measurement), strict=True))
        if not measurement.meets_goal:
            row["ratio"] = f"**{row['ratio']}**"
        if not measurement.accurate:
            row["timeloom error"] = f"**{row['timeloom error']}**"
        lines.append("| " + " | ".join(row.values()) + " |")
    lines += ["", verdict(measurements)]
    return "\n".join(lines) + "\n"


def verdict(measurements: Sequence[Measurement]) -> str:
    """One line: how many goals are met and how many errors are within twice torch's."""
    total = len(measurements)
    met = sum(measurement.meets_goal for measurement in measurements)
    accurate = sum(measurement.accurate for measurement in measurements)
    return f"{met} of {total} goals met; error within twice torch's own in {accurate} of {total}."


def write_json(path: Path, measurements: Sequence[Measurement], facts: dict[str, Any]) -> None:
    """Everything that was measured."""
    rows = [
        asdict(measurement)
        | {
            "ratio": measurement.ratio,
            "meets_goal": measurement.meets_goal,
            "worst_error": {side: measurement.worst_error(side) for side in measurement.errors},
        }
        for measurement in measurements
    ]
    path.write_text(json.dumps({"machine": facts, "measurements": rows}, indent=2, ensure_ascii=False) + "\n")
