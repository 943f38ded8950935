"""`unroll`: any cell over a sequence, parallel in time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from timeloom.cells.generic import GenericCell, State
from timeloom.distributed.context import time_group
from timeloom.distributed.planning import plan_over_ranks
from timeloom.distributed.solve import Over, run_over_ranks
from timeloom.distributed.span import agree
from timeloom.eager import eager
from timeloom.problem import Recurrence
from timeloom.recurrence import run
from timeloom.report import SolveReport
from timeloom.solvers.auto import Memory
from timeloom.solvers.base import Solver
from timeloom.solvers.planning import resolve
from timeloom.solvers.sequential import Sequential

_memories: WeakKeyDictionary[Any, Memory] = WeakKeyDictionary()


@eager
def unroll(
    cell: Callable[[Any, Tensor], Any], h0: State, xs: Tensor, solver: str | Solver = "auto"
) -> tuple[State, SolveReport]:
    """Run `h[t] = cell(h[t-1], x[t])` over a sequence; differentiable in h0, xs and everything the cell holds.

    cell: a function or nn.Module, batched over rows: h `(N, ...)` (or a tuple of such) and x `(N, ...)` to the next h.
        Rows must not look at each other, and the same input must give the same output (`check_cell` tests both).
    h0: initial state, `(B, n)`, or a tuple of such.
    xs: inputs, `(T, B, ...)`.
    Returns the states after every step, `(T, B, n)` (or a tuple), and the report.
    """
    resolved, group = resolve(solver), time_group()
    _check(cell, h0, xs)
    generic = GenericCell(cell, h0, xs.shape[2:])
    if isinstance(resolved, Sequential) and group is None:
        return _sequential(generic, h0, xs)
    reports: list[SolveReport] = []
    problem = Recurrence(generic, xs.flatten(2) if xs.dim() > 2 else xs.unsqueeze(-1), generic.pack(h0))
    if group is not None:
        memories, name = group.memories(cell), f"a cell with states of {generic.parts}"
        span = agree(group, problem.u, None, None, name, torch.is_grad_enabled(), resolved, memories)
        memory = memories.setdefault(0, Memory())
        over = Over(span, False, 0)
        plan = plan_over_ranks(resolved, problem.detach(), memory.forward, span, over.line(problem.batch))
        states, _ = run_over_ranks(problem, resolved, memory, reports.append, over, plan)
        return generic.unpack(states), reports[0]
    states, _ = run(problem, resolved, _memory_of(cell), reports.append)
    return generic.unpack(states), reports[0]


def _sequential(cell: GenericCell, h0: State, xs: Tensor) -> tuple[State, SolveReport]:
    """The plain loop, on autograd's tape: differentiable any number of times."""
    state, states = cell.pack(h0), []
    for x in xs.unbind(0):
        state = cell.step(state, x)
        states.append(state)
    report = SolveReport.sequential(len(xs), "sequential, as asked for")
    return cell.unpack(torch.stack(states)), report


def _memory_of(cell: Any) -> Memory:
    """What was learned on this cell, as long as it lives; nothing where it cannot be kept."""
    try:
        return _memories.setdefault(cell, Memory())
    except TypeError:
        return Memory()


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
        if (part.dtype, part.device) != (parts[0].dtype, parts[0].device):
            raise ValueError("the parts of h0 must agree in dtype and device")
    if not parts[0].is_floating_point():
        raise TypeError(f"h0 must be floating point, got {parts[0].dtype}")
    if xs.device != parts[0].device:
        raise ValueError(f"xs is on {xs.device}, h0 on {parts[0].device}: they must agree")
