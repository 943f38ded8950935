"""Lyapunov exponents of any cell: how fast small differences of its state grow or fade, per step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from timeloom.cells.generic import GenericCell, State
from timeloom.options import check_count

BLOCK = 2**22
"""Entries of Jacobians that are held in memory at once."""


def lyapunov_exponents(
    cell: Callable[[Any, Tensor], Any],
    h0: State,
    xs: Tensor,
    count: int = 1,
    discard: int = 0,
    along: Tensor | None = None,
) -> Tensor:
    """The largest exponents, `(B, count)`, largest first, in units of 1 / step: divide by the step's time.

    A positive one means chaos: a difference grows by its exponential at every step. Tangents are carried along the
    cell's own states, and orthonormalised after every step.

    cell, h0, xs: as for `timeloom.unroll`; xs `(T, B, 0)` for a cell without inputs.
    discard: first steps that are run but not counted, to reach the attractor.
    along: states *before* every step, `(T, B, S)`, to use instead of the cell's own.
    """
    check_count("count", count)
    check_count("discard", discard, least=0)
    generic = GenericCell(cell, h0, xs.shape[2:])
    if count > generic.size:
        raise ValueError(f"count={count} exponents of a state of {generic.size} units: give at most that many")
    if not 0 <= discard < len(xs):
        raise ValueError(f"discard={discard} leaves no step to count: xs has {len(xs)}")
    inputs = xs.detach().flatten(2) if xs.dim() > 2 else xs.detach().unsqueeze(-1)
    with torch.no_grad():
        before = _states_before(generic, generic.pack(h0), inputs) if along is None else along.detach()
        if before.shape != (len(xs), xs.shape[1], generic.size):
            raise ValueError(
                f"along must hold the state before every step, {(len(xs), xs.shape[1], generic.size)}; got shape "
                f"{tuple(before.shape)}"
            )
        return _growth(generic, before, inputs, count, discard)


def _states_before(cell: GenericCell, state: Tensor, inputs: Tensor) -> Tensor:
    states = []
    for u in inputs:
        states.append(state)
        state = cell.step(state, u)
    return torch.stack(states)


def _growth(cell: GenericCell, before: Tensor, inputs: Tensor, count: int, discard: int) -> Tensor:
    steps, batch, size = before.shape
    generator = torch.Generator().manual_seed(0)  # any directions except those of single units
    tangents = torch.linalg.qr(torch.randn(batch, size, count, dtype=torch.float64, generator=generator))[0]
    tangents = tangents.to(before.device)
    total = torch.zeros(batch, count, dtype=torch.float64, device=before.device)
    block = max(1, BLOCK // (batch * size * size))
    for start in range(0, steps, block):
        piece = slice(start, start + block)
        jacobians = _jacobians(cell, before[piece].flatten(0, 1), inputs[piece].flatten(0, 1)).double()
        for step, jacobian in enumerate(jacobians.unflatten(0, (-1, batch)), start):
            tangents, stretch = torch.linalg.qr(jacobian @ tangents)
            if step >= discard:
                total += stretch.diagonal(dim1=-2, dim2=-1).abs().log()
    return (total / (steps - discard)).sort(-1, descending=True).values


def _jacobians(cell: GenericCell, states: Tensor, inputs: Tensor) -> Tensor:
    """The Jacobians `(N, S, S)`, one row at a time, without assuming any structure."""
    units = torch.eye(cell.size, dtype=states.dtype, device=states.device)
    return torch.stack([cell.vjp(states, inputs, unit.expand_as(states))[0] for unit in units], 1)
