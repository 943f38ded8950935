"""Steps of a user's own that see all kinds of things, and ways to change one of them between two calls."""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

GLOBAL_SCALE = 0.5
other = types.ModuleType("other")
other.scale = 0.5  # type: ignore[attr-defined]


def squash(a: Tensor, by: float = 1.0) -> Tensor:
    return torch.tanh(by * a)


@dataclass
class Config:
    scale: float = 0.5


class Own(nn.Module):
    """A small gated unit that reads a number from every place that Python has."""

    of_class = 0.5
    input_size, hidden_size = 3, 4

    def __init__(self) -> None:
        super().__init__()
        self.own, self._hidden, self.at = 0.5, 0.5, {"scale": 0.5, "more": [0.5, 1.0]}
        self.config = Config()
        self.input, self.recurrent = nn.Linear(3, 8), nn.Linear(4, 8)
        self.norm = nn.LayerNorm(4)
        self.register_buffer("kept", torch.full((4,), 0.5))
        self.unused = 0
        self.shared: list[Callable[[Tensor], Tensor]] = [torch.sigmoid]

    def initial(self, batch: int) -> Tensor:
        return torch.zeros(batch, 4, dtype=self.kept.dtype)

    @property
    def computed(self) -> float:
        return self.own * self.at["more"][0]

    def scaled(self, a: Tensor) -> Tensor:
        return a * (self.of_class + self._hidden) * (2.0 if self.training else 1.5)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        gate, value = (self.input(x) + self.recurrent(h)).chunk(2, -1)
        value = self.scaled(self.norm(value)) * self.kept + GLOBAL_SCALE * other.scale + self.at["scale"]
        kept = self.shared[0](gate) * self.config.scale
        return kept * h + (1 - kept) * squash(value) * self.computed


def _set(name: str, value: Any) -> Callable[[Own], Any]:
    return lambda cell: setattr(cell, name, value)


def _global(cell: Own) -> None:
    globals()["GLOBAL_SCALE"] = 0.8


def _function(cell: Own) -> None:
    globals()["squash"] = lambda a, by=1.0: torch.sin(by * a)


def _default(cell: Own) -> None:
    squash.__defaults__ = (0.7,)


def _code(cell: Own) -> None:
    squash.__code__ = (lambda a, by=1.0: torch.cos(by * a)).__code__


def _instance_forward(cell: Own) -> None:
    cell.forward = types.MethodType(lambda self, h, x: 0.3 * torch.tanh(self.recurrent(h)[:, :4]), cell)  # type: ignore[method-assign]


def _class_method(cell: Own) -> None:
    Own.scaled = lambda self, a: 0.1 * a  # type: ignore[method-assign]


def _hook(cell: Own) -> None:
    cell.norm.register_forward_hook(lambda module, given, found: 0.5 * found)


def _hook_of_all(cell: Own) -> Any:
    return torch.nn.modules.module.register_module_forward_hook(
        lambda module, given, found: 0.5 * found if isinstance(module, nn.LayerNorm) else None
    )


@torch.no_grad()
def _place(cell: Own) -> None:
    cell.recurrent.weight.data = 0.5 * cell.recurrent.weight.data


@torch.no_grad()
def _strides(cell: Own) -> None:
    weight = cell.recurrent.weight.data
    cell.recurrent.weight.data = weight.as_strided(weight.shape, (1, 8))  # the same place, other numbers


@torch.no_grad()
def _in_place(cell: Own) -> None:
    cell.kept.mul_(0.5)
    cell.recurrent.weight.mul_(0.5)


class Other(Own):
    def scaled(self, a: Tensor) -> Tensor:
        return 0.1 * a


def _class(cell: Own) -> None:
    cell.__class__ = Other


def _live(cell: Own) -> None:
    cell.input.weight.requires_grad_(False)


CHANGES: dict[str, Callable[[Own], Any]] = {
    "an attribute": _set("own", 0.9),
    "a private attribute": _set("_hidden", 0.9),
    "an attribute by a millionth": _set("own", 0.5000005),
    "an attribute that hides the class's": _set("of_class", 0.9),
    "the class's attribute": lambda cell: setattr(Own, "of_class", 0.8),
    "a dictionary": lambda cell: cell.at.update(scale=0.9),
    "a list inside": lambda cell: cell.at["more"].__setitem__(0, 0.9),
    "a function in a list": lambda cell: cell.shared.__setitem__(0, torch.tanh),
    "an object's attribute": lambda cell: setattr(cell.config, "scale", 0.9),
    "a global": _global,
    "a module's global": lambda cell: setattr(other, "scale", 0.9),
    "a global function": _function,
    "a function's default": _default,
    "a function's code": _code,
    "the forward of an instance": _instance_forward,
    "a method of the class": _class_method,
    "the class": _class,
    "training": lambda cell: cell.eval(),
    "a norm's option": lambda cell: setattr(cell.norm, "eps", 0.5),
    "a submodule": _set("norm", nn.Identity()),
    "a parameter": lambda cell: setattr(cell.recurrent, "weight", nn.Parameter(torch.randn(8, 4))),
    "no bias": lambda cell: setattr(cell.recurrent, "bias", None),
    "where a parameter lies": _place,
    "a parameter's strides": _strides,
    "a buffer": lambda cell: cell.register_buffer("kept", torch.full((4,), 0.9)),
    "values in place": _in_place,
    "a hook": _hook,
    "a hook of all modules": _hook_of_all,
    "what is differentiated": _live,
}
