"""The classical Runge–Kutta step."""

from __future__ import annotations

from torch import Tensor

from timeloom.ode.field import Field
from timeloom.ode.steps.base import Evaluation, Step, Transfers, identity_like, midpoint_jacobian


class RK4(Step):
    """`y[i+1] = y[i] + h/6 (k₁ + 2k₂ + 2k₃ + k₄)`, of order 4.

    Its transfer is approximated by that of the linear problem frozen in the step's middle, `1 + z + z²/2 + z³/6 +
    z⁴/24` at `z = hJ`: a quarter of the work, off by O(h³). The residual is exact, so the solution is too.
    """

    name, order, explicit = "rk4", 4, True

    def evaluate(self, field: Field, t: Tensor, y: Tensor) -> Evaluation:
        before, h = y[:-1], t[1:] - t[:-1]
        middle = t[:-1] + h / 2
        k1 = field(t[:-1], before)
        k2 = field(middle, before + h / 2 * k1)
        k3 = field(middle, before + h / 2 * k2)
        k4 = field(t[1:], before + h * k3)
        residual = y[1:] - (before + h / 6 * (k1 + 2 * (k2 + k3) + k4))
        return Evaluation(residual, lambda: self._transfers(field, t, y))

    @staticmethod
    def _transfers(field: Field, t: Tensor, y: Tensor) -> Transfers:
        z = midpoint_jacobian(field, t, y)
        one = identity_like(z)
        square = z @ z
        return Transfers(one + z + square @ (one / 2 + z / 6 + square / 24))
