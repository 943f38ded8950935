"""Newton's method by kernels that keep Jacobians on the chip: several steps are launched, then all residuals read."""

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
"""Newton steps before residuals are first read if the network is unknown; doubled whenever they are too few."""
NEARLY = 8
"""Multiple of the tolerance within which a residual is nearly rounding: a single further step may then suffice."""
MOST_SWEEPS = 8
"""Largest number of sweeps after a scan of gradients. The first leaves the rounding of the maps, usually too much; if
the maps amplify, as in trained networks, so do some more."""
IN_ORDER_UP_TO = 1 << 13
"""Steps up to which gradients are computed in order if so many sweeps are not enough: a run of single steps, with their
Jacobians in memory, took thirty times as long for 1,034 steps of 64 sequences."""
PLAIN = Linearization("dense")
"""The linearisation that the kernels implement: full Jacobians, no rounding, no damping, a scan of their own choice."""


def newton_states(
    layer: Layer, plan: Plan, experience: Experience, keep: bool
) -> tuple[list[Tensor], SolveReport] | None:
    """All states of a layer with what its backward pass needs, and the report; None if its kernels cannot run.

    As many Newton steps as the last solve took are made before residuals are read. A solve that meets the tolerance
    makes one more if its residual is above the plan's `polish`. What does not converge is run sequentially if the plan
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
    except KernelFault:  # already reported; the driver has other ways
        return None
    return kept, _report(plan, residuals, given_up, began)


def scanned_gradients(
    layer: Layer,
    plan: Plan,
    experience: Experience,
    kept: list[Tensor],
    grads: tuple[Tensor | None, Tensor | None],
    want_x: bool,
) -> tuple[Gradients, SolveReport] | None:
    """Gradients of a layer by a scan over chunks, and the report.

    As many sweeps as the last solve needed correct the rounding of the scan, twice as many where they do not. If
    rounding keeps the residual above the tolerance, short sequences are run in order, if the plan allows that. None if
    the kernels cannot run, or for long ones.
    """
    began, sweeps, missed = time.perf_counter(), experience.counts.scan_sweeps, list[float]()
    try:
        while True:
            found, error = replayed_layers.backward(layer, _cutting(plan, sweeps), kept, grads, want_x)
            if isinstance(error, Tensor) and capturing(layer.x.device):
                return found, _report(plan, [math.nan] * sweeps, "", began, error)
            residual = float(error)
            if residual <= plan.tolerance:
                experience.counts.note_scan(sweeps)
                return found, _report(plan, [residual], "", began, sweeps=sweeps)
            missed.append(residual)
            if sweeps >= MOST_SWEEPS:
                break
            sweeps = min(2 * sweeps, MOST_SWEEPS)
        experience.counts.note_scan(sweeps)
        if plan.on_divergence == "sequential" and len(layer.x) <= IN_ORDER_UP_TO:
            found, _ = replayed_layers.backward(layer, Cutting(len(layer.x), 0), kept, grads, want_x)
            why = f"{sweeps} sweeps left the rounding of the scan"
            return found, _report(plan, missed, why, began, sweeps=sweeps)
    except KernelFault:
        pass
    return None


def _are_enough(residuals: list[float], plan: Plan) -> bool:
    """Whether to stop, given the residuals before each step and after the last one."""
    *before, last = residuals
    polished = last <= plan.polish or any(residual <= plan.tolerance for residual in before)
    return last <= plan.tolerance and (polished or len(before) == plan.max_iters - 1)


def _more(steps: int, residuals: list[float], plan: Plan) -> int:
    """The number of steps to try if `steps` were not enough."""
    near = residuals[-1] <= NEARLY * plan.tolerance
    return min(steps + 1 if near else 2 * steps, plan.max_iters - 1)


def _cutting(plan: Plan, count: int) -> NewtonCutting:
    """`count` steps or sweeps, in place of which kernels run one chunk if they are not enough and the plan says so."""
    exact = plan.on_divergence == "sequential"
    return NewtonCutting(plan.chunk, 0, newton=count, tolerance=plan.tolerance if exact else math.inf)


def _needed(residuals: list[float], plan: Plan) -> int:
    """The number of steps that would have been enough."""
    good = next(step for step, residual in enumerate(residuals) if residual <= plan.tolerance)
    enough = min(good + (residuals[good] > plan.polish), len(residuals) - 1)
    return enough if max(residuals[enough:]) <= plan.tolerance else len(residuals) - 1


class StandingNewton(NamedTuple):
    """A plan for Newton's method with the number of steps that were enough: it stands as long as they are."""

    plan: Plan
    cutting: Cutting
    linear: bool
    """Whether it is for gradients: a scan, followed by that number of sweeps."""

    @staticmethod
    def of(layer: Layer, plan: Plan, count: int | None, linear: bool) -> StandingNewton | None:
        """The standing plan; None if no kernels make such steps, or if their number is not known yet."""
        if count is None or not layer.has_newton or plan.linearization != PLAIN:
            return None
        steps = count if linear else min(count, plan.max_iters - 1)
        return StandingNewton(plan, _cutting(plan, steps), linear)

    def holds(self, experience: Experience) -> bool:
        return self.linear or experience.counts.newton_steps == self.cutting.newton

    def report(
        self, residuals: list[float], experience: Experience, began: float, mended: bool = False
    ) -> SolveReport | None:
        """The report of a pass with these residuals; None if more steps or sweeps are needed.

        mended: whether the graph itself replaces results over the tolerance. One within it is then accepted even if it
        needs polishing; the next call makes more steps.
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
