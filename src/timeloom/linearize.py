"""Single steps linearised: the elements of the linear recurrence that corrects all states at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from timeloom.memory import all_finite, room
from timeloom.problem import Recurrence
from timeloom.scan import linear_scan, native
from timeloom.scan.elements import Structure
from timeloom.scan.kalman import damped_scan
from timeloom.scan.linear import Method

Elements = Literal["zero", "identity", "diagonal", "block", "dense"]
Precision = Literal["full", "float32", "tf32", "bfloat16"]

COPIES = 6
"""Tensors of the elements' size that are alive at once while a window is linearised and scanned."""


@dataclass(frozen=True)
class Linearization:
    """How a jump at one state moves the states behind it, `δ[t] = A[t-1] δ[t-1] + jump[t]`, for chunks of one step.

    elements: what stands for a step's Jacobian: nothing, the identity, its diagonal, the diagonals of its 2 × 2
        parts, or all of it.
    probes: random vectors that estimate the diagonal; None computes it.
    damped: whether the recurrence is damped, more and more while the residual grows (Levenberg–Marquardt).
    precision: what elements and scan are rounded to. Residuals are never rounded, so neither is the result.
    method, levels: of `linear_scan`.
    """

    elements: Elements
    probes: int | None = None
    damped: bool = False
    precision: Precision = "full"
    method: Method = "auto"
    levels: int | None = None


Window = Callable[[int, int, slice, Tensor], Tensor]
"""`window(first, last, sequences, states)`: elements of the steps first ≤ t < last of some sequences."""


def window_of(problem: Recurrence, how: Linearization) -> Window:
    """What linearises a window of steps at given previous states `(last − first, B, S)`."""

    def window(first: int, last: int, sequences: slice, previous: Tensor) -> Tensor:
        u, initial = problem.u[first:last, sequences], problem.initial[sequences]
        dead = _not_carried(problem, first, last, sequences)
        if problem.resets is not None:
            previous = torch.where(problem.resets[first:last, sequences].unsqueeze(-1), initial, previous)
        rows, inputs = previous.flatten(0, 1), u.flatten(0, 1)
        cell = problem.cell
        if how.elements == "dense":
            elements = cell.jacobian(rows, inputs)
        elif how.elements == "block":
            elements = cell.blocks(rows, inputs)
        elif how.probes is not None:
            elements = cell.estimated_diagonal(rows, inputs, how.probes)
        else:
            elements = cell.diagonal(rows, inputs)
        elements = elements.view(*u.shape[:2], *elements.shape[1:])  # splits the rows, whatever their order in memory
        if dead is None:
            return elements
        return elements.masked_fill(dead.view(*dead.shape, *[1] * (elements.dim() - 2)), 0)

    return window


def _not_carried(problem: Recurrence, first: int, last: int, sequences: slice) -> Tensor | None:
    """Steps that begin with a reset or lie past a sequence's end, `(last − first, B)`."""
    dead = None if problem.resets is None else problem.resets[first:last, sequences]
    if problem.lengths is not None:
        time = torch.arange(first, last, device=problem.u.device)[:, None]
        past = time >= problem.ends_on_device()[sequences]
        dead = past if dead is None else dead | past
    return dead


def carry(
    how: Linearization,
    window: Window,
    jump: Tensor,
    states: Tensor,
    backwards: bool = False,
    damping: Tensor | None = None,
    incoming: Tensor | None = None,
) -> Tensor:
    """`δ` `(T, B, S)` from the jumps `(T, B, S)` at all states, in the order of time.

    Forward `δ[t] = A[t-1] δ[t-1] + jump[t]`; backwards `δ[t-1] = A[t]ᵀ (δ[t] + incoming[t]) + jump[t-1]`, with dense
    elements where there is something incoming. Elements are made and used window by window, as many as there is memory
    for; what a window ends with is what the next one starts from.
    """
    if how.elements == "zero" or len(jump) == 1:
        return jump
    if how.elements == "identity":
        return jump.cumsum(0)
    delta = torch.empty_like(jump)
    for sequences, windows in _windows(how, jump, backwards):
        edge = -1 if backwards else 0
        delta[edge, sequences] = jump[edge, sequences]
        belief = None
        for first, last in windows:  # states to find; the steps before (behind) them carry over
            shift = 1 if backwards else -1
            previous = states[first + shift : last + shift, sequences]
            elements = window(first + shift, last + shift, sequences, previous)
            start = delta[last if backwards else first - 1, sequences]
            sources = jump[first:last, sequences]
            if damping is None:
                entering = None if incoming is None else incoming[first + shift : last + shift, sequences]
                found = _scan(how, elements, sources, start, backwards, entering)
            else:
                found, belief = _damped(how, elements, sources, damping[sequences], belief)
            if not backwards and not all_finite(found):  # a gradient that is not finite is what autograd finds, too
                _refuse_bad_elements(elements, previous, sources, first + shift, sequences)
            delta[first:last, sequences] = found
    return delta


