"""Truth values and whole numbers that a step holds, or makes of x, are moved about as numbers are: masks of units, of
synapses, of rows.
"""

from __future__ import annotations

import pytest
import torch
from beside_loop import Step, agrees, draw
from torch import Tensor

from timeloom.compile import remember
from timeloom.kernels.cpu import build

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(build.unavailable() is not None, reason=f"no C kernels: {build.unavailable()}"),
]
UNITS, STEPS = 6, 40
SPIKE = 21
"""The step that meets a limit: none of those that are compared in every call."""


WEIGHT = 0.4 * draw(UNITS, UNITS)
MASK, COUNTS = torch.tensor([True, False, True, True, False, False]), torch.tensor([3, 1, 0, 2, 1, 5])


def moved(h: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(h @ WEIGHT + x)


STEPS_WITH: dict[str, Step] = {
    "a mask of units": lambda h, x: torch.where(MASK.unsqueeze(0), moved(h, x), 0.5 * h),
    "its opposite": lambda h, x: torch.where(~MASK[None].expand(len(h), UNITS), moved(h, x), 0.5 * h),
    "numbers of units": lambda h, x: 0.3 * moved(h, x) * COUNTS[None, :],
    "pieces of it": lambda h, x: torch.cat(
        [a * b for a, b in zip(moved(h, x).split(2, 1), MASK.split(2), strict=True)], 1
    ),
    "one with the state's": lambda h, x: torch.where(
        torch.cat([h[:, :3] > 0, MASK[3:].expand(len(h), 3)], 1), moved(h, x), 0.5 * h
    ),
    "one with x's": lambda h, x: torch.where(torch.cat([h[:, :3] > 0, x[:, 3:] > 0], 1), moved(h, x), 0.5 * h),
    "a mask of rows": lambda h, x: torch.where((x[:, 0] > 0).unsqueeze(-1), moved(h, x), h),
    "where few rows get": lambda h, x: moved(h, x) + torch.where(x > 5, h * COUNTS[None, :], 0 * h),
}


@pytest.mark.parametrize("name", STEPS_WITH)
def test_masks_are_those_of_the_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remember, "FEWEST_STEPS", 0)
    step, given = STEPS_WITH[name], 0.3 * draw(STEPS, 2, UNITS, seed=7)
    given[SPIKE, 1] = 8.0
    assert agrees(step, 0.5 * draw(2, UNITS), given).endswith("; fused")
