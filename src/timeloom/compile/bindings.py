"""Paths to the tensors that a step refers to, by which they are found again after they have been replaced."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import islice
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, fx, nn

from timeloom.compile.refusal import NotFused
from timeloom.torch_state.wrapped import wrapped

PLAIN = (int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size)
_FOLLOWED = (Tensor, nn.Module, FunctionType, float, int, list, tuple, dict)
"""Types of globals that are followed."""
GRADIENT_HOOKS = ("_backward_hooks", "_backward_pre_hooks")
"""Attributes of modules with hooks on gradients, which leave no trace in a step's operations."""
DEEPEST = 6
"""Levels to which references of a function are followed, of up to three path entries each."""
MOST_HELD = 2000
"""Most things that a function may refer to: all are checked in every call."""


def held_by(
    thing: Any, path: tuple[Any, ...] = (), seen: set[int] | None = None
) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Everything that a function or module refers to, with its path: tensors, and values that its code depends on."""
    seen = set() if seen is None else seen
    if isinstance(thing, (Tensor, *PLAIN)):
        yield path, thing
        return
    if id(thing) in seen or len(path) > 3 * DEEPEST:
        return
    seen.add(id(thing))
    if isinstance(thing, nn.Module):
        yield (*path, "type"), type(thing)
        children = {**thing._parameters, **thing._buffers, **thing._modules}
        for name, child in thing.__dict__.items():
            if isinstance(child, Tensor) or not name.startswith("_"):
                children.setdefault(name, child)
        for name, child in children.items():
            yield from held_by(child, (*path, name), seen)
        yield from (((*path, name), tuple(vars(thing)[name])) for name in GRADIENT_HOOKS if vars(thing).get(name))
        forward = getattr(type(thing), "forward", None)
        yield (*path, "code"), getattr(forward, "__code__", forward)
    elif isinstance(thing, MethodType):
        yield from held_by(thing.__self__, (*path, "self"), seen)
        yield from held_by(thing.__func__, (*path, "function"), seen)
    elif isinstance(thing, functools.partial):
        yield from held_by(thing.func, (*path, "func"), seen)
        yield from held_by(thing.args, (*path, "args"), seen)
        yield from held_by(thing.keywords, (*path, "keywords"), seen)
    elif isinstance(thing, FunctionType):
        yield from _held_by_function(thing, path, seen)
    elif isinstance(thing, dict):
        for key, value in thing.items():
            yield from held_by(value, (*path, key), seen)
    elif isinstance(thing, (list, tuple)):
        yield (*path, "length"), len(thing)
        for index, value in enumerate(thing):
            yield from held_by(value, (*path, index), seen)
    elif hasattr(thing, "__dict__") and not isinstance(thing, type) and not _is_module(thing):
        yield (*path, "type"), type(thing)
        if callable(thing):
            yield (*path, "code"), getattr(type(thing).__call__, "__code__", None)
        for name, value in vars(thing).items():
            yield from held_by(value, (*path, name), seen)
    else:
        yield path, id(thing)


def _held_by_function(
    thing: FunctionType, path: tuple[Any, ...], seen: set[int]
) -> Iterator[tuple[tuple[Any, ...], Any]]:
    yield (*path, "code"), thing.__code__
    for name, cell in zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=False):
        try:
            yield from held_by(cell.cell_contents, (*path, "closure", name), seen)
        except ValueError:  # a cell that is not filled yet
            continue
    for name in thing.__code__.co_names:
        if name in thing.__globals__:
            value = thing.__globals__[name]
            if isinstance(value, dict):  # only its tensors: whatever else a program keeps there may change at any time
                value = {key: one for key, one in value.items() if isinstance(one, Tensor)}
            if isinstance(value, _FOLLOWED) and not _of_torch(value):
                yield from held_by(value, (*path, "globals", name), seen)
    for index, value in enumerate(thing.__defaults__ or ()):
        yield from held_by(value, (*path, "default", index), seen)


def _is_module(thing: Any) -> bool:
    return type(thing).__name__ == "module"


def _of_torch(value: Any) -> bool:
    return isinstance(value, FunctionType) and value.__module__.startswith("torch")


def fingerprint(function: Any) -> tuple[Any, ...]:
    """What a step's trace depends on beside its tensors' values: code, plain values, shapes and modes."""
    found: list[Any] = []
    for path, value in islice(held_by(function), MOST_HELD + 1):
        if len(found) == MOST_HELD:
            raise NotFused(
                f"the step refers to more than {MOST_HELD} things: give it what it needs, or make it a module"
            )
        if isinstance(value, Tensor):
            if wrapped((value,)):
                raise NotFused(f"the step holds a {type(value).__name__}, which has no memory of its own")
            found.append((path, tuple(value.shape), value.dtype, value.device))
        elif isinstance(value, float) and value != value:
            found.append((path, "nan"))
        else:
            found.append((path, value))
    return tuple(found)


class Bindings:
    """Finds the attributes of a traced module in a function like the one that was traced."""

    def __init__(self, paths: dict[str, tuple[Any, ...]], fixed: dict[str, Tensor]) -> None:
        self.paths, self.fixed = paths, fixed

    @staticmethod
    def find(function: Any, module: fx.GraphModule) -> Bindings:
        """Find the module's tensors by identity; a tensor found nowhere was made by the step itself, and is constant.

        Unless autograd made it before the step: that is another tensor in every call, and refused.
        """
        where = {id(value): path for path, value in held_by(function) if isinstance(value, Tensor)}
        names = {str(node.target) for node in module.graph.nodes if node.op == "get_attr"}
        tensors = {name: getattr(module, name) for name in names}
        paths = {name: where[id(tensor)] for name, tensor in tensors.items() if id(tensor) in where}
        for name in paths:  # so that the module keeps no tensor of the user's alive
            delattr(module, name)
        fixed = {name: tensor for name, tensor in tensors.items() if name not in paths}
        if any(tensor.requires_grad and not tensor.is_leaf for tensor in fixed.values()):
            raise NotFused("it computes with a tensor made outside of it, out of sight: hold that in a module")
        return Bindings(paths, fixed)

    def tensors(self, function: Any) -> dict[str, Tensor]:
        """The tensors that the function holds now, by their names in the trace."""
        return {name: _found_at(function, path) for name, path in self.paths.items()} | self.fixed


def _found_at(thing: Any, path: tuple[Any, ...]) -> Any:
    """What `held_by` yields with this path."""
    for step in path:
        if isinstance(thing, nn.Module):
            places = (thing._parameters, thing._buffers, thing._modules, thing.__dict__)
            thing = next(place[step] for place in places if step in place)
        elif isinstance(thing, MethodType):
            thing = thing.__self__ if step == "self" else thing.__func__
        elif isinstance(thing, functools.partial):
            thing = getattr(thing, step)
        elif isinstance(thing, FunctionType):
            thing = _referred(thing, step)
        else:
            thing = thing[step] if isinstance(thing, (dict, list, tuple)) else vars(thing)[step]
    return thing


def _referred(function: FunctionType, kind: str) -> Any:
    if kind == "closure":
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=False)
        return {name: cell.cell_contents for name, cell in cells if cell != CellType()}
    return function.__globals__ if kind == "globals" else function.__defaults__
