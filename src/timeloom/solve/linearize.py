"""Single steps linearised: the elements of the linear recurrence that corrects all states at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from timeloom.buffers import all_finite, room
from timeloom.problem import Recurrence
from timeloom.scan import cpu, linear_scan
from timeloom.scan.elements import Structure, apply, compose, transpose
from timeloom.scan.kalman import damped_scan
from timeloom.scan.linear import Method
from timeloom.torch_state import tf32

Elements = Literal["zero", "identity", "diagonal", "block", "dense"]
Precision = Literal["full", "float32", "tf32", "bfloat16"]

COPIES = 6
"""Tensors of the elements' size that are alive at once while a window is linearised and scanned."""


RUN_AWAY = 0.25
"""States beyond the dtype's largest number to this power come from an iteration that diverges, not from the network.
Derivatives such as that of a norm hold cubes of them, which may overflow."""


@dataclass(frozen=True)
class Linearization:
    """How a jump at one state moves the states behind it, `δ[t] = A[t-1] δ[t-1] + jump[t]`, for chunks of one step.

    elements: the approximation A of a step's Jacobian: zero, the identity, its diagonal, the diagonals of its 2 × 2
        parts, or the full matrix.
    probes: number of random vectors that estimate the diagonal; None computes it exactly.
    damped: whether the recurrence is damped, more and more while the residual grows (Levenberg–Marquardt).
    precision: of elements and scan. Residuals are never rounded, so neither is the result.
    method, levels: options of `linear_scan`.
    """

    elements: Elements
    probes: int | None = None
    damped: bool = False
    precision: Precision = "full"
    method: Method = "auto"
    levels: int | None = None


Window = Callable[[int, int, slice, Tensor], Tensor]
"""`window(first, last, sequences, states)`: elements of the steps first ≤ t < last of some sequences."""


def window_of(problem: Recurrence, how: Linearization, passing: bool = False, inner: bool = False) -> Window:
    """A function that linearises a window of steps at given previous states `(last − first, B, S)`.

    The elements of steps past the end of a sequence are zero, or the identity if `passing`. If `inner`, the element of
    its last step is zero, too: the state after it is not solved for, and may not be finite.
    """
    less = 1 if inner else 0

    def window(first: int, last: int, sequences: slice, previous: Tensor) -> Tensor:
        u, initial = problem.u[first:last, sequences], problem.initial[sequences]
        dead = _not_carried(problem, first, last, sequences, less)
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
        elements = elements.view(*u.shape[:2], *elements.shape[1:])  # splits the rows, whatever their memory layout
        if dead is None:
            return elements
        elements = elements.masked_fill(dead.view(*dead.shape, *[1] * (elements.dim() - 2)), 0)
        return elements + _passed(problem, how, first, last, sequences) if passing else elements

    return window


