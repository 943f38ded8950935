"""The sequential solver: one step after the other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from timeloom.auto.experience import Experience
from timeloom.auto.layer_experience import LayerExperience
from timeloom.auto.thresholds import Fewest, Sized
from timeloom.problem import Recurrence
from timeloom.solve.plan import Plan, RankPlan
from timeloom.solvers.base import Solver

ASKED = "sequential, as asked for"


@dataclass(frozen=True)
class Sequential(Solver):
    """The plain recurrence: torch's own layer (cuDNN, oneDNN, ATen) in the modules, a loop over steps in `unroll`.

    `ImplicitGRU`, which torch does not have, is a loop over steps too, but for float32 on a GPU: there one kernel runs
    all of them.

    It is the reference for all other solvers. Its options have no effect, since there is nothing to converge.
    """

    name: ClassVar[str] = "sequential"
    on_tape: ClassVar[bool] = True

    def why_torch(
        self, layer: Sized, x: Tensor, steps: int, batch: int, known: Sequence[LayerExperience]
    ) -> str | None:
        return ASKED

    def why_torch_by_size(self, layer: Sized, x: Tensor, steps: int, batch: int) -> str | None:
        return ASKED

    def fewest_steps(self, layer: Sized, x: Tensor, batch: int) -> Fewest:
        return Fewest(math.inf, ASKED)

    def _plan_states(self, problem: Recurrence, experience: Experience) -> Plan:
        return self._one_chunk(problem, ASKED)

    def _plan_states_over_ranks(self, problem: Recurrence, experience: Experience, sizes: tuple[int, ...]) -> RankPlan:
        return self._in_order(problem, ASKED)
