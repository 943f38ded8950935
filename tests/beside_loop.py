"""A user's step by `unroll` beside a plain loop over it, in float64: states and gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import timeloom as tl

Step = Callable[[Tensor, Tensor], Tensor]


def draw(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def agrees(step: Step, h0: Tensor, xs: Tensor) -> str:
    """Compare states and the gradients of h0 and x with the loop; returns the reason in the report."""
    found = []
    for loops in (True, False):
        h, x = h0.clone().requires_grad_(), xs.clone().requires_grad_()
        if loops:
            state, states = h, []
            for row in x:
                state = step(state, row)
                states.append(state)
            ys = torch.stack(states)
        else:
            ys, report = tl.unroll(step, h, x)
        found.append([ys.detach(), *torch.autograd.grad((ys * draw(*ys.shape, seed=5)).sum(), [h, x])])
    for expected, given in zip(*found, strict=True):
        assert expected.isfinite().all()
        assert torch.allclose(given, expected, rtol=1e-9, atol=1e-10)
    return str(report.reason)
