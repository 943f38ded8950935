"""Gradients of a solved trajectory: one linear solve backward in time, and its autograd Function."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from timeloom.ode.advance import TWICE_DIFFERENTIABLE
from timeloom.ode.field import pull_back
from timeloom.ode.newton import SLOW, History, relative_to_largest
from timeloom.ode.steps.base import exact_transfers
from timeloom.ode.trajectory import Problem
from timeloom.report import SolveReport
from timeloom.solve.autograd import refuse_second_order
from timeloom.torch_state.eager import eager

Note = Callable[[SolveReport], None]


class OnTape(torch.autograd.Function):
    """A solved trajectory as a function of its residuals, `(T, B, n)`, and its first point.

    The equations of all steps were evaluated once, at the detached solution, with everything else on the tape. The
    solution keeps their residuals at zero, which determines how it changes with them. Autograd of that evaluation then
    gives the gradients of the times and of everything that f holds.
    """

    @staticmethod
    def forward(ctx: Any, problem: Problem, y: Tensor, note: Note, residual: Tensor, y0: Tensor) -> Tensor:
        ctx.problem, ctx.note = problem, note
        ctx.save_for_backward(y)
        return y.clone()

    @staticmethod
    @eager
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order(TWICE_DIFFERENTIABLE)
        (y,) = ctx.saved_tensors
        weights, first, report = solve_adjoint(ctx.problem, y, grads[0])
        ctx.note(report)
        return None, None, None, -weights, first


def solve_adjoint(problem: Problem, y: Tensor, grads: Tensor) -> tuple[Tensor, Tensor, SolveReport]:
    """Weights λ `(T, B, n)` of the steps' equations and the gradient of y0, from `grads` on all points `(T + 1, B, n)`.

    With K the derivative of all residuals by all points, `Kᵀλ = grads`. A backward scan of the linearised steps solves
    that approximately; the remainder is computed by a vjp through the true steps, and solved for again.
    """
    began = time.perf_counter()
    tolerance = problem.tolerance
    carried = grads.clone()
    weights = torch.zeros_like(y[1:])
    residuals: list[float] = []
    converged = True
    for end in range(problem.steps, 0, -problem.window):
        begin = max(0, end - problem.window)
        window = slice(begin, end + 1)
        weights[begin:end], pulled, left = _solve_window(problem, problem.t[window], y[window], carried[window][1:])
        carried[begin] -= pulled
        residuals += left
        converged &= left[-1] <= tolerance
    return weights, carried[0], problem.report(residuals, began, converged)


def _solve_window(problem: Problem, t: Tensor, y: Tensor, grads: Tensor) -> tuple[Tensor, Tensor, list[float]]:
    """Weights of a window's equations, their vjp at its first point, and the relative residual after each solve.

    grads: `(T, B, n)`, the gradients at the window's points after the first.
    """
    step, field = problem.step, problem.field
    with torch.enable_grad():
        points = y.detach().requires_grad_()
        now = step.evaluate(field, t, points)
    transfers = now.transfers()
    exact = False
    weights, adjoint, left = torch.zeros_like(grads), torch.zeros_like(grads), grads
    history = History(y, problem.tolerance, problem.iterations)
    while True:
        change = torch.where(history.stopped.unsqueeze(-1), 0, transfers.carry_back(left))
        adjoint, weights = adjoint + change, weights + transfers.solve_transposed(change)
        pulled = pull_back(now.residual, points, weights)
        left = grads - pulled[1:]
        behind = adjoint.flip(0)
        history.add(relative_to_largest(left.flip(0), torch.cat([behind[:1], behind])))
        if history.over:
            return weights, pulled[0], history.residuals
        if not exact and history.factor > SLOW:
            transfers, exact = exact_transfers(step, field, t, y), True
