"""Where torch's rules are special, kernels keep to them: at points that random rows do not meet."""

from __future__ import annotations

import pytest
import torch
from beside_loop import Step, agrees, draw
from torch import Tensor, nn

import timeloom as tl
from timeloom.compile import remember
from timeloom.compile.fuse import compile_step
from timeloom.compile.refusal import NotFused
from timeloom.kernels.cpu import build

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(build.unavailable() is not None, reason=f"no C kernels: {build.unavailable()}"),
]
UNITS = 6


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remember, "FEWEST_STEPS", 0)


@pytest.mark.parametrize("unbiased", [True, False])
def test_the_deviation_of_equal_numbers_has_no_gradient(unbiased: bool) -> None:
    """A layer norm by hand, begun at zeros."""
    inner = nn.Linear(UNITS, UNITS, bias=False).double()

    def step(h: Tensor, x: Tensor) -> Tensor:
        y = inner(h)
        y = (y - y.mean(-1, keepdim=True)) / (y.std(-1, unbiased=unbiased, keepdim=True) + 1e-3)
        return torch.tanh(y + x)

    for h0 in (draw(2, UNITS), torch.zeros(2, UNITS, dtype=torch.float64)):
        assert agrees(step, h0, draw(20, 2, UNITS)).endswith("; fused")


def test_hard_gates_have_no_slope_at_their_edges() -> None:
    """In float32: torch's own slope of hardsigmoid between them is good to that alone."""

    def step(h: Tensor, x: Tensor) -> Tensor:
        return nn.functional.hardsigmoid(h + x[:, :1]) + nn.functional.hardswish(h - x[:, 1:]) * 0.5

    edges = torch.tensor([[3.0, -3.0, 6.0, -6.0, 0.0, 1.0]])
    tl.unroll(step, torch.randn(1, UNITS), torch.randn(4, 1, 2))
    h0 = [edges.clone().requires_grad_() for _ in "ab"]
    states, report = tl.unroll(step, h0[0], torch.zeros(1, 1, 2))
    assert report.reason.endswith("; fused")
    states.sum().backward()
    step(h0[1], torch.zeros(1, 2)).sum().backward()
    assert h0[0].grad is not None
    assert h0[1].grad is not None
    assert torch.allclose(h0[0].grad, h0[1].grad, atol=1e-6)


def both(h: Tensor, x: Tensor) -> Tensor:
    """A sum of truths is a truth, not two."""
    return 0.5 * h * ((h > 0) + (h > 3)) + x


def test_sums_of_truths_are_truths() -> None:
    far = torch.full((2, UNITS), 9.0, dtype=torch.float64)
    for h0 in (0.1 * draw(2, UNITS), far):
        assert agrees(both, h0, 0.1 * draw(5, 2, UNITS)).endswith("; fused")


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (lambda h, x: h * ((h > 0).long() | 2 * (h > 9).long()) + x, "torch.bitwise_or of whole numbers"),
        (lambda h, x: h * ((h > 0).long() & 1) + x, "torch.bitwise_and of whole numbers"),
        (lambda h, x: h * ((h < 9).to(torch.uint8) - 1) + x, "torch.sub of torch.uint8, which wraps around"),
    ],
)
def test_whole_numbers_are_left_to_torch(step: Step, said: str) -> None:
    with pytest.raises(NotFused, match=said):
        compile_step(step, (draw(4, 3),), False, draw(4, 3))
    agrees(step, torch.full((2, UNITS), 12.0, dtype=torch.float64), 0.1 * draw(1, 2, UNITS))


ORDER, SOME = torch.tensor([2, 0, 1, 5, 5, 3]), torch.tensor([True, False, True, True, False, False])
INDEXED: dict[str, Step] = {
    "a tensor": lambda h, x: torch.tanh(0.9 * h[:, ORDER] + x),
    "a list": lambda h, x: torch.tanh(0.9 * h[..., [1, 0, 3, 2, 5, 4]] + x),
    "heads": lambda h, x: torch.tanh(0.9 * h.view(-1, 2, 3)[:, [1, 0, 1], [2, 0, 1]].repeat(1, 2) + x),
    "a mask": lambda h, x: torch.tanh(0.9 * torch.cat([h[:, SOME], h[:, ~SOME]], -1) + x),
}


@pytest.mark.parametrize("name", INDEXED)
def test_constant_indices_only_move_units(name: str) -> None:
    h0, xs = draw(3, UNITS), draw(40, 3, UNITS)
    assert agrees(INDEXED[name], h0, xs).endswith("; fused")


def test_an_index_that_changes_is_seen() -> None:
    order = torch.arange(UNITS)

    def step(h: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(0.9 * h[:, order] + x)

    h0, xs = draw(3, UNITS), draw(40, 3, UNITS)
    assert agrees(step, h0, xs).endswith("; fused")
    order.copy_(ORDER)
    assert agrees(step, h0, xs).endswith("; fused")


def test_rows_by_their_numbers_run_as_they_are() -> None:
    def step(h: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(0.9 * h[torch.arange(len(h))] + x)

    assert "by indices that depend on the number of rows" in agrees(step, draw(3, UNITS), draw(40, 3, UNITS))


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (lambda h, x: h[h[:, 0] > -9] + x, "torch.index by indices that depend on the state"),
        (lambda h, x: h[:, (x[0] < 9).long()] + x, "torch.index by indices that depend on x"),
    ],
)
def test_indices_that_are_not_constant_are_told(step: Step, said: str) -> None:
    with pytest.raises(NotFused, match=said):
        compile_step(step, (draw(4, 3),), False, draw(4, 3))
