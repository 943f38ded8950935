"""`python -m benchmarks.rows`: microseconds of a step on a GPU by the rows that are walked side by side, each by itself
or in tiles. The numbers of `auto/costs.py` for CUDA kernels, and WAVES of `kernels/cuda/sweeper.py`, are read off here.

A row is a chunk of one sequence. Times are of one launch over chunks of STEPS steps, divided by these, forward and
backward, by sweeps that leave starts and ends alone (`bare`) and by those that write states or gradients (`whole`).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from timeloom.cells import Cell, GRUCell, LSTMCell, RNNCell
from timeloom.kernels.cuda.programs import Variant
from timeloom.kernels.cuda.sweeper import CUDASweeper
from timeloom.kernels.reference import AdjointData
from timeloom.problem import Recurrence, cut_evenly, empty_states

STEPS = 256
TIMES = 5
CELLS: dict[str, tuple[Callable[[Tensor], Cell], int, int]] = {
    "gru": (lambda w_hh: GRUCell(w_hh, w_hh.new_zeros(w_hh.shape[1])), 3, 1),
    "lstm": (LSTMCell, 4, 2),
    "rnn_tanh": (RNNCell, 1, 1),
}
"""Cells from their recurrent weights, their gates and the parts of their state."""
MOST_BYTES = 8 << 30


class Forced(CUDASweeper):
    """A sweeper that walks rows by themselves or in tiles, as `single` says."""

    single = True

    def _variant(self, adjoint: bool, rows: int, stores: int, decay: bool) -> Any:
        return Variant(self._kernel, self._n, 0, adjoint, self.single, stores, decay, False)


def problem_of(kernel: str, units: int, rows: int, device: str = "cuda") -> Recurrence:
    make, gates, parts = CELLS[kernel]
    torch.manual_seed(0)
    cell = make(torch.randn(gates * units, units, device=device) / units**0.5)
    u = torch.randn(STEPS, rows, gates * units, device=device)
    return Recurrence(cell, u, torch.zeros(rows, parts * units, device=device))


def milliseconds(run: Callable[[], object]) -> float:
    run()
    found: list[float] = []
    for _ in range(TIMES):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        run()
        ended.record()
        torch.cuda.synchronize()
        found.append(began.elapsed_time(ended))
    return min(found)


def measured(kernel: str, units: int, rows: int, single: bool) -> dict[str, Any]:
    """Microseconds of a step, by direction and by what is written."""
    problem = problem_of(kernel, units, rows)
    swept = Forced(problem, CUDASweeper.room_for_saved(problem))
    swept.single = single
    segments = cut_evenly(STEPS, rows, STEPS, False)
    back = cut_evenly(STEPS, rows, STEPS, True)
    states = empty_states(STEPS, problem.initial, problem.cell.parts)
    swept.forward(segments, problem.initial, states)
    gate_grads = torch.empty(STEPS, rows, problem.cell.gate_width, device="cuda")
    incoming = torch.randn(STEPS, rows, units, device="cuda")
    bare, whole = AdjointData(states, incoming), AdjointData(states, incoming, gate_grads)
    calls = {
        "forward bare": lambda: swept.forward(segments, problem.initial, None, True),
        "forward whole": lambda: swept.forward(segments, problem.initial, states),
        "backward bare": lambda: swept.adjoint(back, problem.initial, bare, True),
        "backward whole": lambda: swept.adjoint(back, problem.initial, whole),
    }
    return {name: round(1e3 * milliseconds(call) / STEPS, 4) for name, call in calls.items()}


def rows_of(processors: int) -> Iterator[int]:
    for waves in (1, 2, 3, 4, 6, 8, 16):
        yield processors * waves


def main() -> None:
    options = argparse.ArgumentParser(prog="python -m benchmarks.rows", description=__doc__)
    options.add_argument("--cells", default="gru,lstm,rnn_tanh")
    options.add_argument("--units", default="16,32,64,128")
    options.add_argument("--out", type=Path, help="a file for all numbers")
    given = options.parse_args()
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    print(f"{torch.cuda.get_device_name()}, {processors} multiprocessors")
    found = []
    for kernel in given.cells.split(","):
        for units in map(int, given.units.split(",")):
            for rows in rows_of(processors):
                for single in (True, False):
                    variant = Variant(kernel, units, 0, False, single, 0, False, False)
                    if (not single and units > variant.text.most_units) or (single and variant.cluster > 1):
                        continue
                    if 40 * STEPS * rows * units * 4 > MOST_BYTES or (single and rows > 8 * processors):
                        continue
                    row = {"cell": kernel, "units": units, "rows": rows, "single": single}
                    row |= measured(kernel, units, rows, single)
                    found.append(row)
                    print(" ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    if given.out is not None:
        given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
