"""Generalised teacher forcing and Lyapunov exponents, against loops and numbers known by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import timeloom as tl
from timeloom.forcing import annealed, contracting_alpha

pytestmark = pytest.mark.usefixtures("one_thread")
T, B, N, D = 37, 3, 4, 2


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Elman(nn.Module):
    """Recurrent weights large enough to be chaotic."""

    def __init__(self, inputs: int = D, scale: float = 1.5) -> None:
        super().__init__()
        self.recurrent = nn.Parameter(scale * draw(N, N, seed=1))
        self.input = nn.Parameter(draw(inputs, N, seed=2))

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(h @ self.recurrent + x @ self.input)


def by_hand(cell: Any, alpha: float, h: Tensor, teacher: Tensor, xs: Tensor) -> Tensor:
    states = []
    for target, x in zip(teacher, xs, strict=True):
        width = target.shape[-1]
        drawn = torch.where(target.isnan(), h[:, :width], (1 - alpha) * h[:, :width] + alpha * target.nan_to_num())
        h = cell(torch.cat([drawn, h[:, width:]], -1), x)
        states.append(h)
    return torch.stack(states)


@pytest.mark.parametrize("solver", ["deer", "shooting", "auto", "sequential"])
@pytest.mark.parametrize(("units", "missing"), [(None, False), (None, True), (2, True)])
def test_states_and_gradients_are_those_of_the_loop(solver: str, units: int | None, missing: bool) -> None:
    alpha, width = 0.375, units or N
    teacher, xs, h0 = draw(T, B, width, seed=3), draw(T, B, D, seed=4), draw(B, N, seed=5)
    if missing:
        teacher[draw(T, B, width, seed=6) > 0.8] = torch.nan
    weight, found = draw(T, B, N, seed=7), []
    for run in ("ours", "theirs"):
        cell = Elman()
        given = [part.clone().requires_grad_() for part in (teacher, xs, h0)]
        if run == "ours":
            forced = tl.TeacherForcing(cell, alpha, units).double()
            states, report = tl.unroll(forced, given[2], forced.inputs(*given[:2]), solver=solver)
            assert report.converged
        else:
            states = by_hand(cell, alpha, given[2], *given[:2])
        (states * weight).sum().backward()
        found.append([states.detach(), *(part.grad for part in (*given, *cell.parameters()))])
    for ours, theirs in zip(*found, strict=True):
        assert ours.isfinite().all()
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_parts_of_a_state_and_no_inputs() -> None:
    def turn(state: Any, x: Tensor) -> Any:
        assert x.shape[1:] == (0,)
        return torch.sin(2 * state[0] + state[1]), 0.5 * state[1]

    teacher, parts = draw(T, B, N, seed=3), (draw(B, N, seed=4), draw(B, N, seed=5))
    forced = tl.TeacherForcing(turn, 0.5).double()
    (h, c), _ = tl.unroll(forced, parts, forced.inputs(teacher))
    first, second = parts
    for step in range(T):
        first, second = turn((0.5 * first + 0.5 * teacher[step], second), teacher[step][:, :0])
        torch.testing.assert_close((h[step], c[step]), (first, second), rtol=1e-5, atol=1e-6)


def test_the_ends_of_the_scale() -> None:
    cell, teacher, xs, h0 = Elman(), draw(T, B, N, seed=3), draw(T, B, D, seed=4), draw(B, N, seed=5)
    free = tl.TeacherForcing(cell, 0.0)
    torch.testing.assert_close(
        tl.unroll(free, h0, free.inputs(teacher, xs))[0], tl.unroll(cell, h0, xs)[0], rtol=1e-5, atol=1e-6
    )
    plain = tl.TeacherForcing(cell, 1.0)
    states, report = tl.unroll(plain, h0, plain.inputs(teacher, xs), solver="deer")
    torch.testing.assert_close(states, cell(teacher.flatten(0, 1), xs.flatten(0, 1)).view(T, B, N))
    assert report.iterations <= 2


def test_schedules() -> None:
    geometric, linear = annealed(0.4, 0.1, 10), annealed(0.5, 0, 5)
    assert [geometric(0), geometric(10), geometric(99)] == pytest.approx([0.4, 0.1, 0.1])
    assert geometric(5) == pytest.approx(0.2)
    assert [linear(step) for step in range(7)] == pytest.approx([0.5, 0.4, 0.3, 0.2, 0.1, 0, 0])
    forced = tl.TeacherForcing(Elman(), geometric)
    for step in range(1, 4):
        assert forced.advance() == pytest.approx(geometric(step))
    resumed = tl.TeacherForcing(Elman(), geometric)
    resumed.load_state_dict(forced.state_dict())
    assert resumed.advance() == pytest.approx(geometric(4))
    assert "alpha=0.23" in repr(resumed)


def henon(h: Tensor, x: Tensor) -> Tensor:
    """The Hénon map, whose largest exponent is 0.419."""
    return torch.stack([1 - 1.4 * h[:, 0] ** 2 + h[:, 1], 0.3 * h[:, 0]], -1)


def test_a_chaotic_cell_contracts_once_it_is_forced_enough() -> None:
    nothing, h0 = torch.zeros(8000, 1, 0, dtype=torch.float64), torch.zeros(1, 2, dtype=torch.float64)
    path = torch.cat([h0.unsqueeze(0), tl.unroll(henon, h0, nothing, solver="sequential")[0][:-1]])
    exponent = float(tl.lyapunov_exponents(henon, h0, nothing))
    assert exponent == pytest.approx(0.419, abs=0.01)
    least = contracting_alpha(henon, path)
    assert least == pytest.approx(1 - math.exp(-exponent), rel=1e-9)
    for alpha, sign in ((0.9 * least, 1), (1.1 * least, -1)):
        forced = tl.TeacherForcing(henon, alpha).double()
        grown = tl.lyapunov_exponents(forced, h0, forced.inputs(path), along=path)
        assert math.copysign(1, float(grown)) == sign
    assert contracting_alpha(lambda h, x: 0.5 * h, path) == 0


def test_exponents_of_a_linear_cell() -> None:
    turn = torch.linalg.qr(draw(3, 3))[0]
    factors = torch.tensor([1.5, 0.8, 0.1], dtype=torch.float64)
    matrix = turn @ torch.diag(factors) @ turn.T
    xs = torch.zeros(200, 2, 0, dtype=torch.float64)
    found = tl.lyapunov_exponents(lambda h, x: h @ matrix, draw(2, 3), xs, count=3, discard=80)
    torch.testing.assert_close(found, factors.log().expand(2, 3), rtol=1e-9, atol=1e-9)
    pair = tl.lyapunov_exponents(lambda s, x: (0.5 * s[0], 2 * s[1]), (draw(2, 1), draw(2, 1)), xs, 2, discard=50)
    torch.testing.assert_close(pair, torch.tensor([[2.0, 0.5]] * 2, dtype=torch.float64).log())


def test_the_exponents_of_the_logistic_map() -> None:
    """ln 2 at r = 4, by theory."""
    xs = torch.zeros(20_000, 4, 0, dtype=torch.float64)
    found = tl.lyapunov_exponents(lambda h, x: 4 * h * (1 - h), draw(4, 1).sigmoid(), xs, discard=100)
    assert float(found.mean()) == pytest.approx(math.log(2), abs=0.01)


WRONG = {
    "alpha": (lambda: tl.TeacherForcing(Elman(), 1.5), ValueError, r"between 0 .* and 1 .*, got 1\.5"),
    "kind": (lambda: tl.TeacherForcing(Elman(), "high"), TypeError, "number between 0 and 1, or a schedule, got str"),
    "schedule": (lambda: tl.TeacherForcing(Elman(), lambda k: 2.0), ValueError, "got 2.0"),
    "cell": (lambda: tl.TeacherForcing(3, 0.5), TypeError, "cell must be a function or module"),
    "units": (lambda: tl.TeacherForcing(Elman(), 0.5, 0), ValueError, "units must be a whole number"),
    "steps": (lambda: annealed(0.5, 0.1, 0), ValueError, "steps must be a whole number"),
    "teacher": (lambda: tl.TeacherForcing(Elman(), 0.5).inputs(draw(T, B)), ValueError, r"\(T, B, units\)"),
    "width": (lambda: tl.TeacherForcing(Elman(), 0.5, 2).inputs(draw(T, B, 3)), ValueError, "expected units=2"),
    "xs": (lambda: tl.TeacherForcing(Elman(), 0.5).inputs(draw(T, B, N), draw(T, 1, D)), ValueError, "xs must be"),
    "narrow": (lambda: tl.TeacherForcing(Elman(), 0.5)(draw(B, N), draw(B, 2)), ValueError, "does not fit"),
    "count": (lambda: exponents(count=N + 1), ValueError, "at most that many"),
    "discard": (lambda: exponents(discard=T), ValueError, "leaves no step to count"),
    "along": (lambda: exponents(along=draw(T, B, 1)), ValueError, "along must hold the state before every step"),
}


def exponents(**options: Any) -> Tensor:
    return tl.lyapunov_exponents(Elman(), draw(B, N), draw(T, B, D), **options)


@pytest.mark.parametrize(("call", "error", "message"), WRONG.values(), ids=WRONG)
def test_wrong_input_is_told(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
