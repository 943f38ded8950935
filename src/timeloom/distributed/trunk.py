"""The trunk over ranks: as `timeloom.solve.trunk` for a slice, with one exchange to certify the first sweep.

If the first sweep of all ranks is not certified, the driver over ranks solves.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from timeloom.cells.base import Cell
from timeloom.distributed.boundaries import Marched, over_ranks
from timeloom.distributed.solve import (
    Ranks,
    backward_guess,
    forward_guess,
    head_of_sequence,
    run_over_ranks,
    solve_adjoint,
)
from timeloom.distributed.span import Line
from timeloom.kernels.layer import Gradients, Layer
from timeloom.solve.autograd import Note
from timeloom.solve.driver import certified
from timeloom.solve.forward import last_of
from timeloom.solve.inputs import Grads, Inputs, Solution, layer_of, sizes_of
from timeloom.solve.plan import RankPlan
from timeloom.solve.recurrence import Record
from timeloom.solve.residual import SHARE_OF_BOX, certificate, floors, relative, scales
from timeloom.solve.trunk import LayerSolve
from timeloom.solve.warm_starts import Guess


@dataclass(frozen=True)
class RankSolve(LayerSolve):
    """The solve of a layer and direction over ranks: inputs are a slice, with the whole sequence's initial state."""

    ranks: Ranks | None = None

    def run(self, inputs: Inputs, record: Record, guess: Guess | None = None) -> tuple[Tensor, Tensor]:
        """Outputs of this rank's steps `(T_local, B, n)` and the final state of the whole sequence; differentiable."""
        assert self.ranks is not None
        assert guess is None, "refused before"
        taped, solution = inputs.taped, None
        with torch.no_grad():
            sizes = sizes_of(self.bare(*inputs.weights), inputs)
            plan = self.solver.plan_over_ranks(sizes, self.experience.forward, self.ranks.span.sizes)
            kind = self.kind_of(inputs, sizes.cell)
            if kind is not None and self.experience.forward.trusted and plan.lead > 0:
                solution = self._first_sweep(kind, inputs, plan, taped)
        if solution is not None:
            return self._on_tape(inputs, solution, record, taped)
        problem = self._problem(inputs)
        (output,), final = run_over_ranks(problem, self.solver, self.experience, record, self.ranks, plan)
        return output, final

    def backward(
        self, inputs: Inputs, kept: list[Tensor], grads: Grads, want_x: bool, plan: Any, note: Note
    ) -> Gradients:
        """Gradients of all live tensors; an error on this rank stops the others."""
        assert self.ranks is not None
        line = self.ranks.line(inputs.x.shape[1], adjoint=True)
        try:
            found = self._first_sweep_back(inputs, kept, grads, want_x, plan, line, note)
            if found is not None:
                return found
            return self._solve_adjoint(inputs, kept, grads, partial(solve_adjoint, plan=plan, line=line), note)
        except BaseException as error:
            line.group.stopped(error)
            raise

    def plan_backward(self, inputs: Inputs, cell: Cell) -> Any:
        assert self.ranks is not None
        return self.solver.plan_over_ranks(
            sizes_of(cell, inputs), self.experience.backward, self.ranks.span.sizes, "backward"
        )

    def _first_sweep(self, kind: type[Layer], inputs: Inputs, plan: RankPlan, taped: bool) -> Solution | None:
        """All chunks of this rank in one call; None unless all ranks together are certified."""
        assert self.ranks is not None
        began, line, cell = time.perf_counter(), self.ranks.line(inputs.x.shape[1]), self.bare(*inputs.weights)
        end = self._problem(inputs._replace(x=inputs.x[-plan.lead :]))
        first = forward_guess(end, plan.lead, line)
        kept, jump = layer_of(kind, cell, inputs._replace(initial=first)).forward(plan.inside, SHARE_OF_BOX, taped)
        states = kept[: len(cell.parts)]
        bound = cell.bound(inputs.initial)
        marched = _certify(plan, line, first, last_of(states), jump, cell.parts, bound, False, began)
        if marched is None:
            self.experience.forward.note_certificate(met=False)
            return None
        for part, value in zip(states, marched.entry.split(cell.parts, -1), strict=True):
            part[0] = value
        self.experience.forward.learn(marched.report)
        return Solution(cell, kept, marched.final, marched.report)

    def _first_sweep_back(
        self, inputs: Inputs, kept: list[Tensor], grads: Grads, want_x: bool, plan: RankPlan, line: Line, note: Note
    ) -> Gradients | None:
        """Gradients of all inputs in one call; None if they are not certified, or are unlikely to be."""
        cell, (incoming, final_grad), lead = self.bare(*inputs.weights), grads, plan.lead
        kind = self.kind_of(inputs, cell)
        if kind is None or not (self.experience.backward.trusted and lead > 0):
            return None
        began, (steps, batch) = time.perf_counter(), inputs.x.shape[:2]
        head = self._problem(inputs._replace(x=inputs.x[:lead]))
        early = None if incoming is None else incoming[:lead]
        states, ends = kept[: len(cell.parts)], torch.full((batch,), steps, device="cpu")
        first = backward_guess(head, [part[: lead + 1] for part in states], early, final_grad, lead, line, ends)
        found, jump = layer_of(kind, cell, inputs).backward(plan.inside, kept, (incoming, first), want_x)
        x_grad, begins, *weight_grads = found
        assert begins is not None
        marched = _certify(plan, line, first, begins, jump, cell.parts, None, True, began)
        if marched is None:
            self.experience.backward.note_certificate(met=False)
            return None
        note(marched.report)
        return x_grad, torch.where(head_of_sequence(line, begins), begins, 0), *weight_grads, None


def _certify(
    plan: RankPlan, line: Line, starts: Tensor, ends: Tensor, jump: Tensor | float, parts: tuple[int, ...],
    bound: Tensor | None, fading: bool, began: float,
) -> Marched | None:  # fmt: skip
    """The result of a sweep of all ranks if one exchange shows that all jumps in and between ranks are small, or None.

    starts, ends: this rank's, `(B, S)`. jump: an upper bound of the relative jumps inside this rank.
    """
    one = torch.ones_like(starts[:, :1])
    heard = line.gather(torch.cat([starts, ends, one * jump, one * line.tag], -1))
    size = starts.shape[1]
    all_starts, all_ends, inside, tags = heard.split((size, size, 1, 1), -1)
    arriving = torch.cat([all_starts[:1], all_ends[:-1]])
    jumps = torch.where(line.joints.to(starts.device).unsqueeze(-1), arriving - all_starts, 0)
    scale = scales(all_starts, arriving, parts, floors(bound, starts, parts), fading)
    worst = float(torch.maximum(certificate(relative(jumps, scale, parts)), certificate(inside)))
    report = certified(worst, plan.inside, began) if bool((tags == line.tag).all()) else None
    if report is None:
        return None
    report = over_ranks(report, line, plan.lead)
    return Marched(report, all_ends[line.place - 1] if line.place else starts, line.last(all_ends, starts))
