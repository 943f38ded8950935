"""The first sweep over a user's recurrence on a GPU, by captured CUDA graphs, as in `kernels.replayed_layers`.

Generated kernels take the weights of a step's normal form, which are computed anew for every call, so they are copied
in like inputs. A sweep that is not certified is passed to the driver, which corrects it.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from timeloom.cells.fused import FusedCell
from timeloom.kernels import AdjointData, ReferenceSweeper, sweeper_kind
from timeloom.kernels import sweeper as choose_sweeper
from timeloom.kernels.faults import KernelFault
from timeloom.kernels.mending import mended, unless
from timeloom.kernels.replay import RECORDINGS
from timeloom.problem import Recurrence, cut_evenly, empty_states
from timeloom.report import SolveReport
from timeloom.solve.adjoint_sweeps import Summed
from timeloom.solve.backward import solve_summed, weight_grads_of
from timeloom.solve.driver import march
from timeloom.solve.first_sweep import report_of
from timeloom.solve.forward import solve_states
from timeloom.solve.plan import Plan
from timeloom.solve.residual import SHARE_OF_BOX
from timeloom.torch_state import tf32

Given = Sequence[Tensor | None]


def replayed_states(problem: Recurrence, plan: Plan) -> tuple[list[Tensor], SolveReport]:
    """`solve_states`, by a replay if that is possible and certified."""
    kind = recorded_kind(problem, plan)
    if kind is None:
        return solve_states(problem, plan, choose_sweeper(problem))
    began, parts = time.perf_counter(), len(problem.cell.parts)

    def body(given: Given) -> list[Any]:
        at, _ = _placed(problem, given)
        states, entered, error = swept_states(kind, at, plan)
        return [*states, *entered, error]

    given = problem.u, problem.initial, *problem.cell.weights
    try:
        found = RECORDINGS.run(_key("forward", kind, problem, plan, given), given, _size(problem), body)
    except KernelFault:  # already reported; the driver has other ways
        return solve_states(problem, plan, choose_sweeper(problem))
    states, starts, ends, decay, error = list(found[:parts]), *found[parts:]
    report = report_of(error, plan, problem.steps, began)
    if report is not None:
        return states, report
    return solve_states(problem, plan, choose_sweeper(problem), states, (starts, ends, decay))


def replayed_sums(
    problem: Recurrence, states: list[Tensor], incoming: Tensor | None, final_grad: Tensor | None, plan: Plan
) -> tuple[Tensor | Summed, Tensor, SolveReport]:
    """`solve_summed`, by a replay if that is possible and certified."""
    kind = None if plan.check_gradient else recorded_kind(problem, plan)
    if kind is None:
        return solve_summed(problem, states, incoming, final_grad, plan)
    began = time.perf_counter()

    def body(given: Given) -> list[Any]:
        at, (incoming, final, *others) = _placed(problem, given)
        states: list[Any] = others
        inputs, at_initial, by_weight, error = swept_sums(kind, at, plan, states, incoming, final)
        return [inputs, at_initial, *by_weight, error]

    incoming = None if incoming is None else incoming.contiguous()
    given = problem.u, problem.initial, *problem.cell.weights, incoming, final_grad, *states
    try:
        found = RECORDINGS.run(_key("backward", kind, problem, plan, given), given, _size(problem), body)
    except KernelFault:
        return solve_summed(problem, states, incoming, final_grad, plan)
    inputs, initial_grad, *by_weight, error = found
    report = report_of(error, plan, problem.steps, began)
    if report is None:
        return solve_summed(problem, states, incoming, final_grad, plan)
    return Summed(inputs, tuple(by_weight)), initial_grad, report


def swept_states(
    kind: type[ReferenceSweeper], problem: Recurrence, plan: Plan
) -> tuple[list[Tensor], tuple[Tensor | None, Tensor | None, Tensor | None], Tensor | float]:
    """States from one sweep; starts, ends and decay of its chunks (None for a single chunk); the certificate."""
    sweeper: Any = kind(problem)
    states = empty_states(problem.steps, problem.initial, problem.cell.parts)
    sweeper.of_layer, sweeper.limit = True, plan.limit
    segments = cut_evenly(problem.steps, problem.batch, plan.chunk, False)
    if plan.chunk >= problem.steps:
        sweeper.forward(segments, problem.initial, states)
        return states, (None, None, None), 0.0
    starts, ends, decay = sweeper.forward_entering(segments, plan.warmup, states, plan.wants_decay)
    error = _certified(sweeper, starts, ends, SHARE_OF_BOX, fading=False)
    given = unless(error, plan.limit, len(segments), sweeper.met) if kind.mends else None
    error = mended(error, given, lambda missed: sweeper.mend(missed, states))
    return states, (starts, ends, decay), error


def swept_sums(
    kind: type[ReferenceSweeper],
    problem: Recurrence,
    plan: Plan,
    states: list[Tensor],
    incoming: Tensor | None,
    final: Tensor | None,
) -> tuple[Tensor, Tensor, tuple[Tensor, ...], Tensor | float]:
    """Gradients of inputs, initial state and weights from one adjoint sweep; the certificate."""
    final = torch.zeros_like(problem.initial) if final is None else final
    gate_grads = problem.initial.new_empty(problem.steps, problem.batch, problem.cell.gate_width)
    sweeper: Any = kind(problem)
    data = AdjointData(states, incoming, gate_grads)
    sweeper.of_layer, sweeper.limit = True, plan.limit
    segments = cut_evenly(problem.steps, problem.batch, plan.chunk, True)
    error: Tensor | float = 0.0
    if plan.chunk >= problem.steps:
        begins, _ = sweeper.adjoint(segments, final, data)
    else:
        ends, begins, _ = sweeper.adjoint_entering(segments, plan.warmup, final, data, False)
        error = _certified(sweeper, ends, begins, 0.0, fading=True)
        given = unless(error, plan.limit, len(segments), sweeper.met) if kind.mends else None
        error = mended(error, given, lambda at: sweeper.mend_adjoint(at, final, data, begins[-problem.batch :]))
    inputs, by_weight = problem.cell.input_grads(gate_grads), weight_grads_of(problem, states, gate_grads)
    return inputs, begins[-problem.batch :], by_weight, error


def recorded_kind(problem: Recurrence, plan: Plan) -> type[ReferenceSweeper] | None:
    """The sweeper whose sweeps of this problem can be recorded, if the plan's first sweep is likely to be enough."""
    unmarked = problem.lengths is None and problem.resets is None and problem.guess is None and problem.tape is None
    entered = plan.chunk >= problem.steps or (plan.warmup > 0 and len(set(problem.cell.parts)) == 1)
    plain = plan.driver is march and plan.linearization is None and plan.sweeps == 1
    if not (isinstance(problem.cell, FusedCell) and unmarked and entered and plain):
        return None
    kind = sweeper_kind(problem)
    return kind if kind.recordable else None


