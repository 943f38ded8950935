"""Find loops over torch's cells in a user's modules, and say how `timeloom.unroll` runs them."""

from __future__ import annotations

import dis
from collections.abc import Iterator
from types import FunctionType
from typing import NamedTuple

from torch import nn

from timeloom.nn.subclass import codes_of


class Way(NamedTuple):
    """How a module calls one step of a cell.

    called: the name in its code.
    direct: whether that is the cell itself, rather than a method or module that calls it.
    package: the package of the method, if it is one.
    """

    cell: nn.RNNCellBase
    called: str
    direct: bool = True
    package: str | None = None


def loops_over_cells(model: nn.Module) -> Iterator[str]:
    """Advice for each method that runs an nn.GRUCell, LSTMCell or RNNCell in a loop, also if by other methods."""
    told = set()
    for module in filter(_holds_cells, model.modules()):
        for name, way in _ways_of(module).items():
            for method in _methods_of(type(module)).values():
                elsewhere = way.package not in (None, _package(method))  # other packages use the name otherwise
                if (method.__code__, name) in told or elsewhere or not _loops(method) or not _mentions(method, name):
                    continue
                told.add((method.__code__, name))
                yield _advice(method, way)


def _ways_of(module: nn.Module) -> dict[str, Way]:
    """The names in a module by which a step of a cell is called: cells, alone or in a list, modules and methods."""
    found = _cells_of(module)
    for name, child in module.named_children():
        inside = _ways_of(child).get("forward") if name not in found and _holds_cells(child) else None
        if inside is not None:
            found[name] = Way(inside.cell, name, direct=False)
    steps = {name: method for name, method in _methods_of(type(module)).items() if not _loops(method)}
    more = found
    while more:  # a method may call another one
        more = {
            name: Way(way.cell, name, direct=False, package=_package(method))
            for name, method in steps.items()
            for known, way in more.items()
            if name not in found and _mentions(method, known)
        }
        found = found | more
    return found


def _holds_cells(module: nn.Module) -> bool:
    return any(isinstance(part, nn.RNNCellBase) for part in module.modules())


def _cells_of(module: nn.Module) -> dict[str, Way]:
    found: dict[str, Way] = {}
    for name, child in module.named_children():
        listed = child if isinstance(child, nn.ModuleList | nn.ModuleDict) else [child]
        inside = listed.values() if isinstance(listed, nn.ModuleDict) else listed
        cells = [part for part in inside if isinstance(part, nn.RNNCellBase)]
        if cells:
            found[name] = Way(cells[0], name if cells[0] is child else f"{name}[…]")
    return found


def _methods_of(cls: type) -> dict[str, FunctionType]:
    """Methods that a user's class has beyond torch's."""
    methods: dict[str, FunctionType] = {}
    for ancestor in reversed(cls.__mro__):
        if not ancestor.__module__.startswith("torch.nn."):
            methods |= {key: value for key, value in vars(ancestor).items() if isinstance(value, FunctionType)}
    methods.pop("__init__", None)
    return methods


def _mentions(method: FunctionType, name: str) -> bool:
    return any(name in code.co_names for code in codes_of(method.__code__))


def _loops(method: FunctionType) -> bool:
    return any(
        "JUMP_BACKWARD" in instruction.opname  # in a while loop "POP_JUMP_BACKWARD_IF_TRUE"
        for code in codes_of(method.__code__)
        for instruction in dis.get_instructions(code)
    )


def _package(method: FunctionType) -> str:
    return method.__module__.partition(".")[0]


def _advice(method: FunctionType, way: Way) -> str:
    state, first = ("(h, c)", "(h0, c0)") if isinstance(way.cell, nn.LSTMCell) else ("h", "h0")
    kind = next(base.__name__ for base in type(way.cell).__mro__ if base.__module__.startswith("torch.nn."))
    where = f"{method.__code__.co_filename}:{method.__code__.co_firstlineno}"
    what, step = f"an nn.{kind}", f"def step(self, state, x): return self.{way.called}(x, state)"
    if not way.direct:
        what, step = f"which calls {what}", f"def body(self, state, x): …  # calls self.{way.called}, returns the state"
    return (
        f"timeloom cannot see into the loop of {method.__qualname__} ({where}) over self.{way.called}, {what}. If it "
        f"is a loop over time, make its body a method, `{step}`, with {state} as the state, and the loop one call: "
        f"`states, report = timeloom.unroll(self.{'step' if way.direct else 'body'}, {first}, xs)`, xs of shape "
        f"(T, B, inputs)."
    )
