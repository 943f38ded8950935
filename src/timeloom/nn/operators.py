"""One layer in one direction as a pair of operators that torch.compile takes into its graphs without looking inside.

`timeloom::solve` gives all states and `timeloom::solve_backward` the gradients, by the same solves as outside of a
graph. They are told by a number which module is meant: what its solver has learned is no tensor.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.nn import Parameter

from timeloom import express
from timeloom.adjoint import refuse_second_order, solve_adjoint
from timeloom.distributed.context import entered
from timeloom.nn import native
from timeloom.nn.precision import SOLVED
from timeloom.problem import Recurrence
from timeloom.recurrence import noting, raise_if_asked
from timeloom.report import SolveReport
from timeloom.solvers.auto import Auto, Memory
from timeloom.solvers.planning import plan_backward, plan_forward
from timeloom.solvers.sequential import Sequential
from timeloom.sweep import sweeper as choose_sweeper
from timeloom.sweep.gpu import has_triton
from timeloom.trajectory import solve_states
from timeloom.transforms import transformed

if TYPE_CHECKING:
    from timeloom.nn.base import Recurrent

Live = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]
"""x `(T, B, D)`, the initial state `(B, S)`, w_ih, w_hh, b_ih, b_hh and w_hr; None where there is none."""
LIVE = "Tensor x, Tensor initial, Tensor w_ih, Tensor w_hh, Tensor? b_ih, Tensor? b_hh, Tensor? w_hr"
TRITON = has_triton()
NOTES = "_timeloom_notes"
"""Attribute of the states that a forward pass returns: they bring it to the backward pass where torch hands on the
very tensor, as its compilers do."""

_modules: WeakValueDictionary[int, Recurrent] = WeakValueDictionary()
_handles = itertools.count()


def handle_of(module: Recurrent) -> int:
    """A new number for a module, which it outlives."""
    handle = next(_handles)
    _modules[handle] = module
    return handle


def can_hold(module: Recurrent, input: Any, *more: Any) -> bool:
    """Whether a graph can hold the module's call: with a padded tensor that is not empty and nothing `more`, no
    autocast, one rank.
    """
    if type(input) not in (Tensor, Parameter) or any(given is not None for given in more):
        return False
    if input.device.type not in ("cpu", "cuda") or input.dtype not in SOLVED or input.layout != torch.strided:
        return False
    if input.dim() not in (2, 3) or input.numel() == 0:
        return False
    if torch.is_autocast_enabled(input.device.type) or entered or transformed():
        return False
    return module.has_torch_twin or not isinstance(module._solver, Sequential)


def run(handle: int, index: int, x: Tensor, initial: Tensor, weights: Sequence[Tensor | None]) -> tuple[Tensor, Tensor]:
    """Outputs `(T, B, ·)` and final state `(B, S)` of one layer and direction, as nodes of a graph."""
    live = (x, initial, *weights)
    taped = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in live)
    states, final, _ = torch.ops.timeloom.solve(*live, handle, index, taped)
    return states[1:], final


@dataclass(frozen=True)
class _Notes:
    """What is no tensor of a forward pass: its report, and autograd's tape where torch's own layer ran."""

    report: SolveReport
    tape: tuple[list[Tensor | None], tuple[Tensor, Tensor]] | None = None
    """What was differentiated by, and the results."""


# --- forward ---------------------------------------------------------------------------------------------------------


def _solve(
    x: Tensor, initial: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None, b_hh: Tensor | None,
    w_hr: Tensor | None, handle: int, index: int, taped: bool,
) -> tuple[Tensor, Tensor, list[Tensor]]:  # fmt: skip
    """States of h `(T + 1, B, ·)`, the final state `(B, S)`, and what else the backward pass needs."""
    module, live = _module(handle), (x, initial, w_ih, w_hh, b_ih, b_hh, w_hr)
    reason, tape = _why_torch(module, x, taped), None
    if reason is not None:
        report = SolveReport.sequential(len(x), f"{reason}; run by torch's own layer")
        tape = _run_torch(module, live, taped)
        outputs, final = (result.detach() for result in tape[1])
        kept = [torch.cat([initial[:, : outputs.shape[-1]].unsqueeze(0), outputs])]
    else:
        kept, report = _run_own(module, live, index, taped)
        final = express.final_of(kept[: len(module._bare(*live[2:]).parts)])
    _record(module, index, report)
    if not taped:
        return kept[0], final, []
    setattr(kept[0], NOTES, _Notes(report, tape))
    return kept[0], final, kept[1:]


def _like_solve(
    x: Tensor, initial: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None, b_hh: Tensor | None,
    w_hr: Tensor | None, handle: int, index: int, taped: bool,
) -> tuple[Tensor, Tensor, list[Tensor]]:  # fmt: skip
    """`_solve` for tensors that have no values."""
    module, (steps, batch) = _module(handle), x.shape[:2]
    cell = module._bare(w_ih, w_hh, b_ih, b_hh, w_hr)
    own, kind = _why_torch(module, x, taped) is None, express.kind_of(cell, x)
    like = initial if own and kind is None else x
    states = [like.new_empty(steps + 1, batch, width) for width in cell.parts]
    final = like.new_empty(batch, cell.size)
    if not own or not taped:
        return states[0], final, []
    width = 0 if kind is None else kind.tape_width(str(cell.kernel), cell.parts[0])
    return states[0], final, states[1:] + ([like.new_empty(steps, batch, width)] if width else [])


@torch.no_grad()
def _run_own(module: Recurrent, live: Live, index: int, taped: bool) -> tuple[list[Tensor], SolveReport]:
    """All states and, behind them, what the backward pass needs; and the report."""
    (x, initial, *weights), memory = live, _memory(module, index)
    solved = express.solve(module._bare, module._cell, x, initial, weights, module._solver, memory, taped)
    if solved is not None:
        return [tensor.to(x.dtype) for tensor in solved[1]], solved[2]
    problem = Recurrence(*module._cell(x, *weights), initial)
    plan = plan_forward(module._solver, problem, memory.forward)
    states, report = solve_states(problem, plan, choose_sweeper(problem))
    memory.forward.learn(report)
    raise_if_asked(report, module._solver)
    return states, report


def _run_torch(module: Recurrent, live: Live, taped: bool) -> tuple[list[Tensor | None], tuple[Tensor, Tensor]]:
    """Torch's own layer: what to differentiate by, outputs `(T, B, ·)` and final state `(B, S)`."""
    with _autograd(), torch.set_grad_enabled(taped), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # cuDNN, that one layer of many is not a block of memory by itself
        leaves = [None if tensor is None else tensor.detach().requires_grad_(taped) for tensor in live]
        x, initial, *weights = leaves
        assert initial is not None
        parts = initial.to(live[0].dtype).split(module._bare(*live[2:]).parts, -1)
        hidden = tuple(part.unsqueeze(0) for part in parts)
        given = [weight for weight in weights if weight is not None]
        options = (module.bias, 1, 0.0, module.training, False, False)
        layer = getattr(torch._VF, module.mode.lower())
        outputs, *final = layer(x, hidden if len(hidden) > 1 else hidden[0], given, *options)
        return leaves, (outputs, torch.cat(final, -1).squeeze(0))


