"""Tensors that stand for others, as DTensor and quantised weights do: kernels cannot read them, and must not try."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import timeloom as tl
from timeloom.cells import LiGRU

pytestmark = pytest.mark.usefixtures("one_thread")
T, B, D, H = 600, 2, 3, 4


def two(tensor: Tensor) -> Any:
    return TwoTensor(tensor.detach().clone(), tensor.detach().clone())


def with_wrapped_weights(module: nn.Module) -> Any:
    for part in module.modules():
        for name, parameter in list(part._parameters.items()):
            if parameter is not None:
                part.register_parameter(name, nn.Parameter(two(parameter)))
    return module


@pytest.mark.parametrize("kind", ["GRU", "LSTM", "RNN"])
@pytest.mark.parametrize("solver", ["auto", "deer", "shooting"])
def test_weights_of_a_layer_run_as_torch_takes_them(kind: str, solver: str) -> None:
    torch.manual_seed(0)
    theirs = getattr(nn, kind)(D, H)
    ours = getattr(tl, kind)(D, H, solver=solver)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(T, B, D)
    found = []
    for layer in (ours, theirs):
        y = with_wrapped_weights(layer)(x)[0]
        assert type(y) is TwoTensor
        y.sum().backward()
        found.append([y.a, *(parameter.grad.a for parameter in layer.parameters())])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    assert "no sweeps for weights that are a TwoTensor" in ours.reports[0].reason


REFUSED = {
    "resets": (lambda: tl.GRU(D, H), {"resets": torch.zeros(T, B, dtype=torch.bool)}),
    "states": (lambda: tl.LSTM(D, H), {"return_states": True}),
    "zoneout": (lambda: tl.GRU(D, H, zoneout=0.1), {}),
    "implicit": (lambda: tl.ImplicitGRU(D, H), {}),
    "layer": (lambda: tl.Layer(LiGRU(D, H)), {"lengths": torch.tensor([T, 5])}),
}


@pytest.mark.parametrize(("make", "given"), REFUSED.values(), ids=REFUSED)
def test_what_torch_has_not_is_refused(make: Any, given: dict[str, Any]) -> None:
    with pytest.raises(NotImplementedError, match=r"no sweeps for .*TwoTensor"):
        with_wrapped_weights(make())(torch.randn(T, B, D), **given)


@pytest.mark.parametrize("which", ["a", "b", "h0"])
def test_a_linear_scan(which: str) -> None:
    given = {"a": torch.rand(50, B, D), "b": torch.randn(50, B, D), "h0": torch.randn(B, D)}
    wrapped = given | {which: two(given[which]).requires_grad_()}
    found = tl.linear_scan(**wrapped)
    torch.testing.assert_close(found.a, tl.linear_scan(**given))
    found.sum().backward()
    plain = given | {which: given[which].requires_grad_()}
    tl.linear_scan(**plain).sum().backward()
    torch.testing.assert_close(wrapped[which].grad.a, plain[which].grad)


@pytest.mark.parametrize("which", ["xs", "h0", "weights"])
def test_a_cell_of_ones_own(which: str) -> None:
    torch.manual_seed(0)
    rec = nn.Linear(D, D)
    given: dict[str, Any] = {"h0": torch.zeros(B, D), "xs": torch.randn(T, B, D)}
    expected, _ = tl.unroll(lambda h, x: torch.tanh(rec(h) + x), **given, solver="sequential")
    (slope,) = torch.autograd.grad(expected.sum(), rec.weight)
    if which == "weights":
        with_wrapped_weights(rec)
    else:
        given[which] = two(given[which])
    states, report = tl.unroll(lambda h, x: torch.tanh(rec(h) + x), **given)
    states.sum().backward()
    grad = rec.weight.grad
    assert grad is not None
    torch.testing.assert_close(getattr(states, "a", states), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(getattr(grad, "a", grad), slope, rtol=1e-4, atol=1e-4)
    assert "TwoTensor" in report.reason
