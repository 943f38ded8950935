"""One layer in one direction as a pair of operators that torch.compile takes into its graphs without looking inside.

`timeloom::solve` returns all states and `timeloom::solve_backward` the gradients, by the same solves as outside a
graph. A number (`handles`) tells them the module, since its experience is not a tensor.

They return all results as tensors and keep none, since the memory may belong to a CUDA graph; the certificates of a
captured graph are copied to memory that was allocated before.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from timeloom.cells.base import Cell
from timeloom.kernels.layer import Layer
from timeloom.nn.graphs import by_torch
from timeloom.nn.graphs.handles import module_of
from timeloom.nn.sequence import check_kind_of_lengths, check_lengths
from timeloom.report import SolveReport
from timeloom.solve.autograd import refuse_second_order
from timeloom.solve.inputs import Inputs
from timeloom.solve.recurrence import noting, raise_if_asked
from timeloom.solve.trunk import LayerSolve
from timeloom.torch_state.autocast import without_autocast
from timeloom.torch_state.streams import capturing

if TYPE_CHECKING:
    from timeloom.nn.base import Recurrent

GIVEN = (
    "Tensor x, Tensor initial, Tensor w_ih, Tensor w_hh, Tensor? b_ih, Tensor? b_hh, Tensor? w_hr, "
    "Tensor? lengths, Tensor? resets"
)
_certificates: WeakKeyDictionary[Recurrent, Tensor] = WeakKeyDictionary()


def run(handle: int, index: int, given: Inputs) -> tuple[Tensor, Tensor]:
    """Outputs `(T, B, ·)` and final state `(B, S)` of one layer and direction, as nodes of a graph."""
    states, final, _ = torch.ops.timeloom.solve(*given, handle, index, given.taped)
    return states[1:], final


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def make_room(handle: int) -> bool:
    """Allocate memory for a traced graph's certificates, `(2, layers · directions)`, forward and backward."""
    module = module_of(handle)
    device = next(module.parameters()).device
    room = _certificates.get(module)
    if device.type == "cuda" and (room is None or room.device != device):
        _certificates[module] = torch.full((2, module._stacked), torch.nan, device=device)
    return True


# --- forward ---------------------------------------------------------------------------------------------------------


def _solve(
    x: Tensor, initial: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None, b_hh: Tensor | None,
    w_hr: Tensor | None, lengths: Tensor | None, resets: Tensor | None, handle: int, index: int, taped: bool,
) -> tuple[Tensor, Tensor, list[Tensor]]:  # fmt: skip
    """States of h `(T + 1, B, ·)`, the final state `(B, S)`, and whatever else the backward pass needs."""
    module, inputs = module_of(handle), Inputs(x, initial, w_ih, w_hh, b_ih, b_hh, w_hr, lengths, resets)
    reason = _why_torch(module, inputs, taped)
    with torch.no_grad(), without_autocast(x.device):
        if reason is None:
            kept, final, report = _run_own(module, inputs, index, taped)
        else:
            kept, final, report = by_torch.run_forward(module, inputs, taped, reason)
    _record(module, index, report)
    return kept[0], final, kept[1:] if taped else []


def _like_solve(
    x: Tensor, initial: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None, b_hh: Tensor | None,
    w_hr: Tensor | None, lengths: Tensor | None, resets: Tensor | None, handle: int, index: int, taped: bool,
) -> tuple[Tensor, Tensor, list[Tensor]]:  # fmt: skip
    """`_solve` for fake tensors."""
    module, inputs = module_of(handle), Inputs(x, initial, w_ih, w_hh, b_ih, b_hh, w_hr, lengths, resets)
    (steps, batch), cell = x.shape[:2], _cell_of(module, inputs)
    own, kind = _why_torch(module, inputs, taped) is None, LayerSolve.kind_of(inputs, cell)
    like = initial if own and kind is None else x
    states = [like.new_empty(steps + 1, batch, width) for width in cell.parts]
    final = like.new_empty(batch, cell.size)
    if not own or not taped:
        return states[0], final, []
    width = 0 if kind is None else kind.tape_width(cell)
    if kind is None or not width:
        return states[0], final, states[1:]
    tape = like.new_empty(steps, batch, width, dtype=kind.tape_dtype(x))
    return states[0], final, [*states[1:], tape]


