"""What solvers over single steps share: all states are unknowns, corrected by one linear recurrence."""

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
"""Sweeps without halving the residual that are granted: the largest one may stand still while the others move on."""
MOST_SWEEPS = 100
ROUNDED = 1e-15
"""What steps of float64 round, relative to a state, at most."""


@dataclass(frozen=True)
class Stepwise(Solver):
    """One step to a chunk: evaluate all steps at once, and let a linear recurrence carry the jumps between them.

    The residual is that of the plain recurrence whatever the method, so all of them end at the same states; they
    differ in what carries a jump on, and so in how many sweeps they take. If `max_iters` is given it is the only limit;
    otherwise sweeps also end where 20 of them did not halve the residual. The adjoint is linear: `adjoint="same"`
    solves it with the full Jacobian in one correction, so gradients are exact in every method.
    """

    def linearization(self, cell: Cell) -> Linearization:
        """What stands for the Jacobian of a step of this cell."""
        raise NotImplementedError

    def _plan_states(self, problem: Recurrence, experience: Experience) -> Plan:
        """Every step may leave a jump of the tolerance, and jumps add up: where one exceeds the tolerance of gradients,
        of float64 what a step rounds, all steps are corrected once more.
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