def _windows(how: Linearization, jump: Tensor, backwards: bool) -> Iterator[tuple[slice, list[tuple[int, int]]]]:
    """Sequences, and windows of time in the order in which they are scanned, that fit into memory together."""
    steps, batch, size = jump.shape
    width = {"dense": size * size, "block": 2 * size}.get(how.elements, size)
    copies = COPIES * (3 if how.damped else 1)
    rows = max(1, room(jump) // (copies * width * jump.element_size()))
    sequences = min(batch, rows)
    length = max(1, rows // sequences)
    if backwards:
        windows = [(max(0, last - length), last) for last in range(steps - 1, 0, -length)]
    else:
        windows = [(first, min(steps, first + length)) for first in range(1, steps, length)]
    for first in range(0, batch, sequences):
        yield slice(first, min(batch, first + sequences)), windows


def _scan(
    how: Linearization, elements: Tensor, sources: Tensor, start: Tensor, backwards: bool, incoming: Tensor | None
) -> Tensor:
    structure = _structure(how)
    if incoming is not None:
        serial = how.precision == "full" and (how.method == "auto" or how.levels == 0)
        if serial and native.supports(sources):
            return native.scan(elements, sources, start, structure, backwards, backwards, incoming)
        sources = sources + (incoming.unsqueeze(-2) @ elements).squeeze(-2)
    if structure == "block":
        sources, start = (t.unflatten(-1, (2, -1)) for t in (sources, start))
    given = sources.dtype
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}.get(how.precision, given)
    with _tf32(how.precision == "tf32"):
        found = linear_scan(
            elements.to(dtype), sources.to(dtype), start.to(dtype), backwards,
            transpose=backwards, structure=structure, method=how.method, levels=how.levels,
        )  # fmt: skip
    return (found.flatten(-2) if structure == "block" else found).to(given)


def _damped(
    how: Linearization, elements: Tensor, sources: Tensor, damping: Tensor, belief: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    structure = _structure(how)
    if structure == "block":
        sources = sources.unflatten(-1, (2, -1))
    found, belief = damped_scan(elements, sources, damping.to(sources.dtype), structure, belief)
    return found.flatten(-2) if structure == "block" else found, belief


def _structure(how: Linearization) -> Structure:
    return "dense" if how.elements == "dense" else "block" if how.elements == "block" else "diagonal"


@contextmanager
def _tf32(wanted: bool) -> Iterator[None]:
    """Products of matrices in tf32 on a GPU, if wanted."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = wanted or before
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _refuse_bad_elements(elements: Tensor, previous: Tensor, sources: Tensor, first: int, sequences: slice) -> None:
    """Name the first step that is finite and has a Jacobian that is not."""
    fine = previous.isfinite().all(-1) & sources.isfinite().all(-1)
    bad = (fine & ~elements.flatten(2).isfinite().all(-1)).nonzero()
    if len(bad):
        step, sequence = bad[0].tolist()
        raise ValueError(
            f"the cell's Jacobian is not finite at step {first + step} of sequence {sequences.start + sequence}, where "
            "its state and its result are. Make the cell differentiable there (sqrt, norm and division at 0 are the "
            "usual causes), or use a solver that needs no Jacobian: 'jacobi', 'picard' or 'sequential'"
        )
