"""Cells that change between calls where few steps, or no value at all, show it: every call is the loop over the cell as
it is now, outputs and gradients.
"""

from __future__ import annotations

import copy
import gc
import pickle
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import timeloom as tl
from timeloom.compile import fuse, remember
from timeloom.kernels.cpu import build

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(build.unavailable() is not None, reason=f"no C kernels: {build.unavailable()}"),
]
UNITS, STEPS = 3, 40
SPIKE = 21
"""The step that meets limits: none of those that are compared in every call."""


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remember, "FEWEST_STEPS", 0)


def draw(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def inputs() -> Tensor:
    x = 0.1 * draw(STEPS, 2, UNITS)
    x[SPIKE, 1] = 8.0
    return x


def solved(cell: Any, held: list[Tensor], loops: bool = False) -> list[Tensor]:
    """All states, and the gradients of x, of the initial state and of what is held."""
    x, h0 = inputs().requires_grad_(), (0.5 * draw(2, UNITS)).requires_grad_()
    if loops:
        h, states = h0, []
        for row in x:
            h = cell(h, row)
            states.append(h)
        found = torch.stack(states)
    else:
        found, report = tl.unroll(cell, h0, x)
        solved.told = report.reason  # type: ignore[attr-defined]
    leaves = [x, h0, *(one for one in held if one.requires_grad)]
    return [found.detach(), *torch.autograd.grad((found * draw(*found.shape, seed=5)).sum(), leaves)]


def agrees(cell: Any, held: list[Tensor]) -> str:
    """Compares with the loop; what the report says."""
    for given, expected in zip(solved(cell, held), solved(cell, held, loops=True), strict=True):
        assert torch.allclose(given, expected, rtol=1e-9, atol=1e-10)
    return str(solved.told)  # type: ignore[attr-defined]


WEIGHT = nn.Parameter(0.3 * draw(UNITS, UNITS))
NAMED, BY_KEY, IN_A_CLASS = types.SimpleNamespace(limit=99.0), {"limit": 99.0}, type("Settings", (), {"limit": 99.0})
LIMIT, READ, HELD = 99.0, np.array([99.0]), torch.tensor(99.0, dtype=torch.float64)


def moved(h: Tensor, x: Tensor) -> Tensor:
    return 0.5 * h @ WEIGHT + x


def by_namespace(h: Tensor, x: Tensor) -> Tensor:
    return moved(h, x).clamp(-NAMED.limit, NAMED.limit)


def by_key(h: Tensor, x: Tensor) -> Tensor:
    return moved(h, x).clamp(-BY_KEY["limit"], BY_KEY["limit"])


def by_class(h: Tensor, x: Tensor) -> Tensor:
    return moved(h, x).clamp(-IN_A_CLASS.limit, IN_A_CLASS.limit)  # type: ignore[attr-defined]


def by_inner_function(h: Tensor, x: Tensor) -> Tensor:
    return torch.stack([(lambda one: one.clamp(-LIMIT, LIMIT))(one) for one in moved(h, x).unbind(-1)], -1)


def by_array(h: Tensor, x: Tensor) -> Tensor:
    return moved(h, x).clamp(-float(READ[0]), float(READ[0]))


def by_item(h: Tensor, x: Tensor) -> Tensor:
    return moved(h, x).clamp(-HELD.item(), HELD.item())


class Limited(nn.Module):
    shared = 99.0

    def __init__(self, of: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.3 * draw(UNITS, UNITS))
        self._own, self._of, self._set = 99.0, of, {99.0}

    @property
    def limit(self) -> float:
        return {"own": self._own, "shared": self.shared, "set": max(self._set), "global": LIMIT}[self._of]

    def squashed(self, value: Tensor) -> Tensor:
        return value.clamp(-self.limit, self.limit)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return self.squashed(0.5 * h @ self.weight + x)


Change = Callable[[Any, pytest.MonkeyPatch], object]
HIDDEN: dict[str, tuple[Callable[[], Any], Change]] = {
    "namespace": (lambda: by_namespace, lambda _, patch: patch.setattr(NAMED, "limit", 1.0)),
    "key": (lambda: by_key, lambda _, patch: patch.setitem(BY_KEY, "limit", 1.0)),
    "class": (lambda: by_class, lambda _, patch: patch.setattr(IN_A_CLASS, "limit", 1.0)),
    "inner function": (lambda: by_inner_function, lambda _, patch: patch.setitem(globals(), "LIMIT", 1.0)),
    "array": (lambda: by_array, lambda *_: READ.fill(1.0)),
    "item": (lambda: by_item, lambda *_: HELD.fill_(1.0)),
    "private attribute": (lambda: Limited("own"), lambda cell, patch: patch.setattr(cell, "_own", 1.0)),
    "class of a module": (lambda: Limited("shared"), lambda _, patch: patch.setattr(Limited, "shared", 1.0)),
    "set": (lambda: Limited("set"), lambda cell, patch: patch.setattr(cell, "_set", {1.0})),
    "global of a module's method": (lambda: Limited("global"), lambda _, patch: patch.setitem(globals(), "LIMIT", 1.0)),
    "method": (
        lambda: Limited("own"),
        lambda _, patch: patch.setattr(Limited, "squashed", lambda _, y: y.clamp(-1, 1)),
    ),
}


@pytest.mark.parametrize("where", HIDDEN)
def test_a_limit_that_changes_out_of_sight_is_seen(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, change = HIDDEN[where]
    cell = make()
    held = [cell.weight if isinstance(cell, nn.Module) else WEIGHT]
    assert agrees(cell, held).endswith("; fused")
    change(cell, monkeypatch)
    assert agrees(cell, held).endswith("; fused")


class Stopping(nn.Module):
    """Of which a flag, a hook or another parameter changes gradients alone."""

    _stops = False

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(UNITS, UNITS, dtype=torch.float64)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        after = torch.tanh(self.inner(h) + x)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self._stops):
            half = 0.5 * after
        return half + 0.5 * after


def halved(_: Any, by: Any, __: Any) -> tuple[Tensor | None, ...]:
    return tuple(None if one is None else 0.5 * one for one in by)


GRADIENTS: dict[str, Callable[[Stopping], object]] = {
    "a flag": lambda cell: setattr(cell, "_stops", True),
    "a hook": lambda cell: cell.inner.register_full_backward_hook(halved),
    "a hook before": lambda cell: cell.inner.register_full_backward_pre_hook(lambda _, by: tuple(0.5 * g for g in by)),
    "a forward hook": lambda cell: cell.inner.register_forward_hook(lambda _, __, out: 0.5 * (out + out.detach())),
    "the cell's own hook": lambda cell: cell.register_forward_hook(lambda _, __, out: 0.5 * (out + out.detach())),
}


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # torch's, where a hook has no inputs to look at
@pytest.mark.parametrize("what", GRADIENTS)
def test_a_change_of_gradients_alone_is_seen(what: str) -> None:
    cell = Stopping()
    assert agrees(cell, list(cell.parameters())).endswith("; fused")
    GRADIENTS[what](cell)
    assert "not fused" in agrees(cell, list(cell.parameters()))


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_hooks_on_all_modules_are_seen() -> None:
    cell = Stopping()
    assert agrees(cell, list(cell.parameters())).endswith("; fused")
    handle = nn.modules.module.register_module_full_backward_hook(halved)
    try:
        assert "hooks on the gradients of all modules" in agrees(cell, list(cell.parameters()))
    finally:
        handle.remove()
    assert agrees(cell, list(cell.parameters())).endswith("; fused")


def out_of_reach(h: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(h @ IN_A_CLASS.weight + x)  # type: ignore[attr-defined]


def test_an_equal_parameter_in_place_of_another_has_the_gradient() -> None:
    IN_A_CLASS.weight = nn.Parameter(0.3 * draw(UNITS, UNITS))  # type: ignore[attr-defined]
    for _ in range(2):
        assert agrees(out_of_reach, [IN_A_CLASS.weight]).endswith("; fused")  # type: ignore[attr-defined]
        IN_A_CLASS.weight = nn.Parameter(IN_A_CLASS.weight.detach().clone())  # type: ignore[attr-defined]


def test_a_parameter_of_two_places_becomes_two() -> None:
    cell = nn.ModuleList([nn.Linear(UNITS, UNITS, dtype=torch.float64) for _ in range(2)])
    cell[1].weight = cell[0].weight

    def step(h: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(cell[0](h) + cell[1](x))

    assert agrees(step, list(cell.parameters())).endswith("; fused")
    cell[1].weight = nn.Parameter(cell[0].weight.detach().clone())
    assert agrees(step, list(cell.parameters())).endswith("; fused")


def test_indices_are_compared() -> None:
    order = torch.tensor([0, 1, 2])

    def step(h: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(0.9 * h.index_select(1, order) + x)

    assert agrees(step, []).endswith("; fused")
    order.copy_(torch.tensor([2, 0, 1]))
    assert agrees(step, []).endswith("; fused")


def test_what_stays_is_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = Limited("own")
    agrees(cell, [cell.weight])
    monkeypatch.setattr(fuse, "trace", lambda *_: pytest.fail("traced again"))
    with torch.no_grad():
        cell.weight.mul_(0.5)
    assert agrees(cell, [cell.weight]).endswith("; fused")


def test_copies_are_looked_at_by_themselves_and_let_go() -> None:
    cell = Limited("own")
    agrees(cell, [cell.weight])
    for other in (copy.deepcopy(cell), copy.copy(cell), pickle.loads(pickle.dumps(cell))):
        other._own = 1.0
        agrees(other, [other.weight])
        agrees(cell, [cell.weight])
    watched = weakref.ref(cell)
    del cell, other
    gc.collect()
    assert watched() is None


@pytest.mark.parametrize("steps", [20, 600])
def test_randomness_in_a_step_is_refused(steps: int) -> None:
    h0, x = draw(2, UNITS), draw(steps, 2, UNITS)
    with pytest.raises(
        ValueError, match=r"not deterministic: two calls on the same input differ by .*\(dropout\? call"
    ):
        tl.unroll(lambda h, x: torch.dropout(torch.tanh(h + x), 0.5, True), h0, x)
    states, _ = tl.unroll(lambda h, x: torch.tanh(h + torch.dropout(x, 0.5, True)), h0, x, solver="sequential")
    assert states.shape == x.shape


def test_values_that_decide_for_other_rows_are_refused() -> None:
    def step(h: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(0.5 * h + x) if h.sum() > 0 else -torch.tanh(0.5 * h - x)

    with pytest.raises(ValueError, match="a cell must treat rows independently"):
        tl.unroll(step, torch.zeros(2, UNITS), torch.randn(60, 2, UNITS))


@pytest.mark.parametrize("beta", [1.0, 3.0])
def test_softplus_is_its_argument_from_its_threshold_on(beta: float) -> None:
    def step(h: Tensor, x: Tensor) -> Tensor:
        return 0.1 * nn.functional.softplus(h + x, beta, 5.0)

    assert agrees(step, []).endswith("; fused")


class Inside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(WEIGHT.detach().clone())

    def forward(self, h: Tensor) -> Tensor:
        return torch.tanh(h @ self.weight)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_a_scripted_module_inside_a_cell_is_followed() -> None:
    class Outside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = torch.jit.script(Inside())

        def forward(self, h: Tensor, x: Tensor) -> Tensor:
            return 0.5 * self.inside(h) + x

    cell = Outside()
    for _ in range(2):
        agrees(cell, list(cell.parameters()))
        with torch.no_grad():
            cell.inside.weight.mul_(-2.0)
