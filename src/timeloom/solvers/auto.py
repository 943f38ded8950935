"""The solver `auto`, which chooses a plan for each call."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from timeloom.auto import thresholds
from timeloom.auto.costs import cheapest, decay_is_cheap, newton_up_to, step_cost
from timeloom.auto.decide import LEAST_ERROR, PATIENCE, decide
from timeloom.auto.experience import Experience, Shown
from timeloom.auto.layer_experience import LayerExperience
from timeloom.problem import Recurrence
from timeloom.solve.driver import march
from timeloom.solve.plan import Direction, Plan, RankPlan, StandingPlan
from timeloom.solvers.base import Solver, within

_PLANS: dict[Hashable, Plan] = {}
"""Plans for GPUs, by everything that they were made from."""
MOST_PLANS = 512
"""Largest number of plans to keep."""


@dataclass(frozen=True)
class Auto(Solver):
    """Sequential or shooting, the chunk length and the warm-up, chosen for each call.

    It learns from each call how fast the network forgets. A network that does not contract is run sequentially, and
    shooting is tried again after 20 calls, then 40, 80, … since training changes weights.
    """

    name: ClassVar[str] = "auto"
    in_given_precision: ClassVar[bool] = True
    adapts: ClassVar[bool] = True

    def why_torch(
        self, layer: thresholds.Sized, x: Tensor, steps: int, batch: int, known: Sequence[LayerExperience]
    ) -> str | None:
        return thresholds.why_faster(layer, x, steps, batch, known)

    def why_torch_by_size(self, layer: thresholds.Sized, x: Tensor, steps: int, batch: int) -> str | None:
        return thresholds.why_faster_by_size(layer, x, steps, batch)

    def fewest_steps(self, layer: thresholds.Sized, x: Tensor, batch: int) -> thresholds.Fewest:
        return thresholds.fewest_on_cpu(layer, x, batch) if x.device.type == "cpu" else thresholds.Fewest()

    def _plan_states(self, problem: Recurrence, experience: Experience) -> Plan:
        return self._decide(problem, experience, self.tolerance(problem), linear=False)

    def _plan_gradients(self, problem: Recurrence, experience: Experience) -> Plan:
        return self._decide(problem, experience, self.adjoint_tolerance(problem), linear=True)

    def _decide(self, problem: Recurrence, experience: Experience, tolerance: float, linear: bool) -> Plan:
        """The plan for this call; on a GPU, where calls are short, an earlier plan if nothing has changed."""
        if self.tol is None:
            tolerance = experience.rounding.attainable(tolerance)
        if not self.remembers(problem.u.device) or experience.resting or experience.looking:
            return self._decide_anew(problem, experience, tolerance, linear)
        key = self._key(problem, experience.shown(tolerance, linear), tolerance, linear)
        known_plan = _PLANS.get(key)
        if known_plan is not None:
            experience.note_plan(known_plan.sweeps, known_plan.dense, known_plan.stretch)
            return known_plan
        plan = self._decide_anew(problem, experience, tolerance, linear)
        if _form(problem) is not None and not experience.resting:
            if len(_PLANS) >= MOST_PLANS:
                _PLANS.clear()  # most of so many sizes will not occur again
            _PLANS[key] = plan
        return plan

    @staticmethod
    def remembers(device: torch.device) -> bool:
        """Whether plans are kept for this device: calls are short there, and plans depend on sizes alone."""
        return device.type == "cuda"

    def _key(self, problem: Recurrence, shown: Shown, tolerance: float, linear: bool) -> Hashable:
        """Everything that a plan for a GPU is made from."""
        cell, u = problem.cell, problem.u
        sizes = (u.shape, u.dtype, u.device, problem.initial.dtype, _form(problem), cell.parts)
        return self, tolerance, linear, shown, sizes, problem.lengths is None, problem.resets is None

    def standing(self, problem: Recurrence, experience: Experience, direction: Direction) -> StandingPlan | None:
        linear = direction == "backward"
        if experience.resting or experience.looking or (linear and self.adjoint != "same"):
            return None
        tolerance = self.adjoint_tolerance(problem) if linear else self.tolerance(problem)
        tolerance = experience.rounding.attainable(tolerance) if self.tol is None else tolerance
        shown = experience.shown(tolerance, linear)
        plan = _PLANS.get(self._key(problem, shown, tolerance, linear))
        return None if plan is None else StandingPlan(plan, tolerance, linear, shown, experience.basis)

    def _decide_anew(self, problem: Recurrence, experience: Experience, tolerance: float, linear: bool) -> Plan:
        chosen = decide(problem, experience, tolerance, self.tol is not None, linear)
        cut = chosen.chunk < problem.steps  # one chunk has nothing to correct
        plan = Plan(  # in a single constructor call, since this runs for every call
            chunk=chosen.chunk,
            warmup=chosen.warmup,
            sweeps=chosen.sweeps,
            dense=chosen.dense,
            stretch=chosen.stretch,
            driver=march,
            correction="auto" if chosen.sweeps == 1 else "newton" if chosen.dense else "diag",
            tolerance=chosen.tolerance,
            counts_errors=self.tol is None,
            max_iters=self.max_iters or chosen.patience,
            on_divergence=self.on_divergence,
            reason=chosen.reason,
            accepts=chosen.accepts,
            expected=chosen.expected,
            decay_is_cheap=cut and decay_is_cheap(problem),
            newton_up_to=newton_up_to(problem) if cut else 0,
            has_missed=chosen.has_missed,
        )
        if not chosen.retry:
            return plan
        accepts = max(chosen.accepts, LEAST_ERROR) if self.tol is None else 0.0
        if chosen.sweeps > 1:  # jumps may be as large as add up to what is accepted of them
            tolerance = max(tolerance, accepts)
        longer = replace(plan, warmup=chosen.retry, sweeps=1, correction="auto", tolerance=tolerance, accepts=accepts)
        why = f"a warm-up of {chosen.retry} steps, since what was planned was not enough this time"
        return replace(plan, retry=replace(longer, reason=f"{plan.reason}; {why}", expected=0.0))

    def _plan_states_over_ranks(self, problem: Recurrence, experience: Experience, sizes: tuple[int, ...]) -> RankPlan:
        if experience.resting:
            experience.skip_call()
            return self._in_order(problem, "auto: one rank after the other, the network forgets too slowly")
        lead = experience.warmup(self.tolerance(problem))
        inside = self._plan_shooting(
            problem,
            *cheapest(problem.steps, max(problem.batch, 1), lead, step_cost(problem)),
            correction="auto",
            max_iters=self.max_iters or max(PATIENCE, len(sizes)),
            reason=f"auto: {len(sizes)} ranks, warm-up of {lead} steps",
        )
        return RankPlan(inside, within(lead, sizes))


def _form(problem: Recurrence) -> Hashable:
    """What the cost of a step depends on besides sizes: the cell's kernels; None if only the values can tell."""
    return problem.cell.kernel or getattr(problem.cell, "fused", None)
