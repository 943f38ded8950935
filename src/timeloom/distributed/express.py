"""The express lane over ranks: a whole layer's slice in one call each way, where one exchange certifies the result.

What `timeloom.solve.express` is on one process. Where the certificate fails, the driver over ranks solves again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from timeloom.distributed.boundaries import Marched, over_ranks
from timeloom.distributed.solve import (
    Over,
    backward_guess,
    forward_guess,
    head_of_sequence,
    run_over_ranks,
    solve_adjoint,
)
from timeloom.distributed.span import Line
from timeloom.kernels.layer import Gradients, Layer
from timeloom.problem import Recurrence
from timeloom.solve.driver import certified
from timeloom.solve.express import Express, Lane, Setting, Weights, kind_of, solve_again
from timeloom.solve.forward import last_of
from timeloom.solve.plan import RankPlan
from timeloom.solve.recurrence import Record, noting, raise_if_asked
from timeloom.solve.residual import SHARE_OF_BOX, certificate, floors, relative, scales


def run_layer_over_ranks(
    setting: Setting, x: Tensor, initial: Tensor, weights: Weights, lengths: Tensor | None, resets: Tensor | None,
    record: Record, over: Over,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Outputs of this rank's steps `(T_local, B, n)` and the final state of the whole sequence; differentiable."""
    solver, experience = setting.solver, setting.experience
    with torch.no_grad():
        sizes = Recurrence(setting.bare(*weights), x, initial)  # all that a plan looks at
        plan = solver.plan_over_ranks(sizes, experience.forward, over.span.sizes)
        kind = kind_of(sizes.cell, x) if lengths is None and resets is None else None
    if kind is not None and experience.forward.trusted and plan.lead > 0:
        solved = _run(kind, setting, x, initial, weights, record, over, plan)
        if solved is not None:
            return solved
    problem = Recurrence(*setting.project(x, *weights), initial, lengths, resets)
    return run_over_ranks(problem, solver, experience, record, over, plan)


def _run(
    kind: type[Layer], setting: Setting, x: Tensor, initial: Tensor, weights: Weights, record: Record, over: Over,
    plan: RankPlan,
) -> tuple[Tensor, Tensor] | None:  # fmt: skip
    solver, experience = setting.solver, setting.experience
    live: tuple[Any, ...] = (x, initial, *weights[:4])
    taped = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in live)
    with torch.no_grad():
        began, cell = time.perf_counter(), setting.bare(*weights)
        line = over.line(x.shape[1])
        first = forward_guess(Recurrence(*setting.project(x[-plan.lead :], *weights), initial), plan.lead, line)
        layer = kind(cell, x, first, *live[2:])
        kept, jump = layer.forward(plan.inside, SHARE_OF_BOX, taped)
        states = kept[: len(cell.parts)]
        ends = last_of(states)
        marched = _certify(plan, line, first, ends, jump, cell.parts, cell.bound(initial), False, began)
        if marched is None:
            experience.forward.note_certificate(False)
            return None
        for part, value in zip(states, marched.entry.split(cell.parts, -1), strict=True):
            part[0] = value
    report = marched.report
    experience.forward.learn(report)
    raise_if_asked(report, solver)
    record(report)
    if not taped:
        return kept[0][1:], marched.final
    line = over.line(x.shape[1], adjoint=True)
    sizes = Recurrence(cell, x, initial)
    backward = solver.plan_over_ranks(sizes, experience.backward, over.span.sizes, "backward")
    note = noting(report, solver, experience, record)
    lane = Lane(kind, setting.bare, setting.project, backward, note, experience.backward)
    outputs, final = Express.apply(partial(_gradients, lane, line), len(cell.parts), kept, marched.final, *live)
    return outputs, final


def _certify(
    plan: RankPlan, line: Line, starts: Tensor, ends: Tensor, jump: Tensor | float, parts: tuple[int, ...],
    bound: Tensor | None, fading: bool, began: float,
) -> Marched | None:  # fmt: skip
    """What one exchange shows of a sweep of all ranks: a result if all jumps, in ranks and between them, are small.

    starts, ends: `(B, S)`, this rank's; jump: a bound of the relative jumps inside it.
    """
    one = torch.ones_like(starts[:, :1])
    heard = line.gather(torch.cat([starts, ends, one * jump, one * line.tag], -1))
    size = starts.shape[1]
    all_starts, all_ends, inside = heard[..., :size], heard[..., size : 2 * size], heard[:, 0, 2 * size]
    joints = line.joints.to(starts.device)
    arriving = torch.cat([all_starts[:1], all_ends[:-1]])
    scale = scales(all_starts, arriving, parts, floors(bound, starts, parts), fading)
    jumps = torch.where(joints.unsqueeze(-1), arriving - all_starts, 0)
    worst = float(torch.maximum(certificate(relative(jumps, scale, parts)), certificate(inside)))
    same = bool((heard[..., -1] == line.tag).all())
    report = certified(worst, plan.inside, began) if same else None
    if report is None:
        return None
    report = over_ranks(report, line, plan.lead)
    return Marched(report, all_ends[line.place - 1] if line.place else starts, line.last(all_ends, starts))


def _gradients(
    lane: Lane[RankPlan], line: Line, live: Sequence[Any], kept: list[Tensor], grads: tuple[Any, ...], want_x: bool
) -> Gradients:
    """`timeloom.solve.express.gradients` over ranks; an error here stops the others."""
    try:
        found = _backward(lane, line, live, kept, grads, want_x)
        if found is not None:
            return found
        return solve_again(
            lane.project, live, kept, grads, partial(solve_adjoint, plan=lane.plan, line=line), lane.note
        )
    except BaseException as error:
        line.group.stopped(error)
        raise


def _backward(
    lane: Lane[RankPlan], line: Line, live: Sequence[Any], kept: list[Tensor], grads: tuple[Any, ...], want_x: bool
) -> Gradients | None:
    """Gradients of all inputs in one call; None where they are not certified or were not the last time."""
    plan, (x, initial, *weights), (incoming, final_grad) = lane.plan, live, grads
    if not (lane.experience.trusted and plan.lead > 0):
        return None
    began, cell = time.perf_counter(), lane.bare(*weights, None)
    steps, states = len(x), kept[: len(cell.parts)]
    head = Recurrence(*lane.project(x[: plan.lead], *weights), initial)
    ends = torch.full((x.shape[1],), steps, device="cpu")
    early = None if incoming is None else incoming[: plan.lead]
    first = backward_guess(head, [part[: plan.lead + 1] for part in states], early, final_grad, plan.lead, line, ends)
    layer = lane.kind(cell, x, initial, *weights)
    found, jump = layer.backward(plan.inside, kept, (incoming, first), want_x)
    begins = found[1]
    assert begins is not None
    marched = _certify(plan, line, first, begins, jump, cell.parts, None, True, began)
    if marched is None:
        lane.experience.note_certificate(False)
        return None
    lane.note(marched.report)
    return found[0], torch.where(head_of_sequence(line, begins), begins, 0), *found[2:]
