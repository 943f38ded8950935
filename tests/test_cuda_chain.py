"""The kernels that compare the jumps of a chain and carry them along it, emulated on a CPU, against plain torch."""

from __future__ import annotations

import itertools

import pytest
import torch
from emulated_chain import run_chain
from emulator import COMPILER
from torch import Tensor

from timeloom.kernels.cuda.chain import CLUSTER, LANES
from timeloom.kernels.cuda.programs import ChainArgs
from timeloom.solve.residual import following

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


def compared(measured: Tensor, parts: int, floor: float, fading: bool, in_reverse: bool) -> float:
    links, groups, _ = measured.shape
    worst = torch.full((2,), torch.nan)
    args = ChainArgs(links=links, batch=groups // parts, parts=parts, n=1, fading=fading, limit=torch.inf)
    args.measured, args.worst, args.floor[0] = measured.data_ptr(), worst.data_ptr(), floor
    run_chain("compare", 1, args, in_reverse)
    assert worst[0] == worst[1]
    return float(worst[0])


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


@pytest.mark.parametrize("fading", [False, True], ids=["states", "gradients"])
@pytest.mark.parametrize(("links", "groups", "n"), [(1, 1, 3), (40, 2, 33), (300, 3, 5)])
def test_one_launch_measures_and_compares(links: int, groups: int, n: int, fading: bool) -> None:
    """As two launches do; the second number is zero beyond the limit."""
    torch.manual_seed(links)
    starts = torch.rand(links, groups, n) + 0.1
    ends = torch.cat([starts[1:], starts[:1]]) + 1e-4 * torch.rand(links, groups, n)
    measured = torch.full((links, groups, 2), torch.nan)
    args = ChainArgs(links=links, batch=groups, parts=1, n=n, fading=fading, limit=torch.inf)
    args.starts, args.ends, args.measured, args.floor[0] = starts.data_ptr(), ends.data_ptr(), measured.data_ptr(), 0.5
    found = []
    for names in (("measure", "compare"), ("certify",)):
        worst = torch.full((2,), torch.nan)
        args.worst = worst.data_ptr()
        for name in names:
            run_chain(name, {"measure": -(-links * groups // 8), "compare": 1, "certify": CLUSTER}[name], args)
        found.append(float(worst[0]))
        for limit, met in ((found[0], found[0]), (0.99 * found[0], 0.0)):
            args.limit = limit
            run_chain(names[-1], {"compare": 1, "certify": CLUSTER}[names[-1]], args)
            assert worst.tolist() == [found[0], met]
        measured.fill_(torch.nan)
    assert found[0] == found[1]
    assert (found[0] > 0) == (links > 1)


def carried(starts: Tensor, ends: Tensor, decay: Tensor, box: float | None, in_reverse: bool) -> tuple[Tensor, Tensor]:
    links, width = starts.shape
    moves, corrected = torch.full_like(starts, torch.nan), torch.full_like(starts, torch.nan)
    args = ChainArgs(links=links, batch=1, parts=1, n=width)
    args.starts, args.ends, args.decay = starts.data_ptr(), ends.data_ptr(), decay.data_ptr()
    args.moves, args.corrected = moves.data_ptr(), corrected.data_ptr()
    bound = torch.full((width,), box or 0.0)
    args.bound = bound.data_ptr() if box is not None else None
    run_chain("carry", -(-width // LANES), args, in_reverse)
    return moves, corrected


def in_order(starts: Tensor, ends: Tensor, decay: Tensor, box: float | None) -> tuple[Tensor, Tensor]:
    """The same link by link, in float64; a move that is no number is that link's jump alone."""
    starts, ends, decay = starts.double(), ends.double(), decay.double()
    moves, corrected = torch.zeros_like(starts), starts.clone()
    for link in range(1, len(starts)):
        jump = ends[link - 1] - starts[link]
        moved = decay[link - 1] * moves[link - 1] + jump
        moves[link] = torch.where(moved.isfinite(), moved, jump)
        corrected[link] = ends[link - 1] + moves[link] - jump
        if box is not None:
            corrected[link] = corrected[link].clamp(-box, box)
    return moves, corrected


@pytest.mark.parametrize("box", [None, 1.0], ids=["free", "boxed"])
@pytest.mark.parametrize(("links", "width"), [(1, 1), (2, 3), (17, 40), (129, 32), (130, 65), (300, 33)])
def test_jumps_are_carried_along_the_chain(links: int, width: int, box: float | None) -> None:
    """Chains of several rounds, with links that lose all, keep all, or enlarge what enters them."""
    torch.manual_seed(links)
    starts, ends = torch.randn(2, links, width)
    decay = torch.rand(links, width) ** 0.05
    decay[torch.rand(links, width) < 0.05] = 0.0
    decay[torch.rand(links, width) < 0.05] = 1.5
    expected = in_order(starts, ends, decay, box)
    for in_reverse in (False, True):
        for found, truth in zip(carried(starts, ends, decay, box, in_reverse), expected, strict=True):
            torch.testing.assert_close(found.double(), truth, rtol=1e-5, atol=1e-5)


def test_what_is_no_number_stays_in_its_link() -> None:
    torch.manual_seed(0)
    starts, ends = torch.randn(2, 200, 8)
    decay = torch.rand(200, 8)
    ends[20, 1], ends[150, 2], decay[100, 3], decay[15, 4] = torch.nan, torch.inf, torch.nan, torch.inf
    expected, _ = in_order(starts, ends, decay, None)
    found, _ = carried(starts, ends, decay, None, False)
    assert torch.equal(found.isfinite(), expected.isfinite())
    known = expected.isfinite()
    torch.testing.assert_close(found.double()[known], expected[known], rtol=1e-5, atol=1e-5)