# --- backward --------------------------------------------------------------------------------------------------------


def _solve_backward(
    d_states: Tensor | None, d_final: Tensor | None, x: Tensor, initial: Tensor, w_ih: Tensor, w_hh: Tensor,
    b_ih: Tensor | None, b_hh: Tensor | None, w_hr: Tensor | None, states: Tensor, kept: list[Tensor], handle: int,
    index: int, want_x: bool,
) -> list[Tensor]:  # fmt: skip
    """Gradients of x, when wanted, the initial state and the weights that there are."""
    module, live = _module(handle), (x, initial, w_ih, w_hh, b_ih, b_hh, w_hr)
    notes: _Notes | None = getattr(states, NOTES, None)
    grads = (None if d_states is None else d_states[1:], d_final)
    own = _why_torch(module, x, taped=True) is None if notes is None else notes.tape is None
    with _autograd():
        if own:
            found = _own_gradients(module, live, index, [states, *kept], grads, notes, want_x)
        else:
            tape = notes.tape if notes is not None else None
            found = _differentiate(*(tape or _run_torch(module, live, taped=True)), grads)
    if d_states is not None:
        found[1] = found[1] + torch.nn.functional.pad(d_states[0], (0, initial.shape[1] - d_states.shape[2]))
    wanted = [(grad, of) for grad, of in zip(found, live, strict=True) if of is not None][0 if want_x else 1 :]
    given = [grad for grad in grads if grad is not None]
    return _apart([grad.to(of.dtype).contiguous() for grad, of in wanted], given)


def _like_solve_backward(
    d_states: Tensor | None, d_final: Tensor | None, x: Tensor, initial: Tensor, w_ih: Tensor, w_hh: Tensor,
    b_ih: Tensor | None, b_hh: Tensor | None, w_hr: Tensor | None, states: Tensor, kept: list[Tensor], handle: int,
    index: int, want_x: bool,
) -> list[Tensor]:  # fmt: skip
    """`_solve_backward` for tensors that have no values."""
    live = (*((x,) if want_x else ()), initial, w_ih, w_hh, b_ih, b_hh, w_hr)
    return [tensor.new_empty(tensor.shape) for tensor in live if tensor is not None]


