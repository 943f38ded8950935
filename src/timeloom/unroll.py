"""`unroll`: any cell over a sequence, parallel in time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from timeloom.auto.layer_experience import LayerExperience
from timeloom.cells.generic import GenericCell, State
from timeloom.compile.call import run_fused, telling
from timeloom.compile.watch import kept_with
from timeloom.distributed.context import time_group
from timeloom.distributed.solve import Ranks, run_over_ranks
from timeloom.distributed.span import agree
from timeloom.nn.steady_cells import KnownCalls, Run, kind_of
from timeloom.problem import Recurrence
from timeloom.report import SolveReport
from timeloom.solve.recurrence import Seen, on_tape, run
from timeloom.solve.steady_cell import SteadyCell
from timeloom.solve.warm_starts import GivenStates, Guess, WarmBatch, check_batch, check_states
from timeloom.solvers.base import Solver, resolve
from timeloom.torch_state.eager import eager
from timeloom.torch_state.wrapped import why_step_by_step

_experiences: WeakKeyDictionary[Any, dict[Any, LayerExperience]] = WeakKeyDictionary()


@eager
def unroll(
    cell: Callable[[Any, Tensor], Any],
    h0: State,
    xs: Tensor,
    solver: str | Solver = "auto",
    guess: State | WarmBatch | None = None,
) -> tuple[State, SolveReport]:
    """Run `h[t] = cell(h[t-1], x[t])` over a sequence; differentiable in h0, xs and everything the cell holds.

    cell: a function or nn.Module, batched over rows: h `(N, ...)` (or a tuple of such) and x `(N, ...)` to the next h.
        Rows must be independent, and the same input must give the same output (`check_cell` tests both).
    h0: initial state, `(B, n)`, or a tuple of such.
    xs: inputs, `(T, B, ...)`.
    guess: initial guess of the states after every step, `(T, B, n)` (or a tuple), or a batch of `WarmStarts`.
        It changes how many sweeps are needed, not the result.
    Returns the states after every step, `(T, B, n)` (or a tuple), and the report.
    """
    resolved, group = resolve(solver), time_group(cell)
    calls = None if group is not None or guess is not None else _known_calls(cell)
    kind = None if calls is None else kind_of(xs, h0, solver)
    steady = None if calls is None or kind is None else calls.find(kind, [cell])
    replayed = None if steady is None else _again(steady[0], h0, xs)
    if replayed is not None:
        return replayed
    _check(cell, h0, xs)
    generic = GenericCell(cell, h0, xs.shape[2:])
    begin = None if guess is None else _guess(generic, guess, xs)
    reports: list[SolveReport] = []
    problem = Recurrence(generic, xs.flatten(2) if xs.dim() > 2 else xs.unsqueeze(-1), generic.pack(h0))
    if group is not None:
        if begin is not None:
            raise NotImplementedError("over many ranks there is no guess=: leave it out")
        known, name = group.experiences(cell), f"a cell with states of {generic.parts}"
        span = agree(group, problem.u, None, None, name, torch.is_grad_enabled(), resolved, known)
        experience, ranks = known.setdefault(0, LayerExperience()), Ranks(span, False, 0)
        plan = resolved.plan_over_ranks(problem.detach(), experience.forward, span.sizes)
        states, _ = run_over_ranks(problem, resolved, experience, reports.append, ranks, plan)
        return generic.shaped(states), reports[0]
    reason = None if resolved.on_tape else why_step_by_step(xs, problem.initial)
    if reason is not None:
        states, _ = on_tape(problem, reports.append, reason)
    elif resolved.on_tape:
        states, _ = run(problem, resolved, _experience_of(cell), reports.append, begin)
    else:
        solve = partial(_run, cell, resolved, begin, reports)
        states, _ = run_fused(generic, problem, xs, solve, resolved.why_not_fused)
        if calls is not None and kind is not None:
            calls.settle(kind, [Run(generic, problem, xs, _experience_of(cell))], resolved, shown=None, ends=False)
    return generic.shaped(states), reports[0]


def _known_calls(cell: Any) -> KnownCalls | None:
    """The remembered calls of a module, of its method or of a function, stored on it; None for any other callable."""
    owner, method = (cell.__self__, cell.__func__) if isinstance(cell, MethodType) else (cell, None)
    if not isinstance(owner, nn.Module | FunctionType):
        return None
    kept: dict[Any, KnownCalls] = kept_with(owner, "_timeloom_calls", dict)
    return kept.setdefault(method, KnownCalls())


def _again(steady: SteadyCell, h0: State, xs: Tensor) -> tuple[State, SolveReport] | None:
    """Run the call as a replay alone; None if it cannot be replayed or misses its certificate."""
    call = steady.call()
    states = steady.run(call, xs, steady.cell.pack(h0))
    return None if states is None or call.certify() is None else (steady.cell.shaped(states), call.report)


def _run(
    cell: Any, solver: Solver, guess: Guess | None, reports: list[SolveReport], problem: Recurrence, told: str,
    seen: Seen | None,
) -> tuple[tuple[Tensor, ...], Tensor]:  # fmt: skip
    """Solve and append the report; `told` is the sentence on whether kernels were generated for the cell."""
    reports.clear()
    return run(problem, solver, _experience_of(cell), telling(reports.append, told), guess, seen=seen)


def _guess(cell: GenericCell, guess: State | WarmBatch, xs: Tensor) -> Guess:
    if isinstance(guess, WarmBatch):
        check_batch(guess, xs.shape[1])
        return guess
    parts = check_states(guess, tuple((*xs.shape[:2], *shape) for shape in cell.shapes), cell.is_tuple)
    return GivenStates(torch.cat([part.reshape(*xs.shape[:2], -1) for part in parts], -1))


def _experience_of(cell: Any) -> LayerExperience:
    """What earlier calls of this cell showed, kept while the cell lives; an empty experience if it cannot be kept.

    Each lookup of a bound method makes a new object, so a method is identified by its owner and its function.
    """
    owner, method = (cell.__self__, cell.__func__) if isinstance(cell, MethodType) else (cell, None)
    try:
        return _experiences.setdefault(owner, {}).setdefault(method, LayerExperience())
    except TypeError:
        return LayerExperience()


def _check(cell: Any, h0: Any, xs: Any) -> None:
    if not callable(cell):
        raise TypeError(f"cell must be a function or module f(h, x) -> h, got {type(cell).__name__}")
    parts = h0 if isinstance(h0, tuple) else (h0,)
    if not parts or not all(isinstance(part, Tensor) for part in parts):
        raise TypeError(f"h0 must be a Tensor or a tuple of Tensors, got {type(h0).__name__}")
    if not isinstance(xs, Tensor):
        raise TypeError(f"xs must be a Tensor of shape (T, B, ...), got {type(xs).__name__}")
    if xs.dim() < 2:
        raise ValueError(f"xs must have shape (T, B, ...), got {tuple(xs.shape)}")
    if len(xs) == 0:
        raise ValueError(f"xs has no time steps: its shape is {tuple(xs.shape)}, expected (T, B, ...) with T ≥ 1")
    for part in parts:
        if part.dim() < 1 or len(part) != xs.shape[1]:
            raise ValueError(f"h0 has shape {tuple(part.shape)}, expected ({xs.shape[1]}, ...) for the batch of xs")
        if 0 in part.shape[1:]:
            raise ValueError(f"h0 has shape {tuple(part.shape)}: a state needs at least one number")
        if (part.dtype, part.device) != (parts[0].dtype, parts[0].device):
            raise ValueError("the parts of h0 must agree in dtype and device")
    if not parts[0].is_floating_point():
        raise TypeError(f"h0 must be floating point, got {parts[0].dtype}")
    if xs.device != parts[0].device:
        raise ValueError(f"xs is on {xs.device}, h0 on {parts[0].device}: they must agree")
