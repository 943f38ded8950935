"""Calls that are replays alone, with dropout inside the recurrence: masks are drawn anew for every call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import replayed_on_cpu as emulated
import torch
from replayed_on_cpu import Chunks, Graph
from test_recurrent_dropout import EXACT, LAYERS, OPTIONS, loop
from torch import Tensor

from timeloom.solve.steady_pass import Call

STEPS, INPUTS, UNITS = 47, 3, 4
CALLS_BEFORE = 4


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with emulated.on_a_cpu(monkeypatch):
        yield


def pair(kind: str, **options: Any) -> tuple[Any, Any]:
    ours = LAYERS[kind](INPUTS, UNITS, solver=Chunks(tol=2e-5), **options)
    exact = LAYERS[kind](INPUTS, UNITS, dtype=EXACT, **options)
    exact.load_state_dict(ours.state_dict())
    return ours, exact


def results(module: Any, call: Any, x: Tensor, seed: int) -> list[Tensor]:
    torch.manual_seed(seed)
    module.zero_grad()
    leaf = x.clone().requires_grad_()
    y, final = call(leaf)
    parts = final if isinstance(final, tuple) else (final,)
    ((y * torch.linspace(0.2, 1.0, y.numel()).view_as(y).sin()).sum() + sum(part.sum() for part in parts)).backward()
    return [y.detach(), *(part.detach() for part in parts), leaf.grad, *(one.grad for one in module.parameters())]


def assert_right(ours: Any, exact: Any, x: Tensor, seed: int) -> None:
    found = results(ours, ours, x, seed)
    right = results(exact, lambda x: loop(exact, x), x.double(), seed)
    for one, truth in zip(found, right, strict=True):
        assert float((one.double() - truth).abs().max()) <= 3e-4 * max(1.0, float(truth.abs().max()))


def move(ours: Any, exact: Any) -> None:
    """A step of an optimizer."""
    with torch.no_grad():
        for own, right in zip(ours.parameters(), exact.parameters(), strict=True):
            own.add_(0.01 * torch.randn_like(own))
            right.copy_(own)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", LAYERS)
def test_results_and_gradients_are_those_of_a_loop_with_the_same_masks(
    kind: str, options: str, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inputs, masks and weights change from call to call; one layer, and two in both directions."""
    for more in ({}, {"num_layers": 2, "bidirectional": True}):
        ours, exact = pair(kind, **OPTIONS[options], **more)
        for call in range(CALLS_BEFORE + 3):
            before = Graph.replays
            assert_right(ours, exact, torch.randn(STEPS, batch, INPUTS), seed=call)
            move(ours, exact)
        assert ours._steady
        assert Graph.replays - before == 2 * ours._stacked


@pytest.mark.parametrize("options", OPTIONS)
def test_masks_of_a_call_that_did_not_count_are_drawn_again(options: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, exact = pair("GRU", **OPTIONS[options])
    for call in range(CALLS_BEFORE):
        assert_right(ours, exact, torch.randn(STEPS, 3, INPUTS), seed=call)
    monkeypatch.setattr(Call, "certify", lambda self: None)
    assert_right(ours, exact, torch.randn(STEPS, 3, INPUTS), seed=11)


@pytest.mark.parametrize("options", OPTIONS)
def test_backward_passes_in_any_order(options: str) -> None:
    """Masks of a call that another one has followed are those that its gradients are of."""
    ours, exact = pair("LSTM", **OPTIONS[options])
    x = torch.randn(STEPS, 3, INPUTS)
    for call in range(CALLS_BEFORE):
        assert_right(ours, exact, x, seed=call)
    found: list[Tensor] = []
    for seed in (21, 22):
        torch.manual_seed(seed)
        found.append(ours(x)[0])
    for seed, y in zip((21, 22), found, strict=True):
        grads = torch.autograd.grad(y.square().sum(), list(ours.parameters()))
        torch.manual_seed(seed)
        right = torch.autograd.grad(loop(exact, x.double())[0].square().sum(), list(exact.parameters()))
        for one, truth in zip(grads, right, strict=True):
            assert float((one.double() - truth).abs().max()) <= 3e-4 * max(1.0, float(truth.abs().max()))


def test_evaluation_is_another_call() -> None:
    ours, exact = pair("GRU", zoneout=0.3)
    for call in range(CALLS_BEFORE + 1):
        assert_right(ours, exact, torch.randn(STEPS, 3, INPUTS), seed=call)
    ours.eval(), exact.eval()
    for call in range(CALLS_BEFORE + 2):
        assert_right(ours, exact, torch.randn(STEPS, 3, INPUTS), seed=call)
    assert len(ours._steady) == 2
    ours.zoneout = 0.0
    assert not ours._steady