def _passed(problem: Recurrence, how: Linearization, first: int, last: int, sequences: slice) -> Tensor:
    """The identity at steps past a sequence's end, zero elsewhere: elements `(last − first, B, ...)`."""
    size, like = problem.cell.size, problem.initial
    unit = torch.ones(size, dtype=like.dtype, device=like.device)
    if how.elements == "dense":
        unit = unit.diag()
    elif how.elements == "block":
        unit = torch.eye(2, dtype=like.dtype, device=like.device).unsqueeze(-1).expand(2, 2, size // 2)
    past = _past(problem, first, last, sequences).to(like.dtype)
    return past.view(*past.shape, *[1] * unit.dim()) * unit


def _past(problem: Recurrence, first: int, last: int, sequences: slice, less: int = 0) -> Tensor:
    """Mask of the steps past the end of a sequence that is taken to be `less` steps shorter, `(last − first, B)`."""
    steps = torch.arange(first + less, last + less, device=problem.u.device)
    return steps[:, None] >= problem.ends_on_device()[sequences]


def _not_carried(problem: Recurrence, first: int, last: int, sequences: slice, less: int) -> Tensor | None:
    """Mask of the steps that begin with a reset or lie past a sequence's end, `(last − first, B)`, or None."""
    dead = None if problem.resets is None else problem.resets[first:last, sequences]
    if problem.lengths is not None:
        past = _past(problem, first, last, sequences, less)
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
    """The corrections `δ` `(T, B, S)` from the jumps `(T, B, S)` at all states, both in time order.

    Forward `δ[t] = A[t-1] δ[t-1] + jump[t]`; backwards `δ[t-1] = A[t]ᵀ (δ[t] + incoming[t]) + jump[t-1]`, where
    `incoming` requires dense elements. Elements are computed and used window by window, as large as memory allows; each
    window starts from the last correction of the one before.
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
        for first, last in windows:  # states to correct, by the steps before (backwards: after) them
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
            if not backwards and not all_finite(found):  # gradients may be infinite, as autograd's own are then
                _refuse_bad_elements(elements, previous, sources, first + shift, sequences)
            delta[first:last, sequences] = found
    return delta


def leaving(
    how: Linearization, window: Window, delta: Tensor, states: Tensor, backwards: bool = False
) -> tuple[Tensor, Tensor] | None:
    """The effect of moves `delta` `(T, B, S)` of all states behind the last step (backwards: before the first).

    Returns the move of the state there, `(B, S)`, and the transfer over all steps, which is the product of all elements
    `(B, ...)`. None if the elements are zero.
    """
    if how.elements == "zero":
        return None
    edge, shift = (0, 1) if backwards else (len(delta) - 1, -1)
    if how.elements == "identity":
        return delta[edge], torch.ones_like(delta[edge])
    structure, pushed, products = _structure(how), [], []
    for sequences, windows in _windows(how, delta, backwards):
        product = None
        for first, last in [(first + shift, last + shift) for first, last in windows] + [(edge, edge + 1)]:
            elements = window(first, last, sequences, states[first:last, sequences])
            elements = transpose(elements.flip(0), structure) if backwards else elements
            whole = _product(elements, structure)
            product = whole if product is None else compose(whole, product, structure)
        assert product is not None
        moves = delta[edge, sequences]
        moves = moves.unflatten(-1, (2, -1)) if structure == "block" else moves
        pushed.append(apply(elements[0], moves, structure).flatten(1))
        products.append(product)
    return torch.cat(pushed), torch.cat(products)


def _product(elements: Tensor, structure: Structure) -> Tensor:
    """The product of all elements `(T, B, ...)`, of which the first is applied first."""
    while len(elements) > 1:
        paired = compose(elements[1::2], elements[: len(elements) - 1 : 2], structure)
        elements = torch.cat([paired, elements[-1:]]) if len(elements) % 2 else paired
    return elements[0]


def _windows(how: Linearization, jump: Tensor, backwards: bool) -> Iterator[tuple[slice, list[tuple[int, int]]]]:
    """Slices of the batch, each with windows of time in scan order, so small that their elements fit into memory."""
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
        if serial and cpu.supports(sources):
            return cpu.scan(elements, sources, start, structure, backwards, backwards, incoming)
        sources = sources + (incoming.unsqueeze(-2) @ elements).squeeze(-2)
    if structure == "block":
        sources, start = (t.unflatten(-1, (2, -1)) for t in (sources, start))
    given = sources.dtype
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}.get(how.precision, given)
    with tf32.products(rounded=True) if how.precision == "tf32" else nullcontext():
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
    given = sources.dtype
    dtype = given if given.itemsize > 2 else torch.float32  # torch has no factorisations in half precision
    found, belief = damped_scan(elements.to(dtype), sources.to(dtype), damping.to(dtype), structure, belief)
    return (found.flatten(-2) if structure == "block" else found).to(given), belief


def _structure(how: Linearization) -> Structure:
    return "dense" if how.elements == "dense" else "block" if how.elements == "block" else "diagonal"


def _refuse_bad_elements(elements: Tensor, previous: Tensor, sources: Tensor, first: int, sequences: slice) -> None:
    """Raise for the first step with a finite state and result whose Jacobian is not finite.

    Steps at huge states are passed over: in an iteration that diverges, squares of states overflow even in a sound
    cell, and the driver ends it.
    """
    fine = (previous.abs().amax(-1) < torch.finfo(previous.dtype).max ** RUN_AWAY) & sources.isfinite().all(-1)
    bad = (fine & ~elements.flatten(2).isfinite().all(-1)).nonzero()
    if len(bad):
        step, sequence = bad[0].tolist()
        raise ValueError(
            f"the cell's Jacobian is not finite at step {first + step} of sequence {sequences.start + sequence}, where "
            "its state and its result are. Make the cell differentiable there (sqrt, norm and division at 0 are the "
            "usual causes), or use a solver that needs no Jacobian: 'jacobi', 'picard' or 'sequential'"
        )
