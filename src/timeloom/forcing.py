"""Generalised teacher forcing: train on chaotic systems over long sequences, with any cell (Hess et al., 2023)."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from timeloom.cells.generic import State
from timeloom.inspection.lyapunov import lyapunov_exponents
from timeloom.options import check_count

Schedule = Callable[[int], float]
"""`schedule(k)`: α after k calls of `advance`, between 0 and 1."""


class TeacherForcing(nn.Module):
    """A cell whose state is pulled towards data before every step: `h ← (1 − α) h + α·teacher`, `h⁺ = cell(h, x)`.

    α = 1 is plain teacher forcing, α = 0 leaves the cell free. Gradients through a step shrink by 1 − α, so that even
    the gradients of a chaotic cell stay bounded over any length, and the solve over time converges: the forced system
    contracts once α exceeds `contracting_alpha`. Where the teacher is NaN (a missing measurement) the state stays free.

    cell: as for `timeloom.unroll`, `cell(h, x)`; of a state with several parts, the first is forced.
    alpha: a number between 0 and 1, or a schedule such as `annealed(0.3, 0.02, 500)`, which `advance()` steps through.
    units: the number of leading units that are forced; all of them by default.

        forced = TeacherForcing(cell, annealed(0.3, 0.02, steps=500))
        states, report = timeloom.unroll(forced, data[0], forced.inputs(data[:-1]))     # states[t] is to be data[t + 1]
    """

    alpha: Tensor
    """The current α: a buffer, so that it is saved and moved with the module."""
    advanced: Tensor
    """Number of calls of `advance` so far."""

    def __init__(self, cell: Callable[[Any, Tensor], Any], alpha: float | Schedule, units: int | None = None) -> None:
        super().__init__()
        if not callable(cell):
            raise TypeError(f"cell must be a function or module f(h, x) -> h, got {type(cell).__name__}")
        if units is not None:
            check_count("units", units)
        self.cell, self.units = cell, units
        self.schedule: Schedule = alpha if callable(alpha) else _constant(alpha)
        self.register_buffer("alpha", torch.tensor(_checked(self.schedule(0)), dtype=torch.get_default_dtype()))
        self.register_buffer("advanced", torch.zeros((), dtype=torch.int64))

    def advance(self) -> float:
        """Set and return the next α of the schedule; call it once for each update of the weights."""
        self.advanced += 1
        self.alpha.fill_(_checked(self.schedule(int(self.advanced))))
        return float(self.alpha)

    def inputs(self, teacher: Tensor, xs: Tensor | None = None) -> Tensor:
        """The `xs` for `unroll`: teacher `(T, B, units)` and the cell's own inputs `(T, B, D)`, concatenated.

        `teacher[t]` is the target for the state *before* step t. Without xs the cell is given x `(N, 0)`.
        """
        if not isinstance(teacher, Tensor) or teacher.dim() != 3:
            given = tuple(teacher.shape) if isinstance(teacher, Tensor) else type(teacher).__name__
            raise ValueError(f"teacher must be a Tensor of shape (T, B, units), got {given}")
        if self.units is not None and teacher.shape[-1] != self.units:
            raise ValueError(f"teacher has {teacher.shape[-1]} units, expected units={self.units}")
        if xs is None:
            return teacher
        if not isinstance(xs, Tensor) or xs.dim() != 3 or xs.shape[:2] != teacher.shape[:2]:
            given = tuple(xs.shape) if isinstance(xs, Tensor) else type(xs).__name__
            raise ValueError(f"xs must be a Tensor of shape {tuple(teacher.shape[:2])} + (D,), got {given}")
        return torch.cat([teacher, xs], -1)

    def forward(self, h: State, x: Tensor) -> State:
        first = h[0] if isinstance(h, tuple) else h
        units = first.shape[-1] if self.units is None else self.units
        if units > first.shape[-1] or units > x.shape[-1]:
            raise ValueError(
                f"a teacher of {units} units does not fit: the state has {first.shape[-1]}, the inputs hold "
                f"{x.shape[-1]}. Make them with .inputs(teacher, xs), and give units= where only some are measured"
            )
        teacher, x = x[..., :units], x[..., units:]
        free, alpha = first[..., :units], self.alpha.to(first.dtype)
        drawn = torch.where(teacher.isnan(), free, free + alpha * (teacher.nan_to_num() - free))
        first = drawn if units == first.shape[-1] else torch.cat([drawn, first[..., units:]], -1)
        following: State = self.cell((first, *h[1:]) if isinstance(h, tuple) else first, x)
        return following

    def extra_repr(self) -> str:
        return f"alpha={float(self.alpha):.3g}" + ("" if self.units is None else f", units={self.units}")


def annealed(start: float, end: float, steps: int) -> Schedule:
    """A schedule of α from `start` to `end` over `steps` updates: geometric, or linear if one of the two is 0."""
    start, end = _checked(start), _checked(end)
    check_count("steps", steps)

    def schedule(step: int) -> float:
        share = min(step, steps) / steps
        if start == 0 or end == 0:
            return start + share * (end - start)
        return min(1.0, start * math.exp(share * math.log(end / start)))

    return schedule


def contracting_alpha(cell: Callable[[Any, Tensor], Any], teacher: Tensor, xs: Tensor | None = None) -> float:
    """The smallest α at which a cell that is forced in all units by this teacher `(T, B, n)` contracts.

    This is `1 − exp(−λ)`, with λ the largest Lyapunov exponent of the free cell along the data; 0 if λ < 0.
    """
    xs = teacher.new_empty(*teacher.shape[:2], 0) if xs is None else xs
    growth = lyapunov_exponents(cell, teacher[0], xs, along=teacher)
    return max(0.0, 1 - math.exp(-float(growth.max())))


def _constant(alpha: float) -> Schedule:
    value = _checked(alpha)
    return lambda _: value


def _checked(alpha: Any) -> float:
    if not isinstance(alpha, Real) or isinstance(alpha, bool):
        raise TypeError(f"alpha must be a number between 0 and 1, or a schedule, got {type(alpha).__name__}")
    if not 0 <= float(alpha) <= 1:
        raise ValueError(f"alpha must lie between 0 (free) and 1 (plain teacher forcing), got {alpha}")
    return float(alpha)
