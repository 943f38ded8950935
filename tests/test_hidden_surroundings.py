"""What a step sees by ways that are easily overlooked: a look around tells where it changed, or refuses."""

from __future__ import annotations

import collections
import enum
import operator
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from timeloom.compile.following import look_around
from timeloom.compile.fuse import compile_step
from timeloom.compile.surroundings import Unseen

UNITS = 4


class Named(dict[str, float]):
    def __getattr__(self, name: str) -> float:
        return self[name]


class Queue(collections.deque[float]):
    pass


class Slope(nn.LeakyReLU):
    pass


class Slopes(nn.Sequential):
    pass


FACTOR = 0.5


class Mode(enum.Enum):
    FAST = 1

    @property
    def factor(self) -> float:
        return FACTOR


class Looked(type):
    table = {"scale": 0.5}  # noqa: RUF012

    def __getattr__(cls, name: str) -> float:
        return cls.table[name]


class Settings(metaclass=Looked):
    pass


class Pair(collections.namedtuple("Pair", "a b")):
    extra: float


class Box:
    scale = 0.5


class Other:
    scale = 0.9


class Derived(Box):
    pass


computing = types.ModuleType("computing")
exec("TABLE = {'scale': 0.5}\ndef __getattr__(name):\n    return TABLE[name]\n", vars(computing))
growing: Any = types.ModuleType("growing")


def helper() -> float:
    return helper.gain  # type: ignore[attr-defined, no-any-return]


def _matched(box: Any) -> float:
    match box:
        case Box(scale=scale):
            return scale
    return 0.0


class Held(nn.Module):
    def __init__(self, thing: Any = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(UNITS))
        self.register_buffer("kept", torch.ones(UNITS))
        self.thing = thing


def _factor(_: Any) -> None:
    globals()["FACTOR"] = 0.9


def _set(*path: str, value: Any = 0.9) -> Callable[[Any], None]:
    def change(cell: Any) -> None:
        for name in path[:-1]:
            cell = getattr(cell, name)
        setattr(cell, path[-1], value)

    return change


def _with(thing: Any, **more: Any) -> Any:
    for name, value in more.items():
        setattr(thing, name, value)
    return thing


def _retyped(cell: Any) -> None:
    cell.kept.data = cell.kept.data.view(torch.int32)


Case = tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], None]]
"""What is held, what a step does with the cell, and what changes."""
CASES: dict[str, Case] = {
    "a dictionary of one's own": (
        lambda: Named(s=0.5), lambda cell: cell.thing["s"], lambda cell: cell.thing.update(s=0.9),
    ),
    "a queue of one's own": (
        lambda: Queue([0.5]), lambda cell: cell.thing[0], lambda cell: cell.thing.append(0.9),
    ),
    "an option of a torch module's subclass": (
        lambda: Slope(0.1), lambda cell: cell.thing(cell.weight), _set("thing", "negative_slope"),
    ),
    "inside a subclass of Sequential": (
        lambda: Slopes(nn.LeakyReLU(0.1)), lambda cell: cell.thing(cell.weight),
        lambda cell: setattr(cell.thing[0], "negative_slope", 0.9),
    ),
    "torch's own forward": (
        lambda: nn.LeakyReLU(0.1), lambda cell: cell.thing(cell.weight),
        lambda _: setattr(nn.LeakyReLU, "forward", lambda self, x: 0.3 * x),
    ),
    "an enumeration's property": (lambda: Mode.FAST, lambda cell: cell.thing.factor, _factor),
    "a metaclass": (lambda: None, lambda _: Settings.scale, lambda _: Looked.table.update(scale=0.9)),
    "what a module computes": (
        lambda: None, lambda _: computing.scale, lambda _: computing.TABLE.update(scale=0.9),
    ),
    "whether a module has a name": (
        lambda: None, lambda _: 0.9 if hasattr(growing, "fast") else 0.5, lambda _: setattr(growing, "fast", 1),
    ),
    "an attribute by attrgetter": (
        Box, lambda cell: operator.attrgetter("scale")(cell.thing), _set("thing", "scale"),
    ),
    "an attribute by match": (Box, lambda cell: _matched(cell.thing), _set("thing", "scale")),
    "an attribute of a parameter": (
        lambda: _with(nn.Parameter(torch.ones(1)), gain=0.5), lambda cell: cell.thing.gain, _set("thing", "gain"),
    ),
    "an attribute of a function": (
        lambda: _with(helper, gain=0.5), lambda _: helper(), lambda _: setattr(helper, "gain", 0.9),
    ),
    "an attribute of a tuple": (
        lambda: _with(Pair(1, 2), extra=0.5), lambda cell: cell.thing.extra, _set("thing", "extra"),
    ),
    "all attributes at once": (
        Box, lambda cell: cell.thing.scale, _set("thing", "__dict__", value={"scale": 0.9}),
    ),
    "all buffers at once": (lambda: None, lambda cell: cell.kept, _set("_buffers", value={"kept": torch.zeros(UNITS)})),
    "a buffer's dtype": (lambda: None, lambda cell: cell.kept, _retyped),
    "what a class inherits": (
        Derived, lambda cell: cell.thing.scale, lambda _: setattr(Derived, "__bases__", (Other,)),
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Looked, "table", {"scale": 0.5})
    monkeypatch.setitem(vars(computing), "TABLE", {"scale": 0.5})
    monkeypatch.setitem(globals(), "FACTOR", 0.5)
    monkeypatch.setattr(nn.LeakyReLU, "forward", nn.LeakyReLU.forward)
    monkeypatch.setattr(growing, "fast", 1, raising=False)
    monkeypatch.delattr(growing, "fast")


@pytest.mark.parametrize("name", CASES)
def test_a_change_is_seen(name: str) -> None:
    make, read, change = CASES[name]
    cell = Held(make())
    try:
        around = look_around(lambda h, x: torch.tanh(h * read(cell) + x), torch.device("cpu"), lambda: None)
    except Unseen:
        return
    assert around.same()
    change(cell)
    assert not around.same()


def test_a_class_that_types_has_made() -> None:
    kind: Any = types.new_class("Made", (nn.Module,), {}, lambda own: own.update(forward=lambda self, h, x: h + FACTOR))
    around = look_around(kind(), torch.device("cpu"), lambda: None)
    assert around.same()
    _factor(None)
    assert not around.same()


def test_an_index_is_part_of_the_normal_form() -> None:
    """So its values must not change: what is replayed has the places of tensors alone."""

    def step(h: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(h.index_select(1, order) + x)

    def fixed(h: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(h.index_select(1, torch.arange(UNITS - 1, -1, -1)) + x)

    order, rows = torch.tensor([2, 1, 0, 3]), torch.randn(3, UNITS)
    assert compile_step(step, (rows,), False, rows).index() == "closure.order"
    assert compile_step(fixed, (rows,), False, rows).index() is None
