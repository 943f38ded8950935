"""Find loops over torch's cells in a user's modules, and say how `timeloom.unroll` runs them."""

from __future__ import annotations

import dis
from collections.abc import Iterator
from types import CodeType, FunctionType

from torch import nn

from timeloom.nn.subclass import codes_of


def loops_over_cells(model: nn.Module) -> Iterator[str]:
    """One line for each method of each class that runs an nn.GRUCell, LSTMCell or RNNCell inside a loop."""
    told = set()
    for module in model.modules():
        for name, cell in _cells_of(module).items():
            for method in _looping(type(module), name):
                code = method.__code__
                if (code, name) in told:
                    continue
                told.add((code, name))
                called = name if isinstance(getattr(module, name), nn.RNNCellBase) else f"{name}[…]"
                yield _advice(method, called, cell)


def _cells_of(module: nn.Module) -> dict[str, nn.RNNCellBase]:
    """Cells that a module calls by a name of its own, alone or in a list."""
    found: dict[str, nn.RNNCellBase] = {}
    for name, child in module.named_children():
        listed = child if isinstance(child, nn.ModuleList | nn.ModuleDict) else [child]
        inside = listed.values() if isinstance(listed, nn.ModuleDict) else listed
        cells = [part for part in inside if isinstance(part, nn.RNNCellBase)]
        if cells:
            found[name] = cells[0]
    return found


def _looping(cls: type, name: str) -> Iterator[FunctionType]:
    """Methods of a user's class that mention an attribute and go round in a loop."""
    methods: dict[str, FunctionType] = {}
    for ancestor in reversed(cls.__mro__):
        if not ancestor.__module__.startswith("torch.nn."):
            methods |= {key: value for key, value in vars(ancestor).items() if isinstance(value, FunctionType)}
    for method in methods.values():
        codes = list(codes_of(method.__code__))
        if method.__name__ != "__init__" and any(name in code.co_names for code in codes) and any(map(_loops, codes)):
            yield method


def _loops(code: CodeType) -> bool:
    return any(instruction.opname.startswith("JUMP_BACKWARD") for instruction in dis.get_instructions(code))


def _advice(method: FunctionType, name: str, cell: nn.RNNCellBase) -> str:
    state, first = ("(h, c)", "(h0, c0)") if isinstance(cell, nn.LSTMCell) else ("h", "h0")
    where = f"{method.__code__.co_filename}:{method.__code__.co_firstlineno}"
    return (
        f"timeloom cannot see into the loop of {method.__qualname__} ({where}) over self.{name}, an "
        f"nn.{type(cell).__name__}. If it is a loop over time, make its body a method, "
        f"`def step(self, state, x): return self.{name}(x, state)`, with {state} as the state, and the loop one call: "
        f"`states, report = timeloom.unroll(self.step, {first}, xs)`, xs of shape (T, B, inputs)."
    )
