"""Solvers on a trained model and one batch: `timeloom.inspect`, and slow methods on what they can do in seconds."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from timeloom.app.train.model import SequenceModel
from timeloom.inspection.trials import Inspection, Trial, inspect, over_single_steps, try_solver
from timeloom.solvers import Solver

SECONDS = 2.0
"""Time that one method over single steps may take, about."""
SHORTEST, GROWTH, LONGEST = 128, 4, 8192
"""Steps to begin with, by how much they grow while there is time, and where they end."""


def inspect_model(model: SequenceModel, inputs: Tensor, lengths: Tensor | None, every: bool = False) -> Inspection:
    """Try solvers on one batch `(T, B, D)`.

    every: also the methods over single steps (DEER, ELK, …), whose work grows with the cube of the hidden size; they
        get the first steps of the first series, as many as they can do in a few seconds.
    """
    found = inspect(model, inputs, lengths)
    if not every:
        return found
    series = inputs[: lengths[0] if lengths is not None else None, :1]
    slow = [_on_a_stretch(model, series, name, solver) for name, solver in over_single_steps().items()]
    return replace(found, trials=[*found.trials, *slow])


def _on_a_stretch(model: SequenceModel, series: Tensor, name: str, solver: str | Solver) -> Trial:
    steps = min(SHORTEST, len(series))
    while True:
        trial = try_solver(model, name, solver, series[:steps])
        longer = min(GROWTH * steps, len(series), LONGEST)
        if longer == steps or trial.seconds * longer / steps > SECONDS:
            return replace(trial, stretch=steps)
        steps = longer
