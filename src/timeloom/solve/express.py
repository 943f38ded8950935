"""The express lane: a whole layer in one call each way, for sequences of one length on kernels that can do that.

Most calls need no correction: the warm-up is long enough, as was learned, and one certificate shows it. Where it fails,
the general solvers (`trajectory`, `adjoint`) solve again. Whichever did, autograd is given the same tensors to save.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from timeloom.auto.experience import Experience, LayerExperience
from timeloom.cells.base import Cell
from timeloom.kernels.cpu.layer import CPULayer
from timeloom.kernels.gpu.layer import GPULayer
from timeloom.kernels.layer import Gradients, Layer
from timeloom.problem import Recurrence, joined
from timeloom.report import SolveReport
from timeloom.solve.autograd import Adjoint, Note, attach, output_of, refuse_second_order
from timeloom.solve.backward import solve_adjoint
from timeloom.solve.driver import certified
from timeloom.solve.forward import final_state, solve_states
from timeloom.solve.plan import Plan, Planner
from timeloom.solve.recurrence import Record, noting, raise_if_asked
from timeloom.solve.residual import SHARE_OF_BOX
from timeloom.torch_state.autocast import without_autocast
from timeloom.torch_state.eager import eager
from timeloom.torch_state.streams import capturing

Result = TypeVar("Result")
PlanLike = TypeVar("PlanLike")
Weights = Sequence[Tensor | None]
"""w_ih, w_hh, b_ih, b_hh and w_hr; None where there is none."""
Bare = Callable[..., Cell]
"""`bare(*weights)`: a layer's cell."""
Project = Callable[..., tuple[Cell, Tensor]]
"""`project(x, *weights)`: a layer's cell and its projected inputs."""
Back = Callable[[Sequence[Any], list[Tensor], tuple[Any, ...], bool], Gradients]
"""`back(live, kept, grads, want_x)`: from the gradients of the outputs and of the final state."""


@dataclass(frozen=True)
class Setting:
    """What all solves of one layer and direction have in common."""

    bare: Bare
    project: Project
    solver: Planner
    experience: LayerExperience


def run(setting: Setting, x: Tensor, initial: Tensor, weights: Weights, record: Record) -> tuple[Tensor, Tensor] | None:
    """Outputs `(T, B, n)` and final state `(B, S)`, differentiable; None for a layer that has no such kernels.

    The final state may be a view of the states: not for users to write into.
    """
    live: tuple[Any, ...] = (x, initial, *weights[:4])
    taped = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in live)
    with torch.no_grad():
        solved = solve(setting, x, initial, weights, taped)
        if solved is None:
            return None
        layer, kept, report = solved
        final = joined([part[-1] for part in kept[: len(layer.cell.parts)]])
    raise_if_asked(report, setting.solver)
    record(report)
    if not taped:
        return kept[0][1:], final
    lane = lane_back(layer, setting, noting(report, setting.solver, setting.experience, record))
    outputs, final = Express.apply(partial(gradients, lane), len(layer.cell.parts), kept, final, *live)
    return outputs, final


def solve(
    setting: Setting, x: Tensor, initial: Tensor, weights: Weights, taped: bool
) -> tuple[Layer, list[Tensor], SolveReport] | None:
    """The layer, its states `(T + 1, B, n)` with what the backward pass needs behind them, and the report; None for a
    layer that has no such kernels. To be called with gradients off.
    """
    cell, experience = setting.bare(*weights), setting.experience.forward
    kind = kind_of(cell, x)
    if kind is None:
        return None
    plan = setting.solver.plan(Recurrence(cell, x, initial), experience)  # it looks at sizes alone
    layer = kind(cell, x, initial, *weights[:4])  # type: ignore[arg-type]
    solved = _forward(layer, plan, taped, experience)
    if solved is None:
        problem = Recurrence(*setting.project(x, *weights), initial)
        sweeper, tape = layer.sweeper(problem, taped)
        states, report = solve_states(problem, plan, sweeper)
        solved = [kept.to(x.dtype) for kept in states + tape], report  # as the kernels that run a whole layer keep them
    experience.learn(solved[1])
    return layer, *solved


def lane_back(layer: Layer, setting: Setting, note: Note) -> Lane[Plan]:
    """How to come back through a layer that was solved."""
    experience = setting.experience.backward
    plan = setting.solver.plan(Recurrence(layer.cell, layer.x, layer.initial), experience, "backward")
    return Lane(type(layer), setting.bare, setting.project, plan, note, experience)


def kind_of(cell: Cell, x: Tensor) -> type[Layer] | None:
    """Whose kernels can run such a layer, if any."""
    if cell.kernel is None:
        return None
    return next((kind for kind in (CPULayer, GPULayer) if kind.supports(x, cell.parts[0])), None)


def _forward(layer: Layer, plan: Plan, taped: bool, experience: Experience) -> tuple[list[Tensor], SolveReport] | None:
    """Kept tensors and report of the planned sweeps; None where they are not certified or are not likely to be."""

    def sweep(plan: Plan) -> tuple[list[Tensor], Tensor | float]:
        return layer.forward(plan, SHARE_OF_BOX, taped)

    return _at_once(sweep, layer, plan, len(layer.x), experience)


