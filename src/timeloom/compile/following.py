"""Everything that a step's Python code can see, found by following the names in the code of all that it may call.

Each name is followed to whatever it may refer to. What cannot be followed is refused, with the reason.
"""

from __future__ import annotations

import dis
import enum
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from timeloom.compile.surroundings import MISSING, Surroundings, Unseen, content_of, own_of
from timeloom.compile.trust import (
    BOOKKEEPING,
    BUILTINS,
    DESCRIPTORS,
    HIDING,
    HOOKS,
    INERT,
    LEAVES,
    MAKING,
    NATIVE,
    UNASKED,
    computes,
    trusted,
    trusts,
)

MOST_SEEN = 4000
"""Most things that are followed."""


def look_around(function: Any, device: torch.device, run: Callable[[], object]) -> Surroundings:
    """What a step on a device sees; raises Unseen if that cannot be determined.

    `run` runs the step on a few rows; no tensor may be converted to a Python number there.
    """
    walk = _Walk(device)
    walk.follow(function, "the step")
    with torch.no_grad(), _HostReads():
        run()
    return walk.found


class _HostReads(TorchDispatchMode):
    """Refuses operations that read tensors on the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        tensors = [one for one in tree_leaves(found) if isinstance(one, Tensor)]
        if given and not tensors:
            raise Unseen(f"a number is read from a tensor ({func})")
        if any(one.is_cuda for one in given) and not all(one.is_cuda for one in tensors):
            raise Unseen(f"a tensor is copied to the host ({func})")
        return found


class _Walk:
    """One search. Attributes of objects, classes and modules are followed once their name occurs in some code."""

    def __init__(self, device: torch.device) -> None:
        self.found, self._device = Surroundings(), device
        self._seen: dict[int, Any] = {}
        self._classes: set[type] = set()
        self._names = {"forward"}
        self._waiting: dict[str, list[tuple[Mapping[str, Any], str]]] = {}
        self._pending: list[tuple[Any, str]] = []
        self._asked: list[Mapping[str, Any]] = []
        """Namespaces that code may query by `hasattr`."""

    def follow(self, thing: Any, where: str) -> None:
        """Follow everything that can be seen from `thing`."""
        self._later(thing, where)
        while self._pending:
            self._visit(*self._pending.pop())
        for held in self._asked if "hasattr" in self._names else ():
            self._keys(held)

    def _later(self, thing: Any, where: str) -> None:
        if isinstance(thing, LEAVES) and not hasattr(thing, "__dict__"):
            return
        if self._is_new(thing):
            self._pending.append((thing, where))

    def _is_new(self, thing: Any) -> bool:
        if id(thing) in self._seen:
            return False
        self._seen[id(thing)] = thing  # kept alive, so that nothing else gets its id
        if len(self._seen) > MOST_SEEN:
            raise Unseen(f"it refers to more than {MOST_SEEN} things")
        return True

    def _visit(self, thing: Any, where: str) -> None:
        if isinstance(thing, Tensor):
            self._tensor(thing, where)
        elif isinstance(thing, nn.Module):
            self._module(thing, where)
        elif isinstance(thing, FunctionType):
            self._function(thing, where)
        elif isinstance(thing, MethodType):
            self._later(thing.__self__, f"{where}.__self__")
            self._later(thing.__func__, where)
        elif isinstance(thing, functools.partial):
            for name in ("func", "args", "keywords"):
                self._later(getattr(thing, name), f"{where}.{name}")
        elif isinstance(thing, (staticmethod, classmethod)):
            self._later(thing.__func__, where)
        elif isinstance(thing, property):
            self._later(thing.fget, where)
        elif isinstance(thing, type):
            self._class(thing, where)
            self._making(thing, where)
        elif isinstance(thing, ModuleType):
            self._namespace(thing, where)
        elif isinstance(thing, enum.Enum):
            own = vars(thing)
            self._whole({name: value for name, value in own.items() if name != "__objclass__"}, where, own)
            self._class(type(thing), where)
        elif type(thing) in (dict, OrderedDict):
            self._whole(thing, where)
        elif isinstance(thing, (list, tuple, set, frozenset)):
            self._sequence(thing, where)
        else:
            self._object(thing, where)

    def _tensor(self, tensor: Tensor, where: str) -> None:
        if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer):
            raise Unseen(f"{where} is a {type(tensor).__name__}")
        if tensor.device != self._device:
            raise Unseen(f"{where} is on {tensor.device}, the step on {self._device}")
        own = tensor.data_ptr(), tensor.stride(), tensor.shape, tensor.requires_grad, tensor.dtype
        self.found.tensors[id(tensor)] = tensor, *own
        self._attributes(tensor, where)

    def _namespace(self, module: ModuleType, where: str) -> None:
        if trusted(module.__name__):
            return
        if type(module) is not ModuleType:
            raise Unseen(f"{where} is a {type(module).__name__}")
        self._attributes(module, where)

    def _attributes(self, thing: Any, where: str) -> None:
        """Follow the attributes of a thing that may get new ones at any time."""
        self._asked.append(vars(thing))
        self._wait(vars(thing), where)

    def _module(self, module: nn.Module, where: str) -> None:
        if isinstance(module, torch.jit.ScriptModule):
            raise Unseen(f"{where} is a ScriptModule")
        own, kind = vars(module), type(module)
        self._refuse_native(kind, where)
        self.found.kinds.append((module, kind, own))
        hooks = [own[name] for name in HOOKS]
        if any(hooks):
            raise Unseen(f"{where} has hooks")
        self.found.empty += hooks
        self.found.items += [(own, name, own[name]) for name in HOOKS]
        parts = ("_parameters", "_buffers", "_modules")
        self.found.items += [(own, name, own[name]) for name in parts]
        for held in (own, *(own[name] for name in parts)):
            self._held(held, kind, where)
        self._class(kind, where)

    def _held(self, held: Mapping[str, Any], kind: type, where: str) -> None:
        """Follow an object's attributes; all of them, if code that is not followed may read any."""
        bases = [base for base in kind.__mro__ if base not in (object, nn.Module)]
        if any(trusts(base) and base.__module__ not in INERT for base in bases):
            read = {
                name: value for name, value in held.items() if name not in BOOKKEEPING and not name.endswith("_hooks")
            }
            self._whole(read, where, held)
        else:
            self._keys(held)
            self._wait(held, where)

    def _refuse_native(self, kind: type, where: str) -> None:
        for base in kind.__mro__:
            if base is not object and any(type(value).__name__ in NATIVE for value in vars(base).values()):
                raise Unseen(f"{where} is a {kind.__qualname__}, and what its {base.__qualname__} holds cannot be seen")

    def _class(self, kind: type, where: str) -> None:
        made_by: type = type(kind)
        for base in kind.__mro__ + made_by.__mro__:
            if base in self._classes:
                continue
            self._classes.add(base)
            own, place = vars(base), f"{where}: {base.__name__}"
            if trusts(base):
                if issubclass(base, nn.Module) and "forward" in own:
                    self._entry(own, "forward", place)
                continue
            self.found.orders.append((base, base.__mro__))
            self._keys(own)
            for name in own:
                if name.startswith("__") and name not in UNASKED and callable(own[name]):
                    self._entry(own, name, place)
            self._wait(own, place)

    def _making(self, kind: type, where: str) -> None:
        """Follow the functions that run when an object of a class is created."""
        for base in kind.__mro__:
            for name in MAKING:
                function = None if trusts(base) else vars(base).get(name)
                if isinstance(function, FunctionType) and self._is_new(function):
                    self._function(function, f"{where}: {base.__name__}.{name}", makes=True)

    def _whole(self, entries: Mapping[Any, Any], where: str, held: Mapping[Any, Any] | None = None) -> None:
        """Follow these entries of `held`, or all of it."""
        held = entries if held is None else held
        self._keys(held)
        for name, value in entries.items():
            self.found.items.append((held, name, value))
            self._later(value, f"{where}.{name}")

    def _keys(self, held: Mapping[Any, Any]) -> None:
        self.found.keys.append((held, tuple(held)))

    def _wait(self, held: Mapping[str, Any], where: str) -> None:
        """Follow entries once their names are seen in code."""
        for name in list(held):
            if name in self._names:
                self._entry(held, name, where)
            else:
                self._waiting.setdefault(name, []).append((held, where))

    def _entry(self, held: Mapping[str, Any], name: str, where: str) -> None:
        self.found.items.append((held, name, held[name]))
        self._later(held[name], f"{where}.{name}")

    def _sequence(self, thing: Any, where: str) -> None:
        if isinstance(thing, (list, set)):
            if type(thing) not in (list, set):
                raise Unseen(f"{where} is a {type(thing).__name__}")
            self.found.lists.append((thing, tuple(thing)))
        for index, value in enumerate(thing):
            self._later(value, f"{where}[{index}]")
        if hasattr(thing, "__dict__"):
            self._attributes(thing, where)
        self._class(type(thing), where)

    def _object(self, thing: Any, where: str) -> None:
        if isinstance(thing, BuiltinFunctionType):
            of_nothing = thing.__self__ is None or isinstance(thing.__self__, (ModuleType, type))
            if not of_nothing or not trusted(thing.__module__ or ""):
                raise Unseen(f"{where} is built in, and may keep a state of its own")
            return
        name = type(thing).__module__
        if name in ("typing", "torch._ops") or type(thing).__name__ in DESCRIPTORS:
            return
        slotted = any("__slots__" in vars(base) for base in type(thing).__mro__)
        if not hasattr(thing, "__dict__") or slotted or trusted(name):
            raise Unseen(f"{where} is a {name}.{type(thing).__qualname__}, into which nobody can look")
        self._refuse_native(type(thing), where)
        self.found.kinds.append((thing, type(thing), vars(thing)))
        self._held(vars(thing), type(thing), where)
        self._class(type(thing), where)

    def _function(self, function: FunctionType, where: str, makes: bool = False) -> None:
        known = trusted(str(function.__globals__.get("__name__")))
        if not known:
            self.found.functions.append((function, own_of(function)))
            self._later(function.__defaults__, f"{where}'s defaults")
            self._later(function.__kwdefaults__, f"{where}'s defaults")
            self._attributes(function, where)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            value = content_of(cell)
            self.found.cells.append((cell, value))
            if name == "__class__":  # used by `super()`, which creates no object
                self._class(value, where)
            elif value is not MISSING:
                self._later(value, f"{name} of {where}")
        for code in () if known else _codes(function.__code__):  # torch's decorators hold what they wrap
            self._code(code, function, where, makes)

    def _code(self, code: CodeType, function: FunctionType, where: str, makes: bool) -> None:
        held, before = function.__globals__, None
        for one in dis.get_instructions(code):
            name = one.argval
            if isinstance(before, ModuleType) and computes(before, name):
                raise Unseen(f"{where} uses {before.__name__}.{name}, which that module computes")
            before = held.get(name) if one.opname == "LOAD_GLOBAL" else None
            if one.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                self.found.items.append((held, name, held.get(name, MISSING)))
                if name in held:
                    self._later(held[name], f"{name} of {where}")
                elif name not in BUILTINS:
                    raise Unseen(f"{where} uses {name}")
            elif one.opname == "MATCH_CLASS":
                raise Unseen(f"{where} matches an object by its attributes")
            elif one.opname in ("STORE_GLOBAL", "DELETE_GLOBAL", "IMPORT_NAME"):
                raise Unseen(f"{where} imports or sets {name}")
            elif one.opname in ("STORE_ATTR", "DELETE_ATTR") and not makes:
                raise Unseen(f"{where} sets .{name}")
            elif one.opname == "STORE_DEREF" and name in function.__code__.co_freevars:
                raise Unseen(f"{where} sets {name}, which is not its own")
        hidden = HIDING.intersection(code.co_names)
        if hidden:
            raise Unseen(f"{where} uses .{min(hidden)}")
        for name in code.co_names:
            if name not in self._names:
                self._names.add(name)
                for entries, place in self._waiting.pop(name, ()):
                    self._entry(entries, name, place)


def _codes(code: CodeType) -> Iterator[CodeType]:
    """A function's code, and that of its nested functions."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