def _run_own(module: Recurrent, inputs: Inputs, index: int, taped: bool) -> tuple[list[Tensor], Tensor, SolveReport]:
    """All states, followed by whatever else the backward pass needs; the final state; the report."""
    solve = _solve_of(module, index)
    cell = solve.cell_of(inputs)
    kind = solve.kind_of(inputs, cell)
    _refuse_capture(kind, inputs)
    solution = solve.forward(inputs, taped, cell, kind)
    raise_if_asked(solution.report, solve.solver)
    final = solution.final.clone()  # it may be a view of the states, which operators must not return
    return solution.kept, final, _lasting(module, index, solution.report, backward=False)


# --- backward --------------------------------------------------------------------------------------------------------


def _solve_backward(
    d_states: Tensor | None, d_final: Tensor | None, x: Tensor, initial: Tensor, w_ih: Tensor, w_hh: Tensor,
    b_ih: Tensor | None, b_hh: Tensor | None, w_hr: Tensor | None, lengths: Tensor | None, resets: Tensor | None,
    states: Tensor, kept: list[Tensor], handle: int, index: int, want_x: bool,
) -> list[Tensor]:  # fmt: skip
    """Gradients of x, if wanted, of the initial state and of the weights that are not None."""
    module, inputs = module_of(handle), Inputs(x, initial, w_ih, w_hh, b_ih, b_hh, w_hr, lengths, resets)
    grads = (None if d_states is None else d_states[1:], d_final)
    with without_autocast(x.device):
        if _why_torch(module, inputs, taped=True) is None and _is_whole(module, inputs, kept):
            found = _own_gradients(module, inputs, index, [states, *kept], grads, want_x)
        else:
            tape: by_torch.Tape | None = vars(states).pop(by_torch.TAPE, None)  # usable only once
            found = by_torch.differentiate(*(tape or by_torch.run_torch(module, inputs, taped=True)), grads)
        if d_states is not None:
            found[1] = found[1] + torch.nn.functional.pad(d_states[0], (0, initial.shape[1] - d_states.shape[2]))
    wanted = [(grad, of) for grad, of in zip(found, inputs.live, strict=True) if of is not None][0 if want_x else 1 :]
    given = [grad for grad in grads if grad is not None]
    return _apart([grad.to(of.dtype).contiguous() for grad, of in wanted], given)


def _like_solve_backward(
    d_states: Tensor | None, d_final: Tensor | None, x: Tensor, initial: Tensor, w_ih: Tensor, w_hh: Tensor,
    b_ih: Tensor | None, b_hh: Tensor | None, w_hr: Tensor | None, lengths: Tensor | None, resets: Tensor | None,
    states: Tensor, kept: list[Tensor], handle: int, index: int, want_x: bool,
) -> list[Tensor]:  # fmt: skip
    """`_solve_backward` for fake tensors."""
    live = (*((x,) if want_x else ()), initial, w_ih, w_hh, b_ih, b_hh, w_hr)
    return [tensor.new_empty(tensor.shape) for tensor in live if tensor is not None]


def _own_gradients(
    module: Recurrent, inputs: Inputs, index: int, kept: list[Tensor], grads: tuple[Tensor | None, Tensor | None],
    want_x: bool,
) -> list[Any]:  # fmt: skip
    """Gradients of all live tensors by timeloom's sweeps."""
    solve = _solve_of(module, index)
    report = module.reports[index] if module.reports else SolveReport.sequential(len(inputs.x), "")
    take = noting(report, solve.solver, solve.experience, lambda _: None)

    def note(backward: SolveReport) -> None:
        take(_lasting(module, index, backward, backward=True))

    cell = solve.cell_of(inputs)
    with by_torch.autograd(False):
        _refuse_capture(solve.kind_of(inputs, cell), inputs)
        return list(solve.backward(inputs, kept, grads, want_x, solve.plan_backward(inputs, cell), note))


def _apart(tensors: list[Tensor], others: list[Tensor]) -> list[Tensor]:
    """The tensors as operators must return them: each fills its own storage, shared with none of `others`."""
    seen, apart = {tensor.untyped_storage().data_ptr() for tensor in others}, []
    for tensor in tensors:
        memory = tensor.untyped_storage()
        apart.append(tensor.clone() if memory.data_ptr() in seen or memory.nbytes() > tensor.nbytes else tensor)
        seen.add(memory.data_ptr())
    return apart


