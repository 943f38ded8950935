"""DEER's step: the equation linearised along the trajectory, and solved exactly in every interval."""

from __future__ import annotations

import torch
from torch import Tensor

from timeloom.ode.exponential import matrix_exp
from timeloom.ode.field import Field
from timeloom.ode.steps.base import Evaluation, Step, Transfers


class Linearised(Step):
    """`y' = G y + z` with G and z the means of `J` and `f − J y` at both ends of a step, solved exactly; of order 2.

    `y[i+1] = exp(hG) y[i] + h φ₁(hG) z`, here as `y[i] + h φ₁(hG) (G y[i] + z)`, which keeps small steps small. Exact
    for linear equations, whatever h. (Lim et al., "Parallelizing non-linear sequential models over the sequence
    length", 2024, which this follows, inverts G; the exponential of an augmented matrix does not need to.) As there,
    a Newton step carries changes by `exp(hG)` alone, with an error of O(h²).
    """

    name, order = "deer", 2

    def evaluate(self, field: Field, t: Tensor, y: Tensor) -> Evaluation:
        h = t[1:] - t[:-1]
        f, jacobian = field.jacobian(t, y)
        mean = (jacobian[1:] + jacobian[:-1]) / 2
        step = (y[1:] - y[:-1]).unsqueeze(-1)
        # G y[i] + z, without the terms that cancel
        slope = (f[1:] + f[:-1]) / 2 - (jacobian[1:] @ step).squeeze(-1) / 2
        augmented = torch.cat([mean, slope.unsqueeze(-1)], -1) * h.unsqueeze(-1)
        augmented = torch.cat([augmented, torch.zeros_like(augmented[..., :1, :])], -2)
        exponential = matrix_exp(augmented)
        residual = y[1:] - (y[:-1] + exponential[..., :-1, -1])
        return Evaluation(residual, lambda: Transfers(exponential[..., :-1, :-1].detach()))
