"""Newton's method by kernels that keep Jacobians on the chip: steps made at once, one look at all their residuals."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from timeloom.auto.experience import Experience
from timeloom.kernels.faults import KernelFault
from timeloom.kernels.layer import Gradients, Layer
from timeloom.kernels.newton import NewtonSteps, States
from timeloom.report import SolveReport, contraction
from timeloom.solve.driver import why_stop
from timeloom.solve.linearize import Linearization
from timeloom.solve.plan import Plan
from timeloom.solve.residual import SHARE_OF_BOX
from timeloom.torch_state.streams import capturing

FIRST_STEPS, MORE_STEPS = 5, 2
"""Newton's steps before the first look at a network nothing is known about, and before each one after it."""
PLAIN = Linearization("dense")
"""What the kernels have: whole Jacobians, nothing rounded, nothing damped, the scan as they choose."""


def newton_states(
    kernels: NewtonSteps, plan: Plan, experience: Experience, like: Tensor
) -> tuple[States, SolveReport, bool]:
    """States behind a certificate or as far as they came, the report, and whether they met the tolerance (True where a
    CUDA graph is captured, and nothing can be read).

    Every state is evaluated in the end: what is returned is what follows the states that the residual was measured at.
    """
    began, captured = time.perf_counter(), capturing(like.device)
    worst = torch.zeros(plan.max_iters, device=like.device, dtype=like.dtype)
    states: States | None = None
    done, ahead = 0, min(experience.newton_steps or FIRST_STEPS, plan.max_iters - 1)
    while True:
        for _ in range(ahead):
            states = kernels.apply(states, kernels.chain(kernels.compose(states, worst[done])))
            done += 1
        found = kernels.finish(states, worst[done])
        if captured:
            return found, _report(plan, [math.nan] * (done + 1), "", began, worst[done]), True
        residuals = worst[: done + 1].tolist()
        met = residuals[-1] <= plan.tolerance
        polished = residuals[-1] <= plan.polish or any(residual <= plan.tolerance for residual in residuals[:-1])
        given_up = "" if met else _why_stop(residuals, plan)
        left = plan.max_iters - len(residuals)
        if given_up or (met and (polished or left == 0)):
            break
        ahead = min(1 if met else MORE_STEPS, left)
    if met:
        good = next(step for step, residual in enumerate(residuals) if residual <= plan.tolerance)
        experience.newton_steps = min(good + (residuals[good] > plan.polish), done)
    return found, _report(plan, residuals, given_up, began), met


def _why_stop(residuals: list[float], plan: Plan) -> str:
    if not math.isfinite(residuals[0]) and not math.isfinite(residuals[-1]):
        return "the values are not finite"
    return why_stop(residuals, plan)


def _report(
    plan: Plan, residuals: list[float], given_up: str, began: float, certificate: Tensor | None = None
) -> SolveReport:
    unread = "" if certificate is None else "captured in a CUDA graph: look at `certified` after a replay"
    return SolveReport(
        solver=plan.name,
        chunk=plan.chunk,
        iterations=len(residuals),
        residuals=tuple(residuals) if certificate is None else (math.nan,),
        tolerance=plan.tolerance,
        converged=certificate is None and not given_up,
        fell_back=False,
        contraction=None if certificate is not None else contraction(residuals),
        seconds=time.perf_counter() - began,
        reason="; ".join(filter(None, (plan.reason, "Jacobians on the chip", given_up, unread))),
        certificate=certificate,
    )


def newton_layer(
    layer: Layer, plan: Plan, experience: Experience, keep: bool
) -> tuple[list[Tensor], SolveReport] | None:
    """All states of a layer and what its backward pass needs, and the report; None where there are no kernels for it,
    or they cannot run. What does not converge is run one step after the other, as the plan says.
    """
    try:
        offered = layer.newton(SHARE_OF_BOX, keep)
        if offered is None:
            return None
        states, report, met = newton_states(offered[0], plan, experience, layer.initial)
    except KernelFault:  # it has been told, and the driver has other ways
        return None
    if met or plan.on_divergence != "sequential":
        return states + offered[1], report
    kept, _ = layer.forward(replace(plan, chunk=len(layer.x), warmup=0, sweeps=1), SHARE_OF_BOX, keep)
    return kept, replace(report, converged=True, fell_back=True)


def scanned_gradients(
    layer: Layer, plan: Plan, kept: list[Tensor], grads: Sequence[Tensor | None], want_x: bool
) -> tuple[Gradients, SolveReport] | None:
    """Gradients of a layer by a scan over chunks, and the report; None where there are no kernels for it, or they are
    not certified.
    """
    began, captured = time.perf_counter(), capturing(layer.x.device)

    def enough(error: Tensor | float) -> bool:
        return captured or float(error) <= plan.tolerance

    try:
        found = layer.backward_by_scan(kept, (grads[0], grads[1]), want_x, enough)
    except KernelFault:
        return None
    if found is None:
        return None
    gradients, errors = found
    if captured:
        unread = errors[-1] if isinstance(errors[-1], Tensor) else None
        return gradients, _report(plan, [math.nan] * len(errors), "", began, unread)
    residuals = [float(error) for error in errors]
    return (gradients, _report(plan, residuals, "", began)) if residuals[-1] <= plan.tolerance else None
