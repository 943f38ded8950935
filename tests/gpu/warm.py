"""Warm starts on a device: samples return while the weights change, and results must still match float64."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

import timeloom as tl
from tests.gpu.around import Model, results, trio
from tests.gpu.checks import Check, Unfit, as_good_as_torch
from timeloom.solve.recurrence import BEGUN

STORES: dict[str, dict[str, Any]] = {
    "kept whole": {"every": 1},
    "half on the host": {"dtype": torch.float16, "device": "cpu"},
}
EPOCHS = 6


def warm_starts() -> list[Check]:
    sizes = (
        ("gru", 16, 6000, 1),
        ("lstm", 33, 4097, 2),
        ("rnn", 64, 5000, 3),
        ("gru", 129, 4099, 1),
        ("lstm", 64, 9001, 2),
    )
    found = [
        Check(f"auto {kind} n={n} T={T} B={B}", partial(_epochs, kind, n, T, B, "auto", {})) for kind, n, T, B in sizes
    ]
    chunks = tl.solvers.Shooting(chunk=100)
    found += [Check(f"chunks of 100, {kind} n={n} T={T} B={B}", partial(_epochs, kind, n, T, B, chunks, {}))
              for kind, n, T, B in sizes]  # fmt: skip
    found += [
        Check(f"{name}, gru n=32", partial(_epochs, "gru", 32, 6000, 2, "auto", how)) for name, how in STORES.items()
    ]
    return found


def _epochs(kind: str, n: int, steps: int, batch: int, solver: Any, how: dict[str, Any], device: str) -> str:
    if device == "cpu" and solver == "auto":
        raise Unfit("on a CPU `auto` does not begin at known states")
    own, theirs, exact = trio(kind, n, device, solver)
    store, said, began = tl.WarmStarts(**how, always=True), "", False  # else `auto` decides whether it pays
    samples = [torch.randn(steps, batch, 8, device=device) for _ in range(2)]
    for _ in range(EPOCHS):
        for index, x in enumerate(samples):
            with store.batch([(index, sequence) for sequence in range(batch)]):
                found = results(own, x)
            began = BEGUN in own.layer.reports[0].reason
            said = as_good_as_torch(found, results(theirs, x), results(exact, x.double()))
        _move(own, theirs, exact)
    if not began:
        raise AssertionError(f"it did not begin at known states: {own.layer.reports[0]}")
    return f"{said}; {own.layer.reports[0].warmup} steps of warm-up, {own.layer.reports[0].iterations} sweeps"


def _move(own: Model, theirs: Model, exact: Model) -> None:
    """A step of training: all weights change a little, in the same way in all three."""
    with torch.no_grad():
        for ours, other, right in zip(own.parameters(), theirs.parameters(), exact.parameters(), strict=True):
            right += 1e-3 * torch.randn_like(right)
            ours.copy_(right)
            other.copy_(right)
            right.copy_(ours)