@dataclass(frozen=True)
class Lane(Generic[PlanLike]):
    """What the backward pass is told beside its tensors."""

    kind: type[Layer]
    bare: Bare
    project: Project
    plan: PlanLike
    note: Note
    experience: Experience


class Express(torch.autograd.Function):
    """Outputs `(T, B, n)` and final state `(B, S)` as a function of x, the initial state, w_ih, w_hh, b_ih and b_hh.

    The first `parts` of the kept tensors are the parts of the state.
    """

    @staticmethod
    def forward(
        ctx: Any, back: Back, parts: int, kept: list[Tensor], final: Tensor, *live: Any
    ) -> tuple[Tensor, Tensor]:
        outputs, shared = output_of(kept[:parts])
        ctx.set_materialize_grads(False)
        ctx.back = back
        ctx.save_for_backward(*live, shared, *kept)
        return outputs, final

    @staticmethod
    @eager
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_order()
        saved = ctx.saved_tensors  # once: torch.utils.checkpoint computes it anew each time
        live, kept = saved[:6], list(saved[7:])
        with without_autocast(live[0].device):  # it may be on around the backward pass
            return None, None, None, None, *ctx.back(live, kept, grads, ctx.needs_input_grad[4])


def gradients(
    lane: Lane[Plan], live: Sequence[Any], kept: list[Tensor], grads: tuple[Any, ...], want_x: bool
) -> Gradients:
    """Gradients of all inputs, in one call where that is certified, and else by the general path."""
    found = _backward(lane, live, kept, grads, want_x)
    if found is not None:
        return found
    return solve_again(lane.project, live, kept, grads, partial(solve_adjoint, plan=lane.plan), lane.note)


def _backward(
    lane: Lane[Plan], live: Sequence[Any], kept: list[Tensor], grads: tuple[Any, ...], want_x: bool
) -> Gradients | None:
    """Gradients of all inputs in one call; None where they are not certified or are not likely to be."""
    layer = lane.kind(lane.bare(*live[2:], None), *live)

    def sweep(plan: Plan) -> tuple[Gradients, Tensor | float]:
        return layer.backward(plan, kept, grads, want_x)

    solved = _at_once(sweep, layer, lane.plan, len(layer.x), lane.experience)
    if solved is None:
        return None
    found, report = solved
    lane.note(report)
    return found


def solve_again(
    project: Project, live: Sequence[Tensor | None], kept: list[Tensor], grads: Sequence[Tensor | None],
    adjoint: Adjoint, note: Note, lengths: Tensor | None = None, resets: Tensor | None = None,
) -> Gradients:  # fmt: skip
    """Gradients of all inputs by the general path."""
    with torch.enable_grad():
        leaves = [None if tensor is None else tensor.detach().requires_grad_() for tensor in live]
        x, initial, *weights = leaves
        cell, u = project(x, *weights)
        assert initial is not None
        problem = Recurrence(cell, u, initial, lengths, resets).detach()
        states = [part.to(initial.dtype) for part in kept[: len(cell.parts)]]
        results = attach(problem, states, final_state(problem, states), adjoint, note, u, initial, cell)
    asked = [result for result, grad in zip(results, grads, strict=True) if grad is not None]
    given = [leaf for leaf in leaves if leaf is not None]
    found = iter(torch.autograd.grad(asked, given, [grad for grad in grads if grad is not None]))
    return tuple(None if leaf is None else next(found) for leaf in leaves)


def _at_once(
    sweep: Callable[[Plan], tuple[Result, Tensor | float]], layer: Layer, plan: Plan, steps: int, experience: Experience
) -> tuple[Result, SolveReport] | None:
    """What `sweep(plan)` gave, and its report; None where it is not certified or is not likely to be.

    On a GPU, where the general solvers take many launches, a certificate missed by little is worth another try.
    """
    if not _goes_at_once(layer, plan, steps, experience):
        if not capturing(layer.x.device):
            return None
        plan = _in_one_chunk(plan, steps)
    began = time.perf_counter()
    result, error = sweep(plan)
    report = _report(error, plan, steps, began)
    experience.note_certificate(report is not None)
    again = plan.insisting(float(error)) if report is None and layer.corrects else None
    if again is not None:
        result, error = sweep(again)
        report = _report(error, again, steps, began)
    return None if report is None else (result, report)


def _in_one_chunk(plan: Plan, steps: int) -> Plan:
    """For a CUDA graph, which holds no loop that looks at its residuals: one step after the other, and exact."""
    reason = "; ".join(filter(None, (plan.reason, "one chunk, since a CUDA graph was captured")))
    return replace(plan, chunk=steps, warmup=0, sweeps=1, reason=reason)


def _goes_at_once(layer: Layer, plan: Plan, steps: int, experience: Experience) -> bool:
    if plan.sweeps > 1:
        return layer.corrects
    return experience.trusted and (plan.chunk >= steps or plan.warmup > 0) and not plan.check_gradient


def _report(error: Tensor | float, plan: Plan, steps: int, began: float) -> SolveReport | None:
    if plan.chunk >= steps:
        return SolveReport.sequential(plan.chunk, plan.reason, plan.tolerance, time.perf_counter() - began)
    return certified(error, plan, began)
