"""A solved recurrence on autograd's tape: the autograd function that calls the backward solve."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from timeloom.cells.base import SHORT_SUM, Cell
from timeloom.cells.generic import GenericCell
from timeloom.problem import Recurrence
from timeloom.report import SolveReport
from timeloom.solve import second_order
from timeloom.solve.adjoint_sweeps import Summed
from timeloom.solve.backward import previous_states, solve_adjoint, weight_grads_of
from timeloom.solve.replayed import replayed_sums
from timeloom.torch_state.autocast import without_autocast
from timeloom.torch_state.batched import one_by_one
from timeloom.torch_state.eager import eager

Note = Callable[[SolveReport], None]
"""Receives the backward solve's report."""
Found = tuple[Tensor | Summed, Tensor, SolveReport]
"""Gate gradients or their sums, the gradient of the initial state, and the report."""
Adjoint = Callable[[Recurrence, list[Tensor], Tensor | None, Tensor | None], Found]
"""`solve_adjoint` or `replayed_sums` with a plan, or their counterpart over many ranks."""


Back = Callable[[dict[str, Any], Sequence[Tensor | None], Sequence[bool]], tuple[Tensor | None, ...]]
"""`back(saved, grads, wanted)`: gradients of the live tensors, from the saved ones and the gradients of the outputs and
of the final state. Holds no tensors itself."""


class Tape(NamedTuple):
    """What a solved recurrence puts on autograd's tape.

    outputs: the leading parts of all states, `(T, B, part)` each.
    back: the backward pass.
    saved: the tensors that `back` needs, by name, saved so that autograd checks their versions and frees them.
    recorded: a `back` whose gradients can be differentiated again (`create_graph=True`); None if there is none.
    """

    outputs: tuple[Tensor, ...]
    back: Back
    saved: dict[str, Sequence[Tensor | None]]
    recorded: Back | None = None


class Solved(torch.autograd.Function):
    """Outputs `(T, B, part)` and final state `(B, S)` as a function of all live tensors, those on autograd's tape."""

    @staticmethod
    def forward(ctx: Any, tape: Tape, final: Tensor, *live: Tensor | None) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.widths = [output.shape[-1] for output in tape.outputs]
        ctx.recorded = tape.recorded
        ctx.back, ctx.names = tape.back, [(name, len(tensors)) for name, tensors in tape.saved.items()]
        ctx.save_for_backward(*(tensor for tensors in tape.saved.values() for tensor in tensors))
        return *tape.outputs, final

    @staticmethod
    @eager
    @one_by_one
    def backward(ctx: Any, *given: Tensor | None) -> tuple[Tensor | None, ...]:
        if all(grad is None for grad in given):
            return (None,) * len(ctx.needs_input_grad)
        grads = (side_by_side(given[:-1], ctx.widths, whole=torch.is_grad_enabled()), given[-1])
        tensors = iter(ctx.saved_tensors)  # read once: torch.utils.checkpoint recomputes them each time
        saved = {name: list(islice(tensors, count)) for name, count in ctx.names}
        if torch.is_grad_enabled():
            if ctx.recorded is None:
                refuse_second_order("one process: over many ranks there are none")
            return None, None, *ctx.recorded(saved, grads, ctx.needs_input_grad[2:])
        device = next(grad.device for grad in grads if grad is not None)
        with without_autocast(device):  # the backward pass may be called under autocast
            return None, None, *ctx.back(saved, grads, ctx.needs_input_grad[2:])


def side_by_side(grads: Sequence[Tensor | None], widths: Sequence[int], whole: bool) -> Tensor | None:
    """Gradients of the parts of all states, joined to `(T, B, ·)` up to the last part that has one, or all (`whole`).

    None if no part has a gradient.
    """
    count = len(grads) if whole else max((i + 1 for i, grad in enumerate(grads) if grad is not None), default=0)
    one = next((grad for grad in grads if grad is not None), None)
    if one is None or count == 1:
        return one
    pairs = zip(grads[:count], widths[:count], strict=True)
    return torch.cat([one.new_zeros(*one.shape[:-1], width) if grad is None else grad for grad, width in pairs], -1)


def _steps(cell: Cell, previous: Tensor, inputs: Tensor) -> Tensor:
    """All steps in pieces on a CPU, otherwise at once.

    There torch adds up the gradient of a narrow weight over all rows one after the other, which was off by 4e-6 for
    4,950 rows. It sums up the gradients of norms in half precision: over 4,650 rows they were off by an eighth. So in
    half precision N rows are cut into √N pieces.

    """
    if previous.is_cuda:
        return cell.step(previous, inputs)
    least = 1 if previous.dtype in (torch.float16, torch.bfloat16) else SHORT_SUM
    rows = max(least, math.isqrt(len(previous)))
    pieces = zip(previous.split(rows), inputs.split(rows), strict=True)
    return torch.cat([cell.step(*piece) for piece in pieces])


