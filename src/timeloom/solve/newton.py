"""Newton's method by kernels that keep Jacobians on the chip: steps made at once, one look at all their residuals."""

from __future__ import annotations

import math
import time
from typing import NamedTuple

from torch import Tensor

from timeloom.auto.experience import Experience
from timeloom.kernels import replayed_layers
from timeloom.kernels.faults import KernelFault
from timeloom.kernels.layer import Cutting, Gradients, Layer, NewtonCutting
from timeloom.report import SolveReport, contraction
from timeloom.solve.driver import why_stop
from timeloom.solve.linearize import Linearization
from timeloom.solve.plan import Plan
from timeloom.solve.residual import SHARE_OF_BOX
from timeloom.torch_state.streams import capturing

FIRST_STEPS = 5
"""Newton's steps before the first look at a network nothing is known about; twice as many where they were too few."""
NEARLY = 8
"""Residuals within so many times the tolerance are about rounding: one step more may be what is missing."""
SWEEPS, MOST_SWEEPS = 2, 4
"""Sweeps behind a scan of gradients, and most of them. One leaves the rounding of the maps, most often too much."""
PLAIN = Linearization("dense")
"""What the kernels have: whole Jacobians, nothing rounded, nothing damped, the scan as they choose."""


def newton_states(
    layer: Layer, plan: Plan, experience: Experience, keep: bool
) -> tuple[list[Tensor], SolveReport] | None:
    """All states of a layer and what its backward pass needs, and the report; None where its kernels cannot run.

    As many steps as the last solve took are made before the first look. A solve that meets the tolerance makes one more
    where its residual is above the plan's `polish`. What does not converge is run one step after the other, if the plan
    says so.
    """
    began, most = time.perf_counter(), plan.max_iters - 1
    steps = min(experience.counts.newton_steps or FIRST_STEPS, most)
    try:
        while True:
            kept, worst = replayed_layers.forward(layer, _cutting(plan, steps), SHARE_OF_BOX, keep)
            assert isinstance(worst, Tensor)
            if capturing(layer.x.device):
                return kept, _report(plan, [math.nan] * (steps + 1), "", began, worst[-1])
            residuals = worst.tolist()
            given_up = "" if residuals[-1] <= plan.tolerance else _why_stop(residuals, plan)
            if given_up or _are_enough(residuals, plan):
                break
            steps = _more(steps, residuals, plan)
        if not given_up:
            experience.counts.note_newton(_needed(residuals, plan))
        elif plan.on_divergence == "sequential":
            kept, _ = layer.forward(Cutting(len(layer.x), 0), SHARE_OF_BOX, keep)
    except KernelFault:  # it has been told, and the driver has other ways
        return None
    return kept, _report(plan, residuals, given_up, began)


def scanned_gradients(
    layer: Layer, plan: Plan, kept: list[Tensor], grads: tuple[Tensor | None, Tensor | None], want_x: bool
) -> tuple[Gradients, SolveReport] | None:
    """Gradients of a layer by a scan over chunks, and the report; None where its kernels cannot run, or rounding keeps
    them above the tolerance.
    """
    began = time.perf_counter()
    try:
        for sweeps in range(SWEEPS, MOST_SWEEPS + 1):
            found, error = replayed_layers.backward(layer, _cutting(plan, sweeps), kept, grads, want_x)
            if isinstance(error, Tensor) and capturing(layer.x.device):
                return found, _report(plan, [math.nan] * sweeps, "", began, error)
            residual = float(error)
            if residual <= plan.tolerance:
                return found, _report(plan, [residual], "", began, sweeps=sweeps)
    except KernelFault:
        pass
    return None


def _are_enough(residuals: list[float], plan: Plan) -> bool:
    """Whether steps with these residuals before each of them and behind the last are to be the last."""
    *before, last = residuals
    polished = last <= plan.polish or any(residual <= plan.tolerance for residual in before)
    return last <= plan.tolerance and (polished or len(before) == plan.max_iters - 1)


def _more(steps: int, residuals: list[float], plan: Plan) -> int:
    """How many to try where so many were not enough."""
    near = residuals[-1] <= NEARLY * plan.tolerance
    return min(steps + 1 if near else 2 * steps, plan.max_iters - 1)


def _cutting(plan: Plan, count: int) -> NewtonCutting:
    """So many steps or sweeps, which one chunk may take the place of where they are not enough."""
    exact = plan.on_divergence == "sequential"
    return NewtonCutting(plan.chunk, 0, newton=count, tolerance=plan.tolerance if exact else math.inf)


def _needed(residuals: list[float], plan: Plan) -> int:
    """How many of them would have been enough."""
    good = next(step for step, residual in enumerate(residuals) if residual <= plan.tolerance)
    enough = min(good + (residuals[good] > plan.polish), len(residuals) - 1)
    return enough if max(residuals[enough:]) <= plan.tolerance else len(residuals) - 1


class StandingNewton(NamedTuple):
    """A plan for Newton's steps, and how many were enough: it stands while these are."""

    plan: Plan
    cutting: Cutting
    linear: bool
    """Whether it is for gradients, by so many sweeps behind a scan."""

    @staticmethod
    def of(layer: Layer, plan: Plan, count: int | None, linear: bool) -> StandingNewton | None:
        """None where no kernels make such steps, or nothing is known of their number."""
        if count is None or not layer.has_newton or plan.linearization != PLAIN:
            return None
        steps = count if linear else min(count, plan.max_iters - 1)
        return StandingNewton(plan, _cutting(plan, steps), linear)

    def holds(self, experience: Experience) -> bool:
        return self.linear or experience.counts.newton_steps == self.cutting.newton

    def report(
        self, residuals: list[float], experience: Experience, began: float, mended: bool = False
    ) -> SolveReport | None:
        """None where more steps or sweeps are needed than these. What is `mended` needs no more where it is within the
        tolerance; the next call makes more.
        """
        if self.linear:
            met = residuals[-1] <= self.plan.tolerance
            return _report(self.plan, residuals[-1:], "", began, sweeps=self.cutting.newton) if met else None
        if not _are_enough(residuals, self.plan):
            if not _why_stop(residuals, self.plan):  # else more would not help
                experience.counts.note_newton(_more(len(residuals) - 1, residuals, self.plan))
            return _report(self.plan, residuals, "", began) if mended and residuals[-1] <= self.plan.tolerance else None
        experience.counts.note_newton(_needed(residuals, self.plan))
        return _report(self.plan, residuals, "", began)


def _why_stop(residuals: list[float], plan: Plan) -> str:
    if not math.isfinite(residuals[0]) and not math.isfinite(residuals[-1]):
        return "the values are not finite"
    return why_stop(residuals, plan)


def _report(
    plan: Plan,
    residuals: list[float],
    given_up: str,
    began: float,
    certificate: Tensor | None = None,
    sweeps: int | None = None,
) -> SolveReport:
    unread = "" if certificate is None else "captured in a CUDA graph: look at `certified` after a replay"
    fell_back = bool(given_up) and plan.on_divergence == "sequential"
    return SolveReport(
        solver=plan.name,
        chunk=plan.chunk,
        iterations=sweeps or len(residuals),
        residuals=tuple(residuals) if certificate is None else (math.nan,),
        tolerance=plan.tolerance,
        converged=certificate is None and (not given_up or fell_back),
        fell_back=fell_back,
        contraction=None if certificate is not None else contraction(residuals),
        seconds=time.perf_counter() - began,
        reason="; ".join(filter(None, (plan.reason, "Jacobians on the chip", given_up, unread))),
        certificate=certificate,
    )
