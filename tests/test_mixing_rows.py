"""Steps whose rows look at each other: refused in the first call, since chunks of time are rows, too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import timeloom as tl
from timeloom.compile import remember

pytestmark = pytest.mark.usefixtures("one_thread")
UNITS = 4
ALONE = r"treat rows independently .* chunks of time are rows, too"


def draw(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


WEIGHT = 0.4 * draw(UNITS, UNITS)
Mix = Callable[[Tensor, Tensor], Tensor]
MIXES: dict[str, Mix] = {
    "batch norm of x": lambda h, x: h @ WEIGHT + F.batch_norm(x, None, None, training=True),
    "batch norm of the state": lambda h, x: F.batch_norm(h @ WEIGHT, None, None, training=True) + x,
    "softmax of x over rows": lambda h, x: h @ WEIGHT + x.softmax(0),
    "mean of x": lambda h, x: h @ WEIGHT + x - x.mean(0),
    "order of x": lambda h, x: h @ WEIGHT + x.flip(0),
    "sorted x": lambda h, x: h @ WEIGHT + x.sort(0).values,
    "norm of all": lambda h, x: h @ WEIGHT / h.norm() + x,
    "number of rows": lambda h, x: h @ WEIGHT + x / len(x),
    "place of a row": lambda h, x: h @ WEIGHT + x * torch.arange(len(x)).unsqueeze(1),
    "attention between rows": lambda h, x: (h @ h.t()).softmax(-1) @ h @ WEIGHT + x,
    "largest of rows": lambda h, x: h @ WEIGHT - h.amax(0) + x,
}


@pytest.mark.parametrize("name", MIXES)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("fewest", [0, 10**6], ids=["compiled", "not compiled yet"])
def test_mixing_is_refused_in_every_call(name: str, batch: int, fewest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remember, "FEWEST_STEPS", fewest)

    def step(h: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(MIXES[name](h, x))

    h0, xs = draw(batch, UNITS), draw(30, batch, UNITS, seed=5)
    for solver in ("auto", "auto", "auto", tl.solvers.Shooting(chunk=7)):
        with pytest.raises(ValueError, match=ALONE):
            tl.unroll(step, h0, xs, solver)
    if batch > 1:  # batch norm refuses a single row
        h, states = h0, tl.unroll(step, h0, xs, "sequential")[0]
        for x in xs:
            h = step(h, x)
        assert torch.allclose(states[-1], h)


def test_mixing_that_begins_later_is_seen() -> None:
    """Where the first inputs are padding, or one row is like another, nothing mixes yet."""
    norm = nn.BatchNorm1d(UNITS, track_running_stats=False).double()
    xs = torch.zeros(30, 2, UNITS, dtype=torch.float64)
    xs[10:] = draw(20, 2, UNITS)
    with pytest.raises(ValueError, match=ALONE):
        tl.unroll(lambda h, x: torch.tanh(h @ WEIGHT + norm(x)), draw(2, UNITS), xs)


def test_a_layer_refuses_them_too() -> None:
    class Normed(tl.cells.Step):
        def __init__(self, inputs: int, units: int) -> None:
            super().__init__(inputs, units)
            self.inner, self.norm = nn.Linear(inputs + units, units), nn.BatchNorm1d(units)

        def forward(self, h: Tensor, x: Tensor) -> Tensor:
            return torch.tanh(self.norm(self.inner(torch.cat([h, x], -1))))

    layer = tl.Layer(Normed(3, UNITS))
    with pytest.raises(ValueError, match=ALONE):
        layer(torch.randn(20, 2, 3))
    layer.eval()(torch.randn(20, 2, 3))


def test_a_step_of_large_terms_that_cancel_is_run() -> None:
    """Rows alone are rounded otherwise than in a batch, which is not mixing."""
    weight = 1e4 * torch.randn(64, 64, generator=torch.Generator().manual_seed(0))

    def step(h: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(0.1 * (h @ weight - h @ (weight - 0.01)) + x)

    h0, xs = torch.randn(2, 64, generator=torch.Generator().manual_seed(1)), torch.zeros(20, 2, 64)
    assert tl.unroll(step, h0, xs)[0].isfinite().all()


def test_a_step_for_one_number_of_rows_is_refused_in_words() -> None:
    mask = draw(3, UNITS)

    def step(h: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(h @ WEIGHT + x) * mask

    h0, xs = draw(3, UNITS), draw(30, 3, UNITS)
    with pytest.raises(ValueError, match=r"runs on 3 rows, those of the batch, and not on other numbers of rows"):
        tl.unroll(step, h0, xs)
    assert tl.unroll(step, h0, xs, "sequential")[0].shape == xs.shape
    with pytest.raises(RuntimeError, match="must match the size"):
        tl.unroll(step, draw(2, UNITS), draw(30, 2, UNITS))


def test_states_that_a_step_is_not_made_for_do_not_count() -> None:
    """A Kalman filter, whose covariance is nothing but small: near it are matrices that have no root."""

    def step(state: tuple[Tensor, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        mean, covariance = state
        covariance = 0.9 * covariance + 1e-6 * torch.eye(2, dtype=x.dtype)
        root = torch.linalg.cholesky(covariance)
        gain = torch.cholesky_solve(covariance, torch.linalg.cholesky(covariance + 0.1 * torch.eye(2, dtype=x.dtype)))
        mean = mean + ((x - mean).unsqueeze(-2) @ gain).squeeze(-2)
        return mean, root @ root.mT - covariance @ gain

    h0 = torch.zeros(3, 2, dtype=torch.float64), 1e-5 * torch.eye(2, dtype=torch.float64).expand(3, 2, 2)
    xs = draw(20, 3, 2)
    (means, _), _ = tl.unroll(step, h0, xs)
    state = h0
    for x in xs:
        state = step(state, x)
    assert torch.allclose(means[-1], state[0])
