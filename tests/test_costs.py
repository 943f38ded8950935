"""What `auto` takes CUDA sweeps to cost, beside what `python -m benchmarks.rows` measured on an H200."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from timeloom.auto.costs import GATES, RegisterCost, chunk_to_correct, cost_of, cost_of_sweeps
from timeloom.kernels.cuda.programs import text_of
from timeloom.kernels.cuda.sweeper import waves_of

PROCESSORS = 132
MEASURED: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "benchmarks" / "results" / "rows-cuda.json").read_text()
)
TIMES = ("forward bare", "forward whole", "backward bare", "backward whole")


def cost(kernel: str, units: int, backward: bool = False) -> RegisterCost:
    text = text_of(kernel)
    return RegisterCost(GATES[text.products], units, PROCESSORS, units <= text.most_units, 1, backward)


def chosen(row: dict[str, Any]) -> bool:
    """Whether it is by the kernel that runs so many rows."""
    by_itself: bool = row["rows"] <= PROCESSORS * waves_of(row["units"])
    return bool(row["single"]) == by_itself


def ratios() -> Iterator[float]:
    for row in filter(chosen, MEASURED):
        for name in TIMES:
            direction, written = name.split()
            taken = cost(row["cell"], row["units"], direction == "backward").of(row["rows"], written == "whole")
            yield taken / row[name]


def test_a_step_costs_what_was_measured() -> None:
    found = list(ratios())
    assert len(found) > 150
    assert 0.85 < statistics.median(found) < 1.15
    assert min(found) > 0.45
    assert max(found) < 1.4


def test_the_kernel_that_runs_is_the_faster_one_or_nearly() -> None:
    times = {
        (row["cell"], row["units"], row["rows"], row["single"]): sum(row[name] for name in TIMES) for row in MEASURED
    }
    for row in filter(chosen, MEASURED):
        size = row["cell"], row["units"], row["rows"]
        other = times.get((*size, not row["single"]))
        assert other is None or times[*size, row["single"]] < 1.3 * other, size


def test_more_rows_never_take_less_time() -> None:
    for units in (8, 16, 32, 64, 128):
        steps = [cost("gru", units).of(rows, stores=True) for rows in (1, 132, 264, 528, 1056, 2112, 9000)]
        assert steps == sorted(steps)


@pytest.mark.parametrize(("batch", "units", "expected"), [(1, 64, 128), (16, 64, 256), (1, 128, 128), (4, 128, 64)])
def test_chunks_to_correct_fill_the_machine(batch: int, units: int, expected: int) -> None:
    """Tiles of rows take the same time up to one on every multiprocessor; more chunks are a longer chain."""
    assert chunk_to_correct(16384, batch, cost("gru", units)) == expected


def test_nothing_is_cut_that_cannot_be() -> None:
    assert chunk_to_correct(8, 1, cost("gru", 64)) == 8


def test_sweeps_write_once() -> None:
    """All but the last leave starts and ends alone."""
    tiles = cost("gru", 64)
    one, two = (cost_of_sweeps(16384, 16, 256, sweeps, tiles) for sweeps in (1, 2))
    assert one > cost_of(16384, 16, 256, 0, tiles)
    assert two - one < one
