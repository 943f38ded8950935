"""The kernel that compares the jumps of a chain, emulated on a CPU, against plain torch."""

from __future__ import annotations

import itertools

import pytest
import torch
from emulated_chain import run_chain
from emulator import COMPILER
from torch import Tensor

from timeloom.kernels.cuda.programs import ChainArgs
from timeloom.solve.residual import following

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


def compared(measured: Tensor, parts: int, floor: float, fading: bool, in_reverse: bool) -> float:
    links, groups, _ = measured.shape
    worst = torch.full((), torch.nan)
    args = ChainArgs(links=links, batch=groups // parts, parts=parts, n=1, fading=fading)
    args.measured, args.worst, args.floor[0] = measured.data_ptr(), worst.data_ptr(), floor
    run_chain("compare", 1, args, in_reverse)
    return float(worst)


@pytest.mark.parametrize("fading", [False, True], ids=["states", "gradients"])
@pytest.mark.parametrize(
    ("links", "batch", "parts"),
    [*itertools.product([1, 33], [1], [1]), *itertools.product([1, 33], [5, 20], [2]), (1024, 1, 1), (1024, 5, 2)],
)
def test_the_largest_jump_beside_its_scale(links: int, batch: int, parts: int, fading: bool) -> None:
    """Values and jumps that grow or fade by a factor of thousands along a chain, a few of which stand out."""
    torch.manual_seed(links)
    slope = torch.linspace(-4, 4, links).exp().view(-1, 1)
    values = torch.rand(links, batch * parts) * (slope if fading else slope.flip(0)) + 1e-3
    jumps = 1e-5 * torch.rand(links, batch * parts) * values
    jumps[torch.randint(links, (2,)), torch.randint(batch * parts, (2,))] *= 10
    measured = torch.stack([values, jumps], -1).contiguous()
    floor = torch.tensor([0.0 if part else 0.25 for part in range(parts)]).repeat(batch)
    if fading:
        scale, share = values.cummax(0).values, 0.0
    else:
        share = 0.25
        scale = torch.maximum(values, floor * following(values).clamp(max=1))
    expected = float((jumps / scale).max())
    for in_reverse in (False, True):
        assert compared(measured, parts, share, fading, in_reverse) == pytest.approx(expected, rel=1e-6)
