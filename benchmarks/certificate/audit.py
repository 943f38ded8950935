"""A solve compared with the truth at every chunk start: the error estimate of its report, and the true error."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from timeloom.auto.experience import Experience
from timeloom.kernels import ReferenceSweeper
from timeloom.kernels import sweeper as choose_sweeper
from timeloom.problem import Recurrence, Segments, empty_states
from timeloom.report import SolveReport
from timeloom.solve.backward import solve_backwards
from timeloom.solve.chain import Chain, Entered
from timeloom.solve.forward import forward_chain
from timeloom.solve.plan import Plan
from timeloom.solve.residual import floors, relative, scales
from timeloom.solvers import Solver

TOO_LITTLE, TOO_MUCH = 3.0, 30.0
"""Factors by which an estimate may be below and above the error."""
CHAOS = 16
"""Factor by which the effects of two roundings may differ in a network that amplifies all of them."""
ROUNDINGS = 1000
"""Roundings of the dtype that any long run may accumulate."""


@dataclass(frozen=True)
class Audit:
    """What a solve reported, and what is true."""

    report: SolveReport
    error: float
    """Largest relative error of a chunk start, against a sequential run in float64."""
    rounding: float
    """The same for a sequential run in the solve's own precision, perturbed by a rounding at every link."""
    dtype: torch.dtype

    @property
    def floor(self) -> float:
        return CHAOS * self.rounding + ROUNDINGS * torch.finfo(self.dtype).eps / 8

    @property
    def told(self) -> bool:
        """Whether there is an estimate to judge."""
        return self.report.error_estimate is not None and not self.report.fell_back

    @property
    def too_little(self) -> bool:
        """Whether the error is more than a few times the estimate.

        Without any jump a solve is a sequential run: its error is rounding, however the network amplifies it.
        """
        assert self.report.error_estimate is not None
        jumps = self.report.residuals[-1] > 0
        return jumps and self.error > TOO_LITTLE * self.report.error_estimate + self.floor

    @property
    def too_much(self) -> bool:
        """Whether the estimate is far larger than the error, and more than rounding and the tolerance."""
        said = self.report.error_estimate
        assert said is not None
        return said > TOO_MUCH * self.error + self.floor and said > self.report.tolerance


def audit(problem: Recurrence, solver: Solver) -> tuple[Audit, Audit]:
    """Audits of a forward solve, and of a backward solve along the states that it found."""
    with torch.no_grad():
        plan, back = solver.plan(problem, Experience()), solver.plan(problem, Experience(), "backward")
        states = empty_states(problem.steps, problem.initial, problem.cell.parts)
        starts, report = _march(forward_chain(problem, plan, choose_sweeper(problem), states), plan)
        copies = [torch.empty_like(part) for part in states]
        plain = _in_order(forward_chain(problem, plan, choose_sweeper(problem), copies), nudged=True)
        precise = _double(problem)
        doubles = empty_states(precise.steps, precise.initial, precise.cell.parts)
        forward = _judged(
            report, starts, plain, forward_chain(precise, plan, ReferenceSweeper(precise), doubles), problem
        )
        pull = torch.randn(states[0][1:].shape, generator=torch.Generator().manual_seed(3)).to(states[0])
        final = torch.zeros_like(problem.initial)

        def drive(chain: Chain) -> tuple[Tensor, SolveReport, Tensor]:
            return *_march(chain, back), _in_order(chain, nudged=True)

        starts, report, plain = solve_backwards(problem, states, back, pull, final, drive)[3]
        of_doubles = [part.double().cpu() for part in states]
        backward = solve_backwards(
            precise, of_doubles, back, pull.double().cpu(), final.double().cpu(),
            lambda chain: _judged(report, starts, plain, chain, problem),
        )[3]  # fmt: skip
    return forward, backward


def _double(problem: Recurrence) -> Recurrence:
    """The problem in float64, on the CPU."""
    cell = problem.cell.with_weights(tuple(weight.double().cpu() for weight in problem.cell.weights))
    return replace(problem, cell=cell, u=problem.u.double().cpu(), initial=problem.initial.double().cpu())


def _judged(report: SolveReport, starts: Tensor, plain: Tensor, exact: Chain, problem: Recurrence) -> Audit:
    true = _in_order(exact)
    scale = scales(true, true, exact.parts, floors(exact.bound, exact.first, exact.parts), exact.fading)
    scale = scale.clamp(min=torch.finfo(problem.initial.dtype).tiny)  # smaller gradients underflow
    own = (given.double().cpu() - true for given in (starts, plain))
    error, rounding = (float(relative(apart, scale, exact.parts).max()) for apart in own)
    return Audit(report, error, rounding, problem.initial.dtype)


def _in_order(chain: Chain, nudged: bool = False) -> Tensor:
    """Starts `(C, B, S)` of a run of one link after the other; `nudged`: with the last bits of each changed."""
    batch, starts = len(chain.first), [chain.first]
    last_bits = 1 + 2 * torch.finfo(chain.first.dtype).eps if nudged else 1
    for link in range(chain.links - 1):
        rows = torch.arange(link * batch, (link + 1) * batch)
        starts.append(last_bits * chain.sweep(chain.segments[rows], starts[-1], rows, False)[0])
    return torch.stack(starts)


def _march(chain: Chain, plan: Plan) -> tuple[Tensor, SolveReport]:
    """The starts `(C, B, S)` that a solve ended with, and its report."""
    batch, size = chain.first.shape
    starts = chain.first.new_zeros(chain.links * batch, size)

    def sweep(segments: Segments, given: Tensor, rows: Tensor, want_decay: bool) -> tuple[Tensor, Tensor | None]:
        starts[rows] = given
        return chain.sweep(segments, given, rows, want_decay)

    def enter(segments: Segments, lead: int, rows: Tensor, want_decay: bool) -> Entered:
        entered = chain.enter(segments, lead, rows, want_decay)
        starts[rows] = entered[0]
        return entered

    report = plan.march(replace(chain, sweep=sweep, enter=enter))
    return starts.view(chain.links, batch, size), report
