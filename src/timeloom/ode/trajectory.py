"""The forward solve: a trajectory by Newton's method, over windows of time as long as it converges on them."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from timeloom.ode.advance import first_guess, march
from timeloom.ode.field import Field
from timeloom.ode.newton import Fit, default_tolerance, fit, leading
from timeloom.ode.steps import Step
from timeloom.report import SolveReport, contraction

MOST_ELEMENTS = 2**24
"""Most numbers in the Jacobians of a window: longer trajectories are solved window by window."""
MOST_ITERS = 30
SHORTEST = {True: 64, False: 8}
"""Steps in a window below which Newton's method is replaced by a sequential run, for explicit and implicit steps."""


@dataclass(frozen=True)
class Problem:
    """`y' = f(t, y)` by a step: t `(T + 1, 1, 1)` increasing, y0 `(B, n)`, both detached."""

    step: Step
    field: Field
    t: Tensor
    y0: Tensor
    tol: float | None = None
    """Largest accepted miss of a step, relative to the state; None stands for rounding."""
    max_iters: int | None = None
    """Most Newton steps in a window; None leaves it to the solver."""

    @property
    def tolerance(self) -> float:
        return default_tolerance(self.y0.dtype) if self.tol is None else self.tol

    @property
    def iterations(self) -> int:
        return MOST_ITERS if self.max_iters is None else self.max_iters

    @property
    def steps(self) -> int:
        return len(self.t) - 1

    @property
    def window(self) -> int:
        """Steps whose Jacobians fit into memory together."""
        return max(1, min(self.steps, MOST_ELEMENTS // max(1, self.y0.numel() * self.y0.shape[-1])))

    def report(
        self, residuals: list[float], began: float, converged: bool, fell_back: bool = False, reason: str = ""
    ) -> SolveReport:
        """The report of Newton's steps, forward or backward."""
        return SolveReport(
            solver=f"deer[{self.step.name}]",
            chunk=1,
            iterations=len(residuals),
            residuals=tuple(residuals),
            tolerance=self.tolerance,
            converged=converged,
            fell_back=fell_back,
            contraction=contraction(residuals),
            seconds=time.perf_counter() - began,
            reason=reason,
        )


def solve_trajectory(problem: Problem, guess: Tensor | None) -> tuple[Tensor, SolveReport]:
    """All points, `(T + 1, B, n)`, and the report.

    A window on which Newton's method fails keeps its leading steps that are solved; the rest is retried at a quarter of
    its length, and the shortest windows are run step by step.
    """
    began = time.perf_counter()
    step, field, steps = problem.step, problem.field, problem.steps
    tolerance = problem.tolerance
    y = problem.y0.new_empty(steps + 1, *problem.y0.shape)
    y[0] = problem.y0
    residuals: list[float] = []
    begin, length, windows, plain = 0, problem.window, 0, 0
    failed, met = False, True
    while begin < steps and bool(y[begin].isfinite().all()):
        end = min(begin + length, steps)
        times = problem.t[begin : end + 1]
        if failed and length < SHORTEST[step.explicit]:
            rest = march(step, field, times, y[begin])
            met &= fit(step, field, times, rest, tolerance, max_iters=1).converged
            found = Fit(rest, [], torch.ones(end - begin, 1, dtype=torch.bool))
            plain += found.good
        else:
            start = first_guess(field, times, y[begin]) if guess is None else guess[begin : end + 1]
            found = fit(step, field, times, torch.cat([y[begin : begin + 1], start[1:]]), tolerance, problem.iterations)
            windows += 1
        residuals += found.residuals
        y[begin + 1 : begin + found.good + 1] = found.y[1 : found.good + 1]
        begin += found.good
        failed = not found.converged
        if not failed:
            length = min(4 * length, problem.window)
        elif guess is None:
            length = max(1, length // 4)
        else:
            guess = None  # the same window once more, from a guess of our own
    y[begin + 1 :] = torch.nan
    alive = y[begin].isfinite().all(-1)
    if begin < steps and bool(alive.any()):  # some sequences ended: the others continue without them
        remaining = replace(problem, t=problem.t[begin:], y0=y[begin, alive])
        y[begin:, alive], others = solve_trajectory(remaining, None if guess is None else guess[begin:, alive])
        residuals += others.residuals
    reached = leading(y.isfinite().all(-1)) - 1
    reason = _reason(windows, plain, reached, steps)
    return y, problem.report(residuals, began, met and reached == steps, plain > 0, reason)


def _reason(windows: int, plain: int, reached: int, steps: int) -> str:
    parts = [f"Newton on {windows} windows of time" if windows > 1 else ""]
    parts.append(f"{plain} of {steps} steps run one after the other" if plain else "")
    parts.append(f"the values are not finite after step {reached}" if reached < steps else "")
    return "; ".join(filter(None, parts))
