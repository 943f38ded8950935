"""The base class of solvers over single steps: all states are unknowns, corrected by one linear recurrence."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from timeloom.auto.experience import Experience
from timeloom.cells.base import Cell
from timeloom.problem import Recurrence
from timeloom.solve.linearize import Linearization
from timeloom.solve.plan import Plan, RankPlan
from timeloom.solvers.base import Solver

PATIENCE = 20
"""Sweeps that may fail to halve the residual: the largest jump may stagnate while the others shrink."""
MOST_SWEEPS = 100
ROUNDED = 1e-15
"""Largest rounding of a step in float64, relative to the state."""


@dataclass(frozen=True)
class Stepwise(Solver):
    """One step to a chunk: evaluate all steps at once, and let a linear recurrence carry the jumps between them.

    All such methods have the residual of the plain recurrence, so they end at the same states; they differ in how they
    carry jumps on, and so in the number of sweeps. If `max_iters` is given it is the only limit; otherwise sweeps also
    end once 20 of them did not halve the residual. The adjoint is linear: `adjoint="same"` solves it with the full
    Jacobian in one correction, so gradients are exact in every method.
    """

    def linearization(self, cell: Cell) -> Linearization:
        """The approximation of the Jacobian of this cell's step."""
        raise NotImplementedError

    def _plan_states(self, problem: Recurrence, experience: Experience) -> Plan:
        """The plan for chunks of one step.

        Every step may leave a jump as large as the tolerance, and jumps add up. So if a jump exceeds the tolerance for
        gradients (in float64, the rounding of a step), all steps are corrected once more.
        """
        how = self.linearization(problem.cell)
        if how.precision == "tf32" and problem.u.device.type != "cuda":
            raise ValueError(
                f"precision='tf32' is for CUDA devices, the inputs are on {problem.u.device.type}: use 'bfloat16' or "
                "'full'"
            )
        max_iters = self.max_iters or MOST_SWEEPS
        firm = self.tol is None and problem.rounded.dtype == torch.float64
        polish = ROUNDED if firm else self.adjoint_tolerance(problem)
        return self._plan(
            Plan,
            problem,
            1,
            max_iters=max_iters,
            linearization=how,
            name=self.name,
            patience=PATIENCE if self.max_iters is None else max_iters,
            polish=polish,
        )

    def _plan_gradients(self, problem: Recurrence, experience: Experience) -> Plan:
        how = replace(self.linearization(problem.cell), elements="dense", probes=None, damped=False)
        return self._plan_linear(problem, how, "linear scan")

    def _plan_states_over_ranks(self, problem: Recurrence, experience: Experience, sizes: tuple[int, ...]) -> RankPlan:
        plan = self._plan_states(problem, experience)
        if plan.linearization is not None and plan.linearization.damped:
            raise NotImplementedError(
                f"{type(self).__name__} does not run over many ranks: its damping looks at all steps in order. Use "
                "'auto', 'shooting', 'mgrit', 'deer', 'quasi-deer' or 'sequential'"
            )
        return RankPlan(plan)

    def _plan_gradients_over_ranks(
        self, problem: Recurrence, experience: Experience, sizes: tuple[int, ...]
    ) -> RankPlan:
        return RankPlan(self._plan_gradients(problem, experience))
