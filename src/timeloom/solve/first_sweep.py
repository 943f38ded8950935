"""The first sweep of a layer: one kernel call for the whole layer, and a certificate that says whether it suffices."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from timeloom.auto.experience import Experience
from timeloom.kernels.faults import KernelFault
from timeloom.kernels.layer import Layer
from timeloom.report import SolveReport
from timeloom.solve.driver import certified
from timeloom.solve.plan import Plan
from timeloom.torch_state.streams import Watch, capturing, watch

Result = TypeVar("Result")


class Swept(NamedTuple, Generic[Result]):
    """The result of a first sweep, its plan, and its report, which is None if the sweep is not certified.

    `result` is meaningless if nothing was swept, because one sweep was unlikely to be enough.
    """

    result: Result
    plan: Plan
    report: SolveReport | None


MOST_TRIES = 8
"""Number of plans that are tried, each made from what the one before showed, before all is run in one chunk."""


def first_sweep(
    sweep: Callable[[Plan], tuple[Result, Tensor | float]],
    layer: Layer,
    plan: Plan,
    experience: Experience,
    replan: Callable[[], Plan] | None,
) -> Swept[Result]:
    """Run `sweep(plan)`, which returns a result and its certificate; nothing is swept if its kernel cannot run.

    After a missed certificate `replan` makes new plans from what the sweep has shown about the network's memory. If
    the plan is fixed (no `replan`), one longer warm-up is tried on a GPU, where the driver would take many launches.
    """
    try:
        if replan is not None:
            return _replanning(sweep, layer, plan, experience, replan)
        return _as_planned(sweep, layer, plan, experience)
    except KernelFault:  # already reported; the driver has other ways
        return Swept(None, plan, None)  # type: ignore[arg-type]


def _as_planned(
    sweep: Callable[[Plan], tuple[Result, Tensor | float]], layer: Layer, plan: Plan, experience: Experience
) -> Swept[Result]:
    steps = layer.x.shape[0]
    if not _is_likely_to_do(layer, plan, steps, experience):
        if not capturing(layer.x.device):
            return Swept(None, plan, None)  # type: ignore[arg-type]
        plan = _in_one_chunk(plan, steps, "one chunk, since a CUDA graph was captured")
    began = time.perf_counter()
    result, error = sweep(plan)
    report = report_of(error, plan, steps, began)
    experience.note_certificate(report is not None)
    again = plan.insisting(float(error)) if report is None and layer.corrects else None
    if again is not None:
        plan = again
        result, error = sweep(plan)
        report = report_of(error, plan, steps, began)
    return Swept(result, plan, report)


def _replanning(
    sweep: Callable[[Plan], tuple[Result, Tensor | float]],
    layer: Layer,
    plan: Plan,
    experience: Experience,
    replan: Callable[[], Plan],
) -> Swept[Result]:
    steps, began = layer.x.shape[0], time.perf_counter()
    watched = watch_for(plan, experience, layer.x.device)
    result, error = sweep(plan)
    if watched is not None:
        watched.stop()
    report = report_of(error, plan, steps, began)
    if watched is not None and report is not None and plan.chunk < steps:  # the host has waited for its certificate
        experience.trials.note(plan, plan.expected, watched.milliseconds())
    for tries in range(1, MOST_TRIES + 1):
        if report is not None:
            break
        experience.note_miss(plan, float(error))
        following = replan() if tries < MOST_TRIES else _in_one_chunk(plan, steps, TOO_SLOW)
        if plan.sweeps == following.sweeps == 1 and following.chunk < steps:  # the miss may be rounding
            plan = replace(plan, tolerance=max(plan.tolerance, following.tolerance))
            report = report_of(error, plan, steps, began)
            if report is not None:
                break
        plan = following
        result, error = sweep(plan)
        report = report_of(error, plan, steps, began)
    return Swept(result, plan, report)


def watch_for(plan: Plan, experience: Experience, device: torch.device) -> Watch | None:
    """A running stopwatch if the time of this plan is still to be measured, else None."""
    return watch(device) if experience.trials.want(plan, plan.expected) else None


def _is_likely_to_do(layer: Layer, plan: Plan, steps: int, experience: Experience) -> bool:
    if plan.sweeps > 1:
        return layer.corrects
    return experience.trusted and (plan.chunk >= steps or plan.warmup > 0) and not plan.check_gradient


TOO_SLOW = "one chunk, the network forgets too slowly"


def _in_one_chunk(plan: Plan, steps: int, why: str) -> Plan:
    """The plan for an exact sequential run: for a CUDA graph, which cannot loop on residuals, or as the last resort."""
    reason = "; ".join(filter(None, (plan.reason, why)))
    return replace(plan, chunk=steps, warmup=0, sweeps=1, retry=None, reason=reason)


def report_of(error: Tensor | float, plan: Plan, steps: int, began: float) -> SolveReport | None:
    """The report of the planned sweeps if they meet their certificate, else None."""
    if plan.chunk >= steps:
        return SolveReport.sequential(plan.chunk, plan.reason, plan.tolerance, time.perf_counter() - began)
    return certified(error, plan, began)
