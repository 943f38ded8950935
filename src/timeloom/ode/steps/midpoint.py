"""The implicit midpoint step."""

from __future__ import annotations

from torch import Tensor

from timeloom.ode.field import Field
from timeloom.ode.steps.base import Evaluation, Step, Transfers, identity_like, midpoint_jacobian, solve


class ImplicitMidpoint(Step):
    """`y[i+1] = y[i] + h f(t[i] + h/2, (y[i] + y[i+1])/2)`, of order 2: stable for stiff problems, and symplectic.

    Its linearisation is exact: `(1 − z/2) δ[i+1] = (1 + z/2) δ[i] − residual` at `z = hJ` in the middle.
    """

    name, order = "implicit-midpoint", 2

    def evaluate(self, field: Field, t: Tensor, y: Tensor) -> Evaluation:
        h, middle = t[1:] - t[:-1], (t[1:] + t[:-1]) / 2
        residual = y[1:] - (y[:-1] + h * field(middle, (y[1:] + y[:-1]) / 2))
        return Evaluation(residual, lambda: self._transfers(field, t, y))

    @staticmethod
    def _transfers(field: Field, t: Tensor, y: Tensor) -> Transfers:
        z = midpoint_jacobian(field, t, y)
        one = identity_like(z)
        weight = one - z / 2
        return Transfers(solve(weight, one + z / 2), weight)
