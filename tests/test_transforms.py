"""Inside `torch.func` transforms and forward-mode differentiation: the right numbers or a clear word, never silence."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import grad, jvp, vmap

import timeloom as tl
from timeloom.solvers import Sequential

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch.func itself makes use of it

EXACT = torch.float64


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=EXACT)


def loop(h: Tensor, xs: Tensor) -> Tensor:
    states = []
    for x in xs:
        h = torch.tanh(h.roll(1, -1) + x)
        states.append(h)
    return torch.stack(states)


@pytest.mark.parametrize("solver", ["deer", "shooting", "auto", "sequential"])
def test_unroll_runs_one_step_after_the_other(solver: str) -> None:
    xs, h0, direction = draw(9, 2, 3), draw(2, 3, seed=1), draw(2, 3, seed=2)

    def states(h: Tensor) -> Tensor:
        found, report = tl.unroll(lambda h, x: torch.tanh(h.roll(1, -1) + x), h, xs, solver=solver)
        assert report.solver == "sequential"
        assert report.reason == (
            "sequential, as asked for" if solver == "sequential" else "no sweeps inside torch.func transforms and "
            "forward-mode differentiation"
        )  # fmt: skip
        return found

    torch.testing.assert_close(jvp(states, (h0,), (direction,)), jvp(lambda h: loop(h, xs), (h0,), (direction,)))
    torch.testing.assert_close(grad(lambda h: states(h).sum())(h0), grad(lambda h: loop(h, xs).sum())(h0))
    many = draw(4, 2, 3, seed=3)
    torch.testing.assert_close(vmap(states)(many), torch.stack([loop(h, xs) for h in many]))
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(states(forward_ad.make_dual(h0, direction))).tangent
    torch.testing.assert_close(tangent, jvp(lambda h: loop(h, xs), (h0,), (direction,))[1])


@pytest.mark.parametrize("method", ["auto", "blelloch"])
def test_linear_scan_runs_in_plain_operations(method: str) -> None:
    a, b = draw(6, 2, 3, 3), draw(6, 2, 3, seed=1)

    def plain(a: Tensor) -> Tensor:
        states, h = [], torch.zeros(2, 3, dtype=EXACT)
        for t in reversed(range(len(a))):
            h = (a[t].transpose(-1, -2) @ h.unsqueeze(-1)).squeeze(-1) + b[t]
            states.append(h)
        return torch.stack(states[::-1])

    def scan(a: Tensor) -> Tensor:
        return tl.linear_scan(a, b, reverse=True, transpose=True, method=method)

    direction = draw(6, 2, 3, 3, seed=2)
    torch.testing.assert_close(jvp(scan, (a,), (direction,)), jvp(plain, (a,), (direction,)))
    torch.testing.assert_close(grad(lambda a: scan(a).sum())(a), grad(lambda a: plain(a).sum())(a))
    many = draw(4, 6, 2, 3, 3, seed=3)
    torch.testing.assert_close(vmap(scan)(many), torch.stack([plain(a) for a in many]))


@pytest.mark.parametrize("structure", ["diagonal", "dense", "block"])
def test_linear_scan_over_many_chunks(structure: Any) -> None:
    """So many steps that chunks run side by side."""
    shapes = {"diagonal": ((2, 3), (2, 3)), "dense": ((2, 3, 3), (2, 3)), "block": ((2, 2, 2, 3), (2, 2, 3))}[structure]
    a, b, h0 = draw(150, *shapes[0]) / 4, draw(150, *shapes[1], seed=1), draw(*shapes[1], seed=2)

    def loss(*given: Tensor) -> Tensor:
        return tl.linear_scan(*given, structure=structure).sin().sum()

    live = [part.requires_grad_() for part in (a.clone(), b.clone(), h0.clone())]
    expected = torch.autograd.grad(loss(*live), live)
    found = grad(loss, argnums=(0, 1, 2))(a, b, h0)
    torch.testing.assert_close(found, expected)
    _, slope = jvp(loss, (a, b, h0), (a, b, h0))
    torch.testing.assert_close(slope, sum((one * other).sum() for one, other in zip(found, (a, b, h0), strict=True)))
    by_a = vmap(grad(loss), in_dims=(0, None, None))(torch.stack([a, a / 2]), b, h0)
    torch.testing.assert_close(by_a, torch.stack([found[0], grad(loss)(a / 2, b, h0)]))


def test_odeint_refuses_and_its_sequential_run_does_not() -> None:
    y0, direction, t = draw(2, 3), draw(2, 3, seed=1), torch.linspace(0, 1, 20, dtype=EXACT)
    for options in ({}, {"solver": "shooting"}, {"solver": "sequential", "step": "implicit-midpoint"}):
        with (
            forward_ad.dual_level(),
            pytest.raises(RuntimeError, match=r"odeint\(.*torch.func.*: use solver='sequential' with step='rk4'"),
        ):
            tl.odeint(lambda t, y: -y, forward_ad.make_dual(y0, direction), t, **options)
    for solver in ("sequential", Sequential()):
        _, tangent = jvp(lambda y, s=solver: tl.odeint(lambda t, y: -y, y, t, s), (y0,), (direction,))
        torch.testing.assert_close(tangent[-1], direction * torch.exp(torch.tensor(-1.0)), rtol=1e-5, atol=1e-5)


def test_chain_backward_refuses() -> None:
    model = nn.Sequential(nn.Linear(3, 3)).double()
    with pytest.raises(RuntimeError, match=r"chain_backward does not run inside torch.func.*: use loss\(model\(x\)\)"):
        grad(lambda x: tl.chain_backward(model, x, Tensor.sum))(draw(2, 3))


def test_layers_of_ones_own_cells_run_one_step_after_the_other() -> None:
    """As `unroll` does; torch's transforms see every step."""
    layer = tl.Layer(tl.cells.CfC(3, 4), num_layers=2, bidirectional=True).double()
    loop = copy.deepcopy(layer)
    loop.solver = "sequential"
    x = torch.randn(9, 2, 3, dtype=torch.float64)
    for transform in (
        lambda f: torch.func.jvp(f, (x,), (torch.ones_like(x),))[1],
        lambda f: torch.func.grad(lambda x: f(x).square().sum())(x),
        lambda f: torch.func.vmap(f)(torch.stack([x, 2 * x])),
    ):
        found, right = (transform(lambda x, own=own: own(x)[0]) for own in (layer, loop))
        torch.testing.assert_close(found, right)
    assert "no sweeps inside torch.func" in layer.reports[0].reason
    with pytest.raises(RuntimeError, match="does not run inside"):
        torch.func.jvp(lambda x: layer(x, lengths=torch.tensor([9, 3]))[0], (x,), (x,))