def attach(
    problem: Recurrence,
    states: list[Tensor],
    final: Tensor,
    solve: Adjoint,
    note: Note,
    live: Recurrence,
    parts: int | None = None,
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Outputs, `(T, B, part)` of the leading `parts` of all states, and final state `(B, S)` on autograd's tape.

    `problem` is the solved problem, detached, with its `states` and `final` state; `solve` is the backward solve;
    `live` is the same problem with its tensors on the tape.

    For a cell with derivatives of its own, the adjoint solve gives the gate gradients, from which the gradients of
    inputs and weights follow. A user's cell is evaluated once more, all steps at once, at detached previous states:
    given the adjoint of each state rather than the loss's own gradient, autograd of that evaluation delivers the
    gradients of everything that the cell holds. Its inputs and parameters are passed alongside for gradients of
    gradients, which also depend on the previous states.
    """
    user = isinstance(problem.cell, GenericCell)
    leaves: list[Tensor] = []
    given: tuple[Tensor, ...] = (live.u, live.initial, *live.cell.weights)
    if user:
        previous = torch.cat(previous_states(problem, states), -1).flatten(0, 1)
        leaves = second_order.leaves_of(live.cell.step(previous[:2], live.u.detach().flatten(0, 1)[:2]))
        given = (_steps(live.cell, previous, live.u.flatten(0, 1)), live.initial, live.u, *leaves)
    shared: Tensor | None = None
    if problem.cell.whole_state_out:
        outputs = outputs_of(problem, states, parts, copied=True)
    else:
        output, shared = output_of(states)
        outputs = (output,)
    cell, lengths, resets = problem.cell.with_weights(()), problem.lengths, problem.resets

    def back(
        saved: dict[str, Any], grads: Sequence[Tensor | None], wanted: Sequence[bool]
    ) -> tuple[Tensor | None, ...]:
        (u,), (initial,), weights, states = saved["u"], saved["initial"], saved["weights"], saved["states"]
        (tape,) = saved["tape"]
        problem = Recurrence(
            cell.with_weights(tuple(weights)), u, initial, lengths, resets, tape=tape, wants_u=wanted[0]
        )
        problem = problem.detach()
        gate_grads, initial_grad, report = solve(problem, states, *grads)
        note(report)
        if isinstance(gate_grads, Summed):
            return gate_grads.inputs, initial_grad, *gate_grads.weights
        if user:
            return gate_grads.flatten(0, 1), initial_grad, None, *(None for _ in leaves)
        weight_grads: tuple[Tensor | None, ...] = (None,) * len(weights)
        if any(wanted[2:]):
            weight_grads = weight_grads_of(problem, states, gate_grads)
        return problem.cell.input_grads(gate_grads), initial_grad, *weight_grads

    def recorded(saved: dict[str, Any], grads: Sequence[Tensor | None], _: Sequence[bool]) -> tuple[Tensor | None, ...]:
        (u,), (initial,), weights = saved["u"], saved["initial"], saved["weights"]
        problem = Recurrence(cell.with_weights(tuple(weights)), u, initial, lengths, resets)
        at_u, at_initial, *at_weights = second_order.gradients(problem, leaves, saved["states"], grads)
        return (None, at_initial, at_u, *at_weights) if user else (at_u, at_initial, *at_weights)

    alone = getattr(solve, "func", None) in (solve_adjoint, replayed_sums)
    # Not the detached ones: gradients of gradients must lead back to the live tensors.
    saved = {"u": (live.u,), "initial": (live.initial,), "weights": live.cell.weights, "states": states}
    tape = Tape(outputs, back, saved | {"shared": (shared,), "tape": (problem.tape,)}, recorded if alone else None)
    *out, last = Solved.apply(tape, final, *given)
    return tuple(out), last


def refuse_second_order(instead: str = "solver='sequential', without lengths= or resets=") -> None:
    """Raise if the backward pass is itself being recorded; `instead` names what supports second-order gradients."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "timeloom's parallel-in-time gradients cannot be differentiated again (create_graph=True): the solves "
            f"behind them are not on the tape. For second-order gradients use {instead}."
        )


def outputs_of(
    problem: Recurrence, states: list[Tensor], parts: int | None = None, copied: bool = False
) -> tuple[Tensor, ...]:
    """The outputs of a run: the leading `parts` of all states, `(T, B, part)`; by default what the cell returns."""
    count = parts or (len(states) if problem.cell.whole_state_out else 1)
    return tuple(part[1:].clone() if copied else part[1:] for part in states[:count])


def output_of(states: list[Tensor]) -> tuple[Tensor, Tensor | None]:
    """The states after every step as an output; returned twice if it shares their memory, so that autograd guards it.

    Torch allows in-place writes to the output of a GRU or RNN on a CPU, so there the output is a copy. The output of an
    LSTM, and any on a GPU, must not be written to before the backward pass; the same holds in torch.
    """
    after = states[0][1:]
    if after.device.type == "cpu" and len(states) == 1:
        return after.clone(), None
    outputs = _alias(after)
    return outputs, outputs


def _alias(tensor: Tensor) -> Tensor:
    """A new tensor on the same memory that autograd does not treat as a view."""
    alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return alias.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
