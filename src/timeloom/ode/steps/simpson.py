"""The Hermite–Simpson step (Lobatto IIIA of order 4)."""

from __future__ import annotations

from torch import Tensor

from timeloom.ode.field import Field
from timeloom.ode.steps.base import Evaluation, Step, Transfers, identity_like, midpoint_jacobian, solve


class HermiteSimpson(Step):
    """Collocation by a cubic at both ends and the middle, of order 4, stable for stiff problems.

    `m = (y[i] + y[i+1])/2 + h/8 (f[i] − f[i+1])`, `y[i+1] = y[i] + h/6 (f[i] + 4 f(m) + f[i+1])`. Neighbours share
    f at the points, so a step costs two evaluations. Its transfer is that of the linear problem frozen in the step's
    middle: `(1 − z/2 + z²/12)⁻¹ (1 + z/2 + z²/12)` at `z = hJ`, off by O(h³).
    """

    name, order = "hermite-simpson", 4

    def evaluate(self, field: Field, t: Tensor, y: Tensor) -> Evaluation:
        h, f = t[1:] - t[:-1], field(t, y)
        middle = (y[1:] + y[:-1]) / 2 + h / 8 * (f[:-1] - f[1:])
        slope = f[:-1] + 4 * field((t[1:] + t[:-1]) / 2, middle) + f[1:]
        return Evaluation(y[1:] - (y[:-1] + h / 6 * slope), lambda: self._transfers(field, t, y))

    @staticmethod
    def _transfers(field: Field, t: Tensor, y: Tensor) -> Transfers:
        z = midpoint_jacobian(field, t, y)
        even = identity_like(z) + z @ z / 12
        weight = even - z / 2
        return Transfers(solve(weight, even + z / 2), weight)
