"""A solve held against the truth at every chunk start: what its report says of the error, and the error."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from timeloom.auto.experience import Experience
from timeloom.kernels import sweeper as choose_sweeper
from timeloom.problem import Recurrence, Segments, empty_states
from timeloom.report import SolveReport
from timeloom.solve.backward import solve_backwards
from timeloom.solve.chain import Chain
from timeloom.solve.forward import forward_chain
from timeloom.solve.plan import Plan
from timeloom.solve.residual import floors, relative, scales
from timeloom.solvers import Solver


@dataclass(frozen=True)
class Audit:
    """What a solve said, and what is true."""

    report: SolveReport
    error: float
    """Largest relative error of a chunk start, beside a plain run of one link after the other."""


def audit(problem: Recurrence, solver: Solver, gradient: Tensor | None = None) -> tuple[Audit, Audit]:
    """Of a forward solve, and of a backward one along its states; `gradient` `(T, B, n)` is the loss's."""
    with torch.no_grad():
        plan = solver.plan(problem, Experience())
        states = empty_states(problem.steps, problem.initial, problem.cell.parts)
        forward = _march(forward_chain(problem, plan, choose_sweeper(problem), states), plan)
        back = solver.plan(problem, Experience(), "backward")
        if gradient is None:
            gradient = torch.randn(states[0][1:].shape, generator=torch.Generator().manual_seed(3)).to(states[0])
        final = torch.zeros_like(problem.initial)
        backward = solve_backwards(problem, states, back, gradient, final, lambda chain: _march(chain, back))[3]
    return forward, backward


def _march(chain: Chain, plan: Plan) -> Audit:
    links, (batch, size) = chain.links, chain.first.shape
    starts = torch.zeros(links * batch, size, dtype=chain.first.dtype)

    def sweep(segments: Segments, given: Tensor, rows: Tensor, want_decay: bool) -> tuple[Tensor, Tensor | None]:
        starts[rows] = given
        return chain.sweep(segments, given, rows, want_decay)

    def enter(
        segments: Segments, lead: int, rows: Tensor, want_decay: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        entered = chain.enter(segments, lead, rows, want_decay)
        starts[rows] = entered[0]
        return entered

    report = plan.march(replace(chain, sweep=sweep, enter=enter))
    exact = [chain.first]
    for link in range(links - 1):
        rows = torch.arange(link * batch, (link + 1) * batch)
        exact.append(chain.sweep(chain.segments[rows], exact[-1], rows, False)[0])
    true = torch.stack(exact)
    scale = scales(true, true, chain.parts, floors(chain.bound, chain.first, chain.parts), chain.fading)
    return Audit(report, float(relative(starts.view_as(true) - true, scale, chain.parts).max()))
