"""A solved recurrence on autograd's tape: what plugs the backward solve into autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from timeloom.cells.base import Cell
from timeloom.cells.generic import GenericCell
from timeloom.problem import Recurrence
from timeloom.report import SolveReport
from timeloom.solve.backward import previous_states, weight_grads_of
from timeloom.torch_state.autocast import without_autocast
from timeloom.torch_state.eager import eager

Note = Callable[[SolveReport], None]
"""Told the backward solve's report."""
Adjoint = Callable[[Recurrence, list[Tensor], Tensor | None, Tensor | None], tuple[Tensor, Tensor, SolveReport]]
"""`solve_adjoint` with a plan, or what stands in for it over many ranks."""


class _Solved(torch.autograd.Function):
    """A solved recurrence on autograd's tape: what the backward pass needs, saved so that autograd can guard and
    free it.
    """

    @staticmethod
    def keep(
        ctx: Any, problem: Recurrence, states: list[Tensor], solve: Adjoint, note: Note, shared: Tensor | None
    ) -> None:
        ctx.set_materialize_grads(False)
        ctx.lengths, ctx.resets, ctx.solve, ctx.note = problem.lengths, problem.resets, solve, note
        ctx.cell = problem.cell.with_weights(())
        ctx.counts = (len(problem.cell.weights), len(states))
        ctx.save_for_backward(problem.u, problem.initial, shared, *problem.cell.weights, *states)

    @staticmethod
    def recall(ctx: Any) -> tuple[Recurrence, list[Tensor]]:
        refuse_second_order()
        u, initial, _, *rest = ctx.saved_tensors
        weights, states = rest[: ctx.counts[0]], rest[ctx.counts[0] :]
        return Recurrence(ctx.cell.with_weights(tuple(weights)), u, initial, ctx.lengths, ctx.resets), list(states)


class HandWritten(_Solved):
    """States of a cell with hand-written derivatives, as a function of its inputs, initial state and weights.

    Returns the output part `(T, B, parts[0])` and the final state `(B, S)`.
    """

    @staticmethod
    def forward(
        ctx: Any, problem: Recurrence, states: list[Tensor], final: Tensor, solve: Adjoint, note: Note, *_: Tensor
    ) -> tuple[Tensor, Tensor]:
        outputs, shared = output_of(states)
        _Solved.keep(ctx, problem, states, solve, note, shared)
        return outputs, final

    @staticmethod
    @eager
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        problem, states = _Solved.recall(ctx)
        with without_autocast(problem.u.device):  # it may be on around the backward pass
            return HandWritten.gradients(ctx, problem, states, *grads)

    @staticmethod
    def gradients(
        ctx: Any, problem: Recurrence, states: list[Tensor], incoming: Tensor | None, final_grad: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        gate_grads, initial_grad, report = ctx.solve(problem, states, incoming, final_grad)
        ctx.note(report)
        cell = problem.cell
        weight_grads: tuple[Tensor | None, ...] = (None,) * len(cell.weights)
        if any(ctx.needs_input_grad[7:]):
            weight_grads = weight_grads_of(problem, states, gate_grads)
        return None, None, None, None, None, cell.input_grads(gate_grads), initial_grad, *weight_grads


class AttachAdjoint(_Solved):
    """Identity on one differentiated evaluation of all steps; its backward turns gradients on states into adjoints.

    The evaluation was made at detached previous states. Given the adjoint of each state rather than the
    loss's own gradient, autograd of that evaluation delivers every input's and parameter's gradient at once.
    """

    @staticmethod
    def forward(
        ctx: Any, problem: Recurrence, states: list[Tensor], final: Tensor, solve: Adjoint, note: Note, *_: Tensor
    ) -> tuple[Tensor, Tensor]:
        outputs = torch.cat([part[1:] for part in states], -1)
        _Solved.keep(ctx, problem, states, solve, note, None)
        return outputs, final

    @staticmethod
    @eager
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        problem, states = _Solved.recall(ctx)
        adjoints, initial_grad, report = ctx.solve(problem, states, *grads)
        ctx.note(report)
        return None, None, None, None, None, adjoints.flatten(0, 1), initial_grad


def attach(
    problem: Recurrence, states: list[Tensor], final: Tensor, solve: Adjoint, note: Note, u: Tensor, initial: Tensor,
    cell: Cell,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Outputs `(T, B, ·)` and final state `(B, S)` on autograd's tape.

    `problem` is what was solved, detached, with its `states` and `final` state; `solve` is to do so backward. `u`,
    `initial` and `cell` are the live ones. For a generic cell the outputs are whole states.
    """
    if isinstance(cell, GenericCell):
        previous = torch.cat(previous_states(problem, states), -1).flatten(0, 1)
        live = (cell.step(previous, u.flatten(0, 1)), initial)
        outputs, final = AttachAdjoint.apply(problem, states, final, solve, note, *live)
    else:
        outputs, final = HandWritten.apply(problem, states, final, solve, note, u, initial, *cell.weights)
    return outputs, final


def refuse_second_order(instead: str = "solver='sequential', without lengths= or resets=") -> None:
    """For a backward pass that is itself being recorded; `instead` is what has second-order gradients."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "timeloom's parallel-in-time gradients cannot be differentiated again (create_graph=True): the solves "
            f"behind them are not on the tape. For second-order gradients use {instead}."
        )


def output_of(states: list[Tensor]) -> tuple[Tensor, Tensor | None]:
    """The states after every step as an output, and that once more if it shares their memory, for autograd to guard.

    Torch lets users write into what a GRU or RNN returns on a CPU, so there it is a copy. An LSTM's, and all on a GPU,
    are not to be written into before the backward pass, in torch neither.
    """
    after = states[0][1:]
    if after.device.type == "cpu" and len(states) == 1:
        return after.clone(), None
    outputs = _alias(after)
    return outputs, outputs


def _alias(tensor: Tensor) -> Tensor:
    """The same memory as a tensor of its own, which autograd does not take for a view."""
    alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return alias.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
