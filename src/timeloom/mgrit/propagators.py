"""Φ of every coarse level: one coarse step for each interval, evaluated for many intervals as one batch.

Intervals are in marching order, forward or backward in time; interval i of a level leads from its point i to i + 1. A
coarse level is made from the next finer one alone, by merging its spans, inputs and everything else. A level that goes
`onward` has one more interval than lie between its points: the last one leads to a point on another rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from timeloom.cells.base import Cell
from timeloom.cells.coarse import Coarse, March, Pull, UsersOwn, geometric
from timeloom.mgrit.grid import Coarsening
from timeloom.problem import Recurrence


class Propagator(Protocol):
    """Φ of one level."""

    @property
    def span(self) -> Tensor:
        """Number of fine steps in every interval, `(N, B, 1)`, in the dtype in which the level is solved."""

    def __call__(self, at: slice, state: Tensor) -> Tensor:
        """Φ of the intervals `at` applied to their states `(k, B, S)`."""

    def source(self) -> Tensor | None:
        """The term that every interval adds to Φ, `(N, B, S)`: the right-hand side of a first guess; None for zero."""

    def marching(self, added: Tensor) -> March | None:
        """A sequential run of the first N intervals, adding `added` `(N, B, S)` after each; None if kernels cannot."""

    def joined(self, gather: Gather, first: Tensor, heads: Tensor) -> Propagator:
        """Φ from rank to rank, where each rank has one interval, and `gather` collects those of all ranks.

        first: the start of each sequence, `(B, S)`. heads: whether a sequence starts where an interval ends,
        `(R − 1, B, 1)`.
        """

    def merged(self, factor: int, kind: str) -> Propagator:
        """Φ of the next coarser level; `kind` says how inputs are merged, as `inputs` in `Coarsening`."""


Gather = Callable[[Tensor], Tensor]
"""`gather(values)`: from the values of each interval, those of the last interval on every rank but the last:
`(R − 1, B, ·)`."""


@dataclass(frozen=True)
class Forward:
    """Coarse steps of the states: `Φ(h) = coarse(h; inputs, span)`, from `origin` if the interval has a reset."""

    coarse: Coarse
    span: Tensor
    inputs: Tensor
    resets: Tensor | None
    origin: Tensor
    onward: bool = False

    @staticmethod
    def of(problem: Recurrence, coarsening: Coarsening, onward: bool = False) -> list[Propagator]:
        cell = _wide(problem.cell)
        span, inputs, resets = _chunks(problem, coarsening, cell)
        origin = problem.initial.to(span.dtype)
        stop = None if onward else -1
        resets = None if resets is None else resets[:stop]
        level = Forward(_coarse_step(cell, coarsening), span[:stop], inputs[:stop], resets, origin, onward)
        return _and_coarser(level, coarsening)

    def merged(self, factor: int, kind: str) -> Forward:
        """Φ of the next coarser level."""
        span, inputs = _merge(self.span, self.inputs, factor, kind, 0, self.onward)
        resets = None if self.resets is None else _grouped(self.resets, factor, self.onward).any(1)
        return Forward(self.coarse, span, inputs, resets, self.origin, self.onward)

    def __call__(self, at: slice, state: Tensor) -> Tensor:
        if self.resets is not None:
            state = torch.where(self.resets[at], self.origin, state)
        flat = (value.flatten(0, 1) for value in (state, self.inputs[at], self.span[at]))
        return self.coarse.step(*flat).view_as(state)

    def source(self) -> None:
        """None: the inputs are part of the coarse step."""

    def marching(self, added: Tensor) -> March | None:
        if self.resets is not None:
            return None
        return self.coarse.marching(self.inputs[: len(added)], self.span[: len(added)], added)

    def joined(self, gather: Gather, first: Tensor, heads: Tensor) -> Forward:
        resets = None if self.resets is None else gather(self.resets)
        return replace(self, span=gather(self.span), inputs=gather(self.inputs), resets=resets, onward=False)


@dataclass(frozen=True)
class Adjoint:
    """Coarse steps of the adjoints, which are linear: `Φ(λ) = (∂coarse/∂h)ᵀ λ` at the states where intervals begin.

    An interval with a reset passes nothing on; one in which a sequence ends passes on `final`, the known gradient
    there. `incoming` is the sum of the loss's own gradients inside each interval. Only the first guess needs it: from
    then on the fine grid's residual contains them exactly.
    """

    cell: Cell
    coarse: Coarse
    span: Tensor
    inputs: Tensor
    state: Tensor
    incoming: Tensor | None
    resets: Tensor | None
    ends: Tensor | None
    final: Tensor
    onward: bool = False

    @staticmethod
    def of(
        problem: Recurrence,
        states: list[Tensor],
        incoming: Tensor | None,
        final: Tensor,
        anchors: Tensor,
        coarsening: Coarsening,
        onward: bool = False,
    ) -> list[Propagator]:
        chunk, cell = coarsening.factors[0], _wide(problem.cell)
        span, inputs, resets = _chunks(problem, coarsening, cell)
        begins = torch.cat([part[: problem.steps : chunk] for part in states], -1).to(span.dtype)
        sources = None
        if incoming is not None:
            sources = pad(_sums(incoming, problem, chunk), (0, cell.size - incoming.shape[-1])).to(span.dtype)
        stop = None if onward else -1
        span, inputs, begins = (value.flip(0)[:stop] for value in (span, inputs, begins))
        sources, resets = (None if value is None else value.flip(0)[:stop] for value in (sources, resets))
        ends = None
        if problem.lengths is not None:  # ends on other ranks are theirs to handle
            ends = pad(anchors[1:], (0, 0, 0, int(onward))).unsqueeze(-1).to(begins.device)
        step = _coarse_step(cell, coarsening)
        level = Adjoint(cell, step, span, inputs, begins, sources, resets, ends, final.to(span.dtype), onward)
        return _and_coarser(level, coarsening)

    def merged(self, factor: int, kind: str) -> Adjoint:
        """Φ of the next coarser level."""
        span, inputs = _merge(self.span, self.inputs, factor, kind, -1, self.onward)
        incoming = None if self.incoming is None else _grouped(self.incoming, factor, self.onward, none=True).sum(1)
        begins = _grouped(self.state, factor, self.onward)[:, -1]
        resets, ends = (
            None if mark is None else _grouped(mark, factor, self.onward).any(1) for mark in (self.resets, self.ends)
        )
        return Adjoint(self.cell, self.coarse, span, inputs, begins, incoming, resets, ends, self.final, self.onward)

    @cached_property
    def _pull(self) -> Pull:
        return self.coarse.linearise(self.state, self.inputs, self.span)

    def __call__(self, at: slice, state: Tensor) -> Tensor:
        back = self._pull(at, state)
        if self.resets is not None:
            back = back.masked_fill(self.resets[at], 0)
        if self.ends is None:
            return back
        back = torch.where(self.span[at] == 0, state, back)  # an empty interval is the identity
        return torch.where(self.ends[at], self.final, back)

    def source(self) -> Tensor | None:
        """The mean incoming gradient through one step, and from there through the decay alone: `(1 + d + …) Jᵀ ḡ`."""
        if self.incoming is None:
            return None
        rows = (self.state.flatten(0, 1), self.inputs.flatten(0, 1))
        mean = (self.incoming / self.span.clamp(min=1)).flatten(0, 1)
        decay, span = self.cell.decay(*rows).clamp(-1, 1), self.span.flatten(0, 1)
        total = geometric(decay, decay.pow(span), span)
        source = (total * self.cell.vjp(*rows, mean)[0]).view_as(self.state)
        return source if self.ends is None else source.masked_fill(self.ends, 0)

    def marching(self, added: Tensor) -> March | None:
        if self.resets is not None or self.ends is not None:
            return None
        state, inputs, span = (value[: len(added)] for value in (self.state, self.inputs, self.span))
        return self.coarse.marching_back(state, inputs, span, added)

    def joined(self, gather: Gather, first: Tensor, heads: Tensor) -> Adjoint:
        incoming, resets, ends = (
            None if value is None else gather(value) for value in (self.incoming, self.resets, self.ends)
        )
        return replace(
            self,
            span=gather(self.span),
            inputs=gather(self.inputs),
            state=gather(self.state),
            incoming=incoming,
            resets=resets,
            ends=None if ends is None else ends | heads,
            final=first.to(self.final.dtype),
            onward=False,
        )


def _and_coarser(first: Propagator, coarsening: Coarsening) -> list[Propagator]:
    """Φ of level 1 and, made from it, of all coarser levels."""
    levels = [first]
    for factor in coarsening.factors[1:]:
        levels.append(levels[-1].merged(factor, coarsening.inputs))
    return levels


def _wide(cell: Cell) -> Cell:
    """The cell in float64, if it exposes its weights.

    A gate to the power of a long span magnifies its rounding by that span, and the full approximation scheme takes
    differences of such steps.
    """
    return cell.with_weights(tuple(weight.double() for weight in cell.weights)) if cell.weights else cell


def _coarse_step(cell: Cell, coarsening: Coarsening) -> Coarse:
    return UsersOwn(cell, coarsening.coarse) if callable(coarsening.coarse) else cell.coarse(coarsening.coarse)


def _chunks(problem: Recurrence, coarsening: Coarsening, cell: Cell) -> tuple[Tensor, Tensor, Tensor | None]:
    """The steps in each chunk `(C, B, 1)`, its coarse inputs `(C, B, K)`, and whether it has a reset `(C, B, 1)`."""
    chunk, u = coarsening.factors[0], problem.u
    begins = torch.arange(0, problem.steps, chunk, device=u.device).unsqueeze(-1)
    inside = (problem.ends_on_device() - begins).clamp(0, chunk)
    dtype = cell.weights[0].dtype if cell.weights else problem.initial.dtype
    span = inside.unsqueeze(-1).to(dtype)
    if coarsening.inputs == "mean" and u.is_floating_point():
        inputs = _sums(u, problem, chunk) / span.clamp(min=1)
    else:  # the first step's; whole numbers (tokens) have no mean
        inputs = u[::chunk]
    inputs = inputs.to(dtype) if u.is_floating_point() else inputs
    if problem.resets is None:
        return span, inputs, None
    return span, inputs, _sums(problem.resets.unsqueeze(-1).to(span.dtype), problem, chunk) > 0


def _sums(values: Tensor, problem: Recurrence, chunk: int) -> Tensor:
    """Sums over the steps of each chunk that lie inside their sequences: `(T, B, ·)` to `(C, B, ·)`."""
    if problem.lengths is not None:
        time = torch.arange(problem.steps, device=values.device).unsqueeze(-1)
        values = torch.where((time < problem.ends_on_device()).unsqueeze(-1), values, 0)
    whole = problem.steps // chunk * chunk
    sums = values[:whole].unflatten(0, (-1, chunk)).sum(1) if whole else values[:0]
    return sums if whole == problem.steps else torch.cat([sums, values[whole:].sum(0, keepdim=True)])


def _merge(span: Tensor, inputs: Tensor, factor: int, kind: str, earliest: int, onward: bool) -> tuple[Tensor, Tensor]:
    """Spans and inputs of `factor` intervals merged into one; `earliest` is the index of the first of them in time."""
    spans, groups = _grouped(span, factor, onward, none=True), _grouped(inputs, factor, onward)
    merged = spans.sum(1)
    if kind == "inject" or not inputs.is_floating_point():
        return merged, groups[:, earliest]
    return merged, (groups * spans).sum(1) / merged.clamp(min=1)


def _grouped(values: Tensor, factor: int, onward: bool, none: bool = False) -> Tensor:
    """Group `(N, ...)` into `(N // factor, factor, ...)`; the remainder is dropped.

    If the level leads onward, the remainder forms one more group, padded by its last value, or by zeros (`none`).
    """
    missing = -len(values) % factor if onward else 0
    if missing:
        filler = values[-1:].expand(missing, *values.shape[1:])
        values = torch.cat([values, torch.zeros_like(filler) if none else filler])
    groups = len(values) // factor
    return values[: groups * factor].reshape(groups, factor, *values.shape[1:])
