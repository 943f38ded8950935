"""`check_cell`: does a user's cell keep the promises that parallel-in-time solving relies on?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from timeloom.cells.generic import GenericCell, State
from timeloom.compile.following import look_around
from timeloom.compile.remember import compiled_for
from timeloom.compile.surroundings import Unseen
from timeloom.kernels.cpu.fused import why_not
from timeloom.kernels.cuda.fused import compile_for


@dataclass(frozen=True)
class CellReport:
    """What `check_cell` found."""

    state_size: int
    diagonal: bool
    """Whether no unit of the next state depends on another unit: corrections are then exact and cheap."""
    gradient_error: float
    """Largest relative difference between autograd's derivative and float64 finite differences."""
    fused: bool = False
    """Whether fused kernels are generated for the cell: a step then costs about as much as one of `timeloom.GRU`."""
    form: str = ""
    """The normal form that the kernels run, or the reason why there is none."""
    unseen: str = ""
    """What in the cell's code cannot be tracked, so that calls on a GPU are not replayed as a whole; empty if nothing.
    """


def check_cell(cell: Callable[[Any, Tensor], Any], h0: State, x: Tensor) -> CellReport:
    """Test a cell on one step, h0 `(N, ...)` (or a tuple) and x `(N, ...)`; raises an error that says what to fix.

    Checked: shapes and dtype of the result; the same input gives the same output; each row of the result depends on its
    own row of the input alone; autograd's derivative with respect to the state agrees with float64 finite differences.
    Reported: whether fused kernels are generated, and if not, why; what in the cell's code cannot be tracked.
    """
    parts = h0 if isinstance(h0, tuple) else (h0,)
    for name, value in (*(("h0", part) for part in parts), ("x", x)):
        if not isinstance(value, Tensor) or value.dim() < 1:
            given = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            kind = "a Tensor (N, ...) or a tuple of them" if name == "h0" else "a Tensor (N, ...)"
            raise TypeError(f"{name} must be {kind}, got {given}")
    if len(x) == 0:
        raise ValueError(f"x has no rows: its shape is {tuple(x.shape)}, expected (N, ...) with N ≥ 1")
    if any(len(part) != len(x) for part in parts):
        raise ValueError(f"h0 and x must have as many rows: {[len(part) for part in parts]} and {len(x)}")
    generic = GenericCell(cell, h0, x.shape[1:])
    state, u = generic.pack(h0).detach(), x.detach()
    with torch.no_grad():
        out = generic.check_repeats(state, u)
        if not bool(out.isfinite().all()):
            raise ValueError("the cell returned values that are not finite on this input")
        generic.check_rows(state, u)
    fused, form = _normal_form(generic, state, x)
    unseen = _unseen(generic, state, u)
    return CellReport(
        generic.size, generic.is_diagonal(state, u), _gradient_error(generic, state, u), fused, form, unseen
    )


def _unseen(cell: GenericCell, state: Tensor, u: Tensor) -> str:
    try:
        look_around(cell.function, state.device, lambda: cell.step(state, u))
    except Unseen as reason:
        return str(reason)
    return ""


def _normal_form(cell: GenericCell, state: Tensor, x: Tensor) -> tuple[bool, str]:
    """Whether kernels exist for the cell, and its normal form or the reason why there are none."""
    parts = cell.unpack(state)
    given = parts if isinstance(parts, tuple) else (parts,)
    compiled = compiled_for(cell.function, given, cell.is_tuple, x.detach().unsqueeze(0), fewest=0)
    if isinstance(compiled, str):
        return False, compiled
    if state.device.type == "cuda":
        missing = compile_for(compiled.fused, state.device)
    else:
        missing = why_not(compiled.fused, state.dtype)
    return (True, compiled.fused.describe()) if missing is None else (False, missing)


def _gradient_error(cell: GenericCell, state: Tensor, u: Tensor) -> float:
    """Error of autograd's directional derivative against central differences, in float64 if the cell can run in it.

    In a narrower dtype the best of several step sizes counts: the curvature of a normalisation of a state near zero
    already shows within 0.003.
    """
    steps: tuple[float, ...] = (1e-6,)
    try:
        wide, wide_u = state.double(), u.double() if u.is_floating_point() else u
        with torch.no_grad():
            cell.step(wide, wide_u)
    except (RuntimeError, TypeError):  # the cell holds parameters of a narrower dtype
        wide, wide_u, steps = state, u, (1e-2, 1e-3, 1e-4)
    generator = torch.Generator(device=state.device).manual_seed(0)
    direction, probe = (
        torch.randn(wide.shape, generator=generator, device=wide.device, dtype=wide.dtype) for _ in "dp"
    )
    given = (cell.vjp(wide, wide_u, probe)[0] * direction).sum(-1)

    def error_of(step: float) -> float:
        with torch.no_grad():
            ahead, behind = cell.step(wide + step * direction, wide_u), cell.step(wide - step * direction, wide_u)
        expected = ((ahead - behind) / (2 * step) * probe).sum(-1)
        return float((given - expected).abs().max() / expected.abs().max().clamp(min=1e-12))

    error = min(map(error_of, steps))
    if not error < (1e-4 if wide.dtype == torch.float64 else 0.1):
        raise ValueError(
            f"autograd's derivative of the cell differs from finite differences by {error:.1e} (relative): "
            f"does the cell detach, round, or use in-place operations on its state?"
        )
    return error
