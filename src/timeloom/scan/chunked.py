"""The linear recurrence in chunks that run side by side: about √T steps instead of T."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from timeloom.scan.elements import Structure, apply, compose
from timeloom.scan.reference import scan as sequential_scan

SHORTEST: dict[Structure, int] = {"diagonal": 32, "dense": 128, "block": 32}
"""Lengths up to which the plain loop is faster (`python -m benchmarks.calibrate`); dense products cost n³."""


def scan(a: Tensor, b: Tensor, h0: Tensor, structure: Structure) -> Tensor:
    """Same as `timeloom.scan.reference.scan`.

    Every chunk runs from zero while it multiplies up its transfers; the chunk boundaries are a recurrence of the same
    kind, √T long; then each state adds what its chunk's true start contributes: `h[t] = local[t] + (a[t]⋯a[first])
    start`.
    """
    steps = b.shape[0]
    if steps <= SHORTEST[structure]:
        return sequential_scan(a, b, h0, structure)
    chunk = math.isqrt(steps)
    chunks, rest = divmod(steps, chunk)
    whole = chunks * chunk
    # (chunk, chunks, ...): step j of all chunks side by side
    transfers = a[:whole].unflatten(0, (chunks, chunk)).transpose(0, 1)
    sources = b[:whole].unflatten(0, (chunks, chunk)).transpose(0, 1)
    state, transfer = sources[0], transfers[0]
    local, product = [state], [transfer]  # no writes in place: torch.func differentiates it
    for a_j, b_j in zip(transfers.unbind(0)[1:], sources.unbind(0)[1:], strict=True):
        state, transfer = apply(a_j, state, structure) + b_j, compose(a_j, transfer, structure)
        local.append(state)
        product.append(transfer)
    ends = scan(transfer, state, h0, structure)
    starts = torch.cat([h0.unsqueeze(0), ends[:-1]])
    states = (torch.stack(local) + apply(torch.stack(product), starts, structure)).transpose(0, 1).flatten(0, 1)
    if rest:
        states = torch.cat([states, sequential_scan(a[whole:], b[whole:], states[-1], structure)])
    return states
