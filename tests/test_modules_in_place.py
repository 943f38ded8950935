"""Timeloom's modules in the place of torch's, where code that knows only torch meets them."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

import timeloom as tl
from timeloom.solvers import Shooting

pytestmark = pytest.mark.usefixtures("one_thread")
NAMES = ("GRU", "LSTM", "RNN")


@pytest.mark.parametrize("steps", [5, 100])
@pytest.mark.parametrize("name", NAMES)
def test_torchs_name_for_ours(monkeypatch: pytest.MonkeyPatch, name: str, steps: int) -> None:
    """`torch.nn.GRU = timeloom.GRU`, as one line before a program of someone else's."""
    theirs = getattr(nn, name)(4, 8, 2)
    with monkeypatch.context() as patched:
        for each in NAMES:
            patched.setattr(nn, each, getattr(tl, each))
        ours = getattr(torch.nn, name)(4, 8, 2)
        assert type(ours) is getattr(tl, name)
        ours.load_state_dict(theirs.state_dict())
        x = torch.randn(steps, 3, 4)
        y, _ = deepcopy(ours)(x)
        y.sum().backward()
    torch.testing.assert_close(y, theirs(x)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["GRU", "RNN"])
def test_a_projection_is_refused_as_torch_does(name: str) -> None:
    said = []
    for library in (nn, tl):
        with pytest.raises(ValueError, match="proj_size") as told:
            getattr(library, name)(4, 8, proj_size=2)
        said.append(str(told.value))
    assert said[0] == said[1]


@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_argument_is_refused(name: str) -> None:
    with pytest.raises(TypeError, match="hidden"):
        getattr(tl, name)(4, 8, hidden=2)


@pytest.mark.parametrize("solver", ["auto", Shooting(chunk=8), "deer", "mgrit"])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_contiguous(name: str, solver: Any) -> None:
    module = getattr(tl, name)(4, 8, solver=solver)
    x = torch.randn(100, 2, 4, requires_grad=True)
    leaves = {"x": x, **dict(module.named_parameters())}
    grads = torch.autograd.grad(module(x)[0].square().sum(), list(leaves.values()))
    assert [leaf for leaf, grad in zip(leaves, grads, strict=True) if not grad.is_contiguous()] == []