@torch.no_grad()
def _own_gradients(
    module: Recurrent, live: Live, index: int, kept: list[Tensor], grads: tuple[Tensor | None, Tensor | None],
    notes: _Notes | None, want_x: bool,
) -> list[Any]:  # fmt: skip
    """Gradients of everything live by timeloom's sweeps."""
    memory, solver, cell = _memory(module, index), module._solver, module._bare(*live[2:])
    report = notes.report if notes is not None else module.reports[index] if module.reports else None
    note = memory.learn_backward if report is None else noting(report, solver, memory, lambda _: None)
    kind = express.kind_of(cell, live[0])
    if kind is not None:
        lane = express.lane_back(kind(cell, *live[:6]), module._bare, module._cell, solver, memory, note)
        return [*express.gradients(lane, live[:6], kept, grads, want_x), None]
    plan = plan_backward(solver, Recurrence(cell, live[0], live[1]), memory.backward)
    return list(express.solve_again(module._cell, live, kept, grads, partial(solve_adjoint, plan=plan), note))


def _differentiate(
    leaves: Sequence[Tensor | None], results: Sequence[Tensor], grads: Sequence[Tensor | None]
) -> list[Any]:
    """Gradients of the leaves that there are."""
    asked = [(result, grad) for result, grad in zip(results, grads, strict=True) if grad is not None]
    given = [leaf for leaf in leaves if leaf is not None]
    found = iter(torch.autograd.grad([result for result, _ in asked], given, [grad for _, grad in asked]))
    return [None if leaf is None else next(found) for leaf in leaves]


def _apart(tensors: list[Tensor], others: list[Tensor]) -> list[Tensor]:
    """These tensors in memory of their own each, and not in that of the others, as operators must return them."""
    seen, apart = {tensor.untyped_storage().data_ptr() for tensor in others}, []
    for tensor in tensors:
        apart.append(tensor.clone() if tensor.untyped_storage().data_ptr() in seen else tensor)
        seen.add(tensor.untyped_storage().data_ptr())
    return apart


# --- both ------------------------------------------------------------------------------------------------------------


def _module(handle: int) -> Recurrent:
    module = _modules.get(handle)
    if module is None:
        raise RuntimeError("the timeloom layer that this graph was made for is gone: keep the model, or compile anew")
    return module


def _memory(module: Recurrent, index: int) -> Memory:
    return module._memories.setdefault(index, Memory())


def _record(module: Recurrent, index: int, report: SolveReport) -> None:
    """A list anew: the user may hold the last one, and layers may run in any order."""
    reports = list(module.reports) or [report] * module._stacked
    reports[index] = report
    module.__dict__["reports"] = reports


def _why_torch(module: Recurrent, x: Tensor, taped: bool) -> str | None:
    """Why torch's own layer is to run, if it is. The answer is part of the graph, so only sizes count."""
    if isinstance(module._solver, Sequential):
        return "sequential, as asked for"
    if not module.has_torch_twin or not isinstance(module._solver, Auto):
        return None
    with torch.set_grad_enabled(taped):
        return native.why_faster(module, x, *x.shape[:2])


@contextmanager
def _autograd() -> Iterator[None]:
    """Inside of an operator autograd is off for good; where torch's own layer runs in one, it is needed."""
    keys = torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor", "ADInplaceOrView"):
        keys = keys.remove(getattr(torch._C.DispatchKey, key))
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), keys):
        yield


# --- as operators ----------------------------------------------------------------------------------------------------


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, list[Tensor]]) -> None:
    *live, ctx.handle, ctx.index, _ = inputs
    states, _, kept = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*live, states, *kept)


def _back(ctx: Any, d_states: Tensor | None, d_final: Tensor | None, _: Any) -> tuple[Any, ...]:
    refuse_second_order()
    live, (states, *kept) = ctx.saved_tensors[:7], ctx.saved_tensors[7:]
    want_x = ctx.needs_input_grad[0]
    given = (d_states, d_final, *live, states, kept, ctx.handle, ctx.index, want_x)
    found = iter(torch.ops.timeloom.solve_backward(*given))
    grads = [None if tensor is None else next(found) for tensor in (live if want_x else (None, *live[1:]))]
    return *grads, None, None, None


_forward_op = torch.library.custom_op(
    "timeloom::solve",
    _solve,
    mutates_args=(),
    schema=f"({LIVE}, int handle, int index, bool taped) -> (Tensor, Tensor, Tensor[])",
)
_backward_op = torch.library.custom_op(
    "timeloom::solve_backward",
    _solve_backward,
    mutates_args=(),
    schema=f"(Tensor? d_states, Tensor? d_final, {LIVE}, Tensor states, Tensor[] kept, int handle, int index, "
    "bool want_x) -> Tensor[]",
)
_forward_op.register_fake(_like_solve)
_backward_op.register_fake(_like_solve_backward)
_forward_op.register_autograd(_back, setup_context=_keep)
