"""Swap every torch recurrent layer inside a model for timeloom's, and back, in place."""

from __future__ import annotations

import warnings
from typing import TypeVar

from torch import nn
from torch.nn.utils import parametrize

from timeloom.nn.base import Recurrent
from timeloom.nn.loops import loops_over_cells
from timeloom.nn.subclass import attributes_added, grown, reserved, torch_class, ungrown, why_not
from timeloom.solvers.base import Solver, resolve

Model = TypeVar("Model", bound=nn.Module)


def parallelize(model: Model, solver: str | Solver = "auto") -> Model:
    """Make every `nn.GRU`, `nn.LSTM` and `nn.RNN` inside `model` (or the model itself) run parallel in time.

    Modules stay the same objects: parameters, optimisers, hooks, ties and references to them survive. Layers that are
    already timeloom's take over the solver. If a subclass leaves the recurrence to `super().forward`, timeloom's layer
    replaces torch's under it, and the subclass keeps its own methods. Layers that cannot be converted are left as they
    are, with a warning that says why; a model without any such layer, and loops over `nn.GRUCell` and the like, give
    warnings, too. Returns the model.
    """
    resolve(solver)
    _check_model(model)
    loops = list(loops_over_cells(model))
    if not holds_recurrent_layers(model) and not loops:
        warnings.warn(
            f"timeloom found no nn.GRU, nn.LSTM or nn.RNN in {type(model).__name__}: nothing is changed. Cells and "
            f"loops over time are for timeloom.unroll.",
            stacklevel=2,
        )
    for advice in loops:
        warnings.warn(advice, stacklevel=2)
    for name, module in model.named_modules():
        if isinstance(module, Recurrent):
            module.solver = solver
        elif isinstance(module, nn.RNNBase):
            reason = _why_not(module)
            if reason:
                _warn_left_alone(name, module, reason)
                continue
            _change_class(module, grown(_plain(module)))
            module.solver = solver
    return model


def sequentialize(model: Model) -> Model:
    """Undo `parallelize`: every timeloom GRU, LSTM and RNN becomes torch's own again, also under a subclass.

    Layers that torch does not have get `solver="sequential"`. Returns the model.
    """
    _check_model(model)
    for name, module in model.named_modules():
        if not isinstance(module, Recurrent):
            continue
        if not module.has_torch_twin or module._dropping.active:
            module.solver = "sequential"
            continue
        before = None if "forward" in vars(module) else ungrown(_plain(module))
        if before is None:
            _warn_left_alone(name, module, "its class is written on top of timeloom's, or its forward was replaced")
            continue
        for attribute in _added(module):
            module.__dict__.pop(attribute, None)
        _change_class(module, before)
    return model


def holds_recurrent_layers(model: nn.Module) -> bool:
    """Whether a model contains, or is, a recurrent layer of torch's or timeloom's."""
    return any(isinstance(module, nn.RNNBase) for module in model.modules())


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected an nn.Module, got {type(model).__name__}")


def _why_not(module: nn.RNNBase) -> str:
    """Why a layer of torch's cannot be converted; empty if it can."""
    if "forward" in vars(module):
        return "its forward was replaced on the object"
    reason = why_not(_plain(module))
    if reason:
        return reason
    held = vars(module).keys() | module._parameters.keys() | module._buffers.keys() | module._modules.keys()
    taken = sorted(reserved(torch_class(type(module))) & held)
    return f"its {taken[0]} is a name that timeloom's layer has, too: rename it" if taken else ""


def _added(module: nn.Module) -> frozenset[str]:
    """Names of the attributes that timeloom's layer adds to a module of torch's."""
    theirs = torch_class(type(module))
    return frozenset() if theirs is None else attributes_added(theirs)


def _plain(module: nn.Module) -> type:
    """A module's class without the subclass that torch's parametrize adds."""
    cls = type(module)
    return cls.__bases__[0] if parametrize.is_parametrized(module) else cls


def _change_class(module: nn.Module, wanted: type) -> None:
    """Give the module another class, with its parametrizations on top if it has any."""
    if parametrize.is_parametrized(module):
        body = {key: value for key, value in vars(type(module)).items() if key not in ("__dict__", "__weakref__")}
        wanted = type(wanted)(type(module).__name__, (wanted,), body)
    module.__class__ = wanted


def _warn_left_alone(name: str, module: nn.Module, reason: str) -> None:
    warnings.warn(
        f"timeloom left {name or 'the model'!r} ({type(module).__name__}) alone: {reason}. Derive it from "
        f"timeloom.GRU, LSTM or RNN instead, or write its step as a cell for timeloom.unroll.",
        stacklevel=3,
    )
