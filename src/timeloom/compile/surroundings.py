"""What a step's Python code can see, recorded to check later whether the code would still do the same.

A call that is a replay does not run the step, so everything that the step reads must be checked: attributes, closures,
globals, classes, code. `compile.following` finds them. A check compares by identity, and takes less than a microsecond
for each thing.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import is_
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules import module as every_module

MISSING = object()


class Unseen(Exception):
    """Something in a step cannot be followed; the message says what."""


class Surroundings:
    """What a step could see when it was examined; keeps all of it alive."""

    def __init__(self) -> None:
        self.keys: list[tuple[Mapping[Any, Any], tuple[Any, ...]]] = []
        """Dictionaries of attributes with all of their keys: an additional attribute may hide another."""
        self.items: list[tuple[Mapping[Any, Any], Any, Any]] = []
        """Dictionaries with a key and its value, `MISSING` if there is none."""
        self.lists: list[tuple[Any, tuple[Any, ...]]] = []
        self.cells: list[tuple[CellType, Any]] = []
        """Cells of closures with their contents."""
        self.functions: list[tuple[FunctionType, tuple[Any, ...]]] = []
        self.empty: list[Any] = [vars(every_module)[name] for name in vars(every_module) if _is_global_hooks(name)]
        """Dictionaries of hooks, all of them empty."""
        self.kinds: list[tuple[Any, type, Mapping[str, Any]]] = []
        """Objects with their classes and the dictionaries of their attributes."""
        self.orders: list[tuple[type, tuple[type, ...]]] = []
        """Classes with their method resolution orders."""
        self.tensors: dict[int, tuple[Tensor, int, tuple[int, ...], torch.Size, bool, torch.dtype]] = {}

    def same(self) -> bool:
        """Whether the step would see the very same things, and the same tensors at the same addresses."""
        if any(self.empty):
            return False
        for entries, name, value in self.items:
            if entries.get(name, MISSING) is not value:
                return False
        for held, values in (*self.keys, *self.lists):
            if len(held) != len(values) or not all(map(is_, held, values)):
                return False
        for cell, value in self.cells:
            if content_of(cell) is not value:
                return False
        for thing, kind, own in self.kinds:
            if type(thing) is not kind or vars(thing) is not own:
                return False
        for kind, order in self.orders:
            if kind.__mro__ is not order:
                return False
        for function, parts in self.functions:
            if not all(map(is_, own_of(function), parts)):
                return False
        for tensor, place, stride, shape, live, dtype in self.tensors.values():
            if tensor.data_ptr() != place or tensor.requires_grad is not live or tensor.stride() != stride:
                return False
            if tensor.shape != shape or tensor.dtype != dtype:
                return False
        return True


def own_of(function: FunctionType) -> tuple[Any, ...]:
    return function.__code__, function.__defaults__, function.__kwdefaults__, function.__closure__


def content_of(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return MISSING


def _is_global_hooks(name: str) -> bool:
    return name.startswith("_global_") and isinstance(vars(every_module)[name], dict)