# --- both ------------------------------------------------------------------------------------------------------------


def _solve_of(module: Recurrent, index: int) -> LayerSolve:
    return module._solve_of(index, module._experiences)


def _cell_of(module: Recurrent, inputs: Inputs) -> Cell:
    return _solve_of(module, 0).cell_of(inputs)


def _record(module: Recurrent, index: int, report: SolveReport) -> None:
    """Put a report into a new list: the user may hold the last one, and layers may run in any order."""
    reports = list(module.reports) or [report] * module._stacked
    reports[index] = report
    module._take_reports(reports)


def _lasting(module: Recurrent, index: int, report: SolveReport, backward: bool) -> SolveReport:
    """The report, with the certificate of a captured CUDA graph copied to memory that outlives the graph's own.

    Every replay writes it there.
    """
    room = _certificates.get(module)
    if report.certificate is None or room is None:
        return report
    lasting = room[int(backward), index]
    lasting.copy_(report.certificate)
    return replace(report, certificate=lasting)


def _why_torch(module: Recurrent, inputs: Inputs, taped: bool) -> str | None:
    """Why torch's own layer runs, or None. The answer becomes part of the graph, so it depends on sizes alone."""
    if not module.has_torch_twin or not inputs.whole or inputs.masked:
        return None
    x = inputs.x
    with torch.set_grad_enabled(taped), without_autocast(x.device):
        return module._solver.why_torch_by_size(module, x, *x.shape[:2])


def _is_whole(module: Recurrent, inputs: Inputs, kept: list[Tensor]) -> bool:
    """Whether everything is there that our backward pass reads.

    It is not if torch's own layer ran the forward pass, because the solver was another one then.
    """
    cell = _cell_of(module, inputs)
    kind = LayerSolve.kind_of(inputs, cell)
    return len(kept) == len(cell.parts) - 1 + (kind is not None and kind.tape_width(cell) > 0)


def _refuse_capture(kind: type[Layer] | None, inputs: Inputs) -> None:
    if kind is None and capturing(inputs.x.device):
        raise RuntimeError(
            f"a CUDA graph cannot hold this solve, which looks at its residuals ({inputs.x.dtype}, lengths=, resets=, "
            "zoneout=, recurrent_dropout= or a projected LSTM): compile without mode='reduce-overhead', or use "
            "solver='sequential'"
        )


# --- as operators ----------------------------------------------------------------------------------------------------


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, list[Tensor]]) -> None:
    *given, ctx.handle, ctx.index, _ = inputs
    states, _, kept = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*given, states, *kept)


def _back(ctx: Any, d_states: Tensor | None, d_final: Tensor | None, _: Any) -> tuple[Any, ...]:
    refuse_second_order()
    count = len(Inputs._fields)
    saved, want_x = ctx.saved_tensors, ctx.needs_input_grad[0]
    inputs, (states, *kept) = Inputs(*saved[:count]), saved[count:]
    found = iter(
        torch.ops.timeloom.solve_backward(d_states, d_final, *inputs, states, kept, ctx.handle, ctx.index, want_x)
    )
    x_grad = next(found) if want_x else None
    others = (None if tensor is None else next(found) for tensor in (inputs.initial, *inputs.weights))
    return x_grad, *others, None, None, None, None, None


def _like_check_lengths(lengths: Tensor, steps: int, batch: int) -> Tensor:
    check_kind_of_lengths(lengths, batch)  # before torch fails on later operations
    return lengths.new_empty(lengths.shape, dtype=torch.int64, device="cpu")


def _register(name: str, function: Any, like: Any, schema: str) -> Any:
    operator = torch.library.custom_op(f"timeloom::{name}", function, mutates_args=(), schema=schema)
    operator.register_fake(like)
    return operator


_register(
    "solve", _solve, _like_solve, f"({GIVEN}, int handle, int index, bool taped) -> (Tensor, Tensor, Tensor[])"
).register_autograd(_back, setup_context=_keep)
_register(
    "solve_backward",
    _solve_backward,
    _like_solve_backward,
    f"(Tensor? d_states, Tensor? d_final, {GIVEN}, Tensor states, Tensor[] kept, int handle, int index, bool want_x) "
    "-> Tensor[]",
)
_register("check_lengths", check_lengths, _like_check_lengths, "(Tensor lengths, SymInt steps, SymInt batch) -> Tensor")