def _placed(problem: Recurrence, given: Given) -> tuple[Recurrence, list[Tensor | None]]:
    """The problem with the first of the given tensors in place of its own, and the rest of the tensors."""
    u, initial, *others = given
    assert u is not None
    assert initial is not None
    count = len(problem.cell.weights)
    weights: list[Any] = others[:count]
    return Recurrence(problem.cell.with_weights(tuple(weights)), u, initial), others[count:]


def _certified(sweeper: ReferenceSweeper, starts: Tensor, ends: Tensor, share: float, fading: bool) -> Any:
    certify = sweeper.certifier(share, fading)
    assert certify is not None
    return certify(starts, ends)


def _key(way: str, kind: type[ReferenceSweeper], problem: Recurrence, plan: Plan, given: Given) -> Hashable:
    """The key of a recording: the step, its sizes, the plan, and whether torch's products round to tf32."""
    shapes = tuple(None if tensor is None else (tensor.shape, tensor.dtype) for tensor in given)
    cutting = plan.chunk, plan.warmup, plan.wants_decay, plan.limit
    rounds = problem.u.is_cuda and tf32.matmul_rounds()
    return way, kind, problem.cell.fused, problem.u.device, shapes, cutting, rounds  # type: ignore[attr-defined]


def _size(problem: Recurrence) -> int:
    """Roughly twice the bytes of a pass: inputs, states, gate gradients and gradients of the inputs."""
    cell = problem.cell
    return 8 * problem.steps * problem.batch * (2 * problem.u.shape[-1] + 3 * cell.size + cell.gate_width)
