"""The coarsest level of multigrid in kernels is the coarsest level in torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import timeloom as tl
from timeloom.cells import Cell, GRUCell, ImplicitGRUCell, LSTMCell
from timeloom.cells.coarse import Coarse
from timeloom.kernels.cpu import build
from timeloom.mgrit import marched, relax
from timeloom.mgrit.propagators import Adjoint, Forward, Propagator
from timeloom.mgrit.relax import Level, serial
from timeloom.solvers import MGRIT

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(build.unavailable() is not None, reason="needs a C compiler"),
]

STEPS, BATCH, SIZE = 19, 3, 5


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def level_of(coarse: Coarse, cell: Cell, backwards: bool, marks: Tensor | None = None) -> Level:
    """A coarsest level of random points, inputs and right-hand sides, with one interval more that leads onward."""
    torch.manual_seed(0)
    span = torch.randint(1, 9, (STEPS + 1, BATCH, 1)).double()
    inputs, state, first = draw(STEPS + 1, BATCH, 3 * SIZE), draw(STEPS + 1, BATCH, SIZE), draw(BATCH, SIZE)
    propagate: Propagator = Forward(coarse, span, inputs, marks, first, True)
    if backwards:
        propagate = Adjoint(cell, coarse, span, inputs, state.tanh(), None, marks, None, first, True)
    level = Level.of(propagate, STEPS, 1, 0, (BATCH, SIZE))
    level.u, level.f = draw(STEPS + 1, BATCH, SIZE), 0.1 * draw(STEPS + 1, BATCH, SIZE)
    return level


def solved(level: Level, kernels: bool, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    monkeypatch.setattr(relax, "FEWEST_MARCHED", 0 if kernels else 1 << 30)
    level.u[1:] = float("nan")
    serial(level)
    return level.u.clone()


def cells() -> tuple[GRUCell, ImplicitGRUCell]:
    torch.manual_seed(1)
    weights = 0.6 * draw(3 * SIZE, SIZE), draw(SIZE)
    return GRUCell(*weights), ImplicitGRUCell(*weights, gamma=0.7)


@pytest.mark.parametrize(("which", "kind"), [(0, "implicit"), (1, "implicit"), (0, "frozen"), (1, "frozen")])
@pytest.mark.parametrize("backwards", [False, True], ids=["forward", "backward"])
def test_kernels_march_as_torch_does(which: int, kind: str, backwards: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marched, "PAYS_FROM", 0)
    made: list[Tensor | None] = []

    def watched(*given: object) -> Tensor | None:
        made.append(marched.marched(*given))  # type: ignore[arg-type]
        return made[-1]

    monkeypatch.setattr(relax, "marched", watched)
    cell = cells()[which]
    level = level_of(cell.coarse(kind), cell, backwards)
    expected = solved(level, False, monkeypatch)
    found = solved(level, True, monkeypatch)
    assert len(made) == 1
    assert made[0] is not None
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-14)
    level.u[0] += 1.0  # other values by the same kernels
    level.f *= -2.0
    torch.testing.assert_close(
        solved(level, True, monkeypatch), solved(level, False, monkeypatch), rtol=1e-13, atol=1e-14
    )


def test_what_kernels_cannot_do_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = cells()[0]
    added, coarse = draw(STEPS, BATCH, SIZE), cell.coarse("frozen")
    for backwards in (False, True):
        marks = torch.zeros(STEPS + 1, BATCH, 1, dtype=torch.bool)
        assert level_of(coarse, cell, backwards).propagate.marching(added) is not None
        assert level_of(coarse, cell, backwards, marks).propagate.marching(added) is None  # resets
    span = torch.ones(STEPS, BATCH, 1).double()
    span[3] = 0  # nothing to the power of nothing has no logarithm
    assert coarse.marching(draw(STEPS, BATCH, 3 * SIZE), span, added) is None
    other = LSTMCell(draw(4 * SIZE, SIZE)).coarse("frozen")
    assert other.marching(draw(STEPS, BATCH, 4 * SIZE), span, added) is None
    monkeypatch.setattr(marched, "PAYS_FROM", 1 << 30)
    small = GRUCell(draw(6, 2), draw(2)).coarse("implicit").marching(draw(9, 1, 6), torch.ones(9, 1, 1), draw(9, 1, 2))
    assert small is not None
    assert marched.marched(small, draw(1, 2)) is None  # not yet


def test_the_published_cycles_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    x, found = torch.randn(300, 2, 3, generator=torch.Generator().manual_seed(0)), []
    monkeypatch.setattr(marched, "PAYS_FROM", 0)
    for fewest in (1 << 30, 0):
        monkeypatch.setattr(relax, "FEWEST_MARCHED", fewest)
        torch.manual_seed(0)
        layer = tl.ImplicitGRU(3, SIZE, solver=MGRIT.paper())
        y, _ = layer(x)
        y.square().sum().backward()
        found.append([y.detach(), *(parameter.grad for parameter in layer.parameters())])
    for mine, true in zip(*found, strict=True):
        torch.testing.assert_close(mine, true, rtol=1e-5, atol=1e-6)
