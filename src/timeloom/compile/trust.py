"""What a step may use without inspection, and names that hide what they lead to: tables of `compile.following`."""

from __future__ import annotations

import types
from types import ModuleType
from typing import Any

import torch
from torch import nn

from timeloom.compile.bindings import PLAIN


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


LEAVES = (*PLAIN, slice, range, type(...), type(NotImplemented), torch.memory_format, torch.layout)
"""Types whose objects never change, if they have no attributes."""
TRUSTED = _words(
    """torch math cmath operator _operator typing collections itertools functools builtins abc enum types contextlib
    einops"""
)
"""Modules whose functions keep no state between calls that changes their results."""
BUILTINS = _words(
    """abs all any bool bytes callable complex dict divmod enumerate filter float frozenset hasattr int isinstance
    issubclass iter len list map max min next object pow property range repr reversed round set slice sorted str sum
    super tuple type zip ValueError TypeError RuntimeError AssertionError NotImplementedError IndexError KeyError
    StopIteration NotImplemented Ellipsis __debug__ __build_class__ print"""
)
"""Builtin functions that see only their arguments; without `getattr`, which hides the names it looks up."""
HIDING = _words(
    """__dict__ __getattribute__ __globals__ parameters named_parameters buffers named_buffers modules named_modules
    children named_children state_dict get_parameter get_buffer get_submodule grad attrgetter methodcaller"""
)
"""Names that give access to things that the code does not name."""
HOOKS = tuple(name for name in vars(nn.Module()) if name.endswith("_hooks") and "state_dict" not in name)
MAKING = ("__init__", "__new__", "__post_init__")
UNASKED = _words(
    """__init__ __new__ __post_init__ __init_subclass__ __class_getitem__ __del__ __repr__ __str__ __reduce__
    __reduce_ex__ __getstate__ __setstate__ __setattr__ __delattr__ __copy__ __deepcopy__ __dir__ __format__
    __sizeof__ __prepare_scriptable__ __annotations__ __annotate__ __annotate_func__ __doc__"""
)
"""Special methods that no step calls without naming them."""
DESCRIPTORS = ("_tuplegetter", "wrapper_descriptor", "method_descriptor", "getset_descriptor", "member_descriptor")
NATIVE = ("wrapper_descriptor", "method_descriptor", "member_descriptor")
"""Types found in classes that are not written in Python, whose objects hold more than their attributes."""
INERT = ("typing", "abc")
"""Modules of classes whose code reads nothing from an object."""
BOOKKEEPING = (
    "_non_persistent_buffers_set",
    "_parameters",
    "_buffers",
    "_modules",
    "_timeloom_calls",
    "_timeloom_looks",
)


def computes(module: ModuleType, name: Any) -> bool:
    """Whether a module computes the attribute of this name on access, by `__getattr__`."""
    return "__getattr__" in vars(module) and name not in vars(module) and not trusted(module.__name__)


def trusts(kind: type) -> bool:
    """Whether a class's code need not be inspected."""
    return trusted(kind.__module__) and (kind.__module__ != "types" or hasattr(types, kind.__name__))


def trusted(module: str) -> bool:
    """Whether the code of a module need not be inspected."""
    return module.partition(".")[0] in TRUSTED
