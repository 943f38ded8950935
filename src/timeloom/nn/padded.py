"""Sequences of different lengths without gradients: all are run to the end of the longest one, padding included.

The kernels of whole layers take no lengths, but so little time per step that running the padding may pay.
"""

from __future__ import annotations

import torch
from torch import Tensor

from timeloom.auto.thresholds import FULL
from timeloom.nn.sequence import clear_padding
from timeloom.solve.inputs import Inputs
from timeloom.solve.recurrence import Record
from timeloom.solve.trunk import LayerSolve

SHARE = FULL["GRU"][1]
"""Share of real steps among all steps from which that pays."""


def gains(solve: LayerSolve, inputs: Inputs) -> bool:
    """Whether running the padding pays: only if `auto` chooses, for cells whose outputs are their whole states."""
    lengths, x = inputs.lengths, inputs.x
    if lengths is None or inputs.resets is not None or inputs.taped or x.device.type != "cpu":
        return False
    if solve.whole_states or not solve.solver.adapts or int(lengths.sum()) < SHARE * x.shape[0] * x.shape[1]:
        return False
    cell = solve.cell_of(inputs)
    return len(cell.parts) == 1 and solve.kind_of(inputs._replace(lengths=None), cell) is not None


def run(solve: LayerSolve, inputs: Inputs, record: Record) -> tuple[Tensor, Tensor]:
    """Outputs `(T, B, n)`, zero past the end of each sequence, and final state `(B, n)`."""
    lengths = inputs.lengths
    assert lengths is not None
    with torch.no_grad():
        outputs, _ = solve.run(inputs._replace(lengths=None), record)
        last = outputs[(lengths - 1).clamp(min=0), torch.arange(len(lengths), device="cpu")]
        return clear_padding(outputs, lengths), torch.where((lengths > 0).unsqueeze(-1), last, inputs.initial)
