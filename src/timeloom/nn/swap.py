"""Swap every torch recurrent layer inside a model for timeloom's, and back, in place."""

from __future__ import annotations

import warnings
from typing import TypeVar

from torch import nn
from torch.nn.utils import parametrize

from timeloom.nn.base import Recurrent
from timeloom.nn.modules import GRU, LSTM, RNN
from timeloom.solvers.base import Solver, resolve

Model = TypeVar("Model", bound=nn.Module)

_PAIRS: tuple[tuple[type[nn.RNNBase], type[Recurrent]], ...] = ((nn.GRU, GRU), (nn.LSTM, LSTM), (nn.RNN, RNN))


def parallelize(model: Model, solver: str | Solver = "auto") -> Model:
    """Make every `nn.GRU`, `nn.LSTM` and `nn.RNN` inside `model` (or the model itself) run parallel in time.

    Modules stay the same objects: parameters, optimisers, hooks, ties and references to them survive. Layers that are
    timeloom's already take the solver. A layer with code of its own is left alone, with a warning, and so is a model
    without any such layer. Returns the model.
    """
    resolve(solver)
    _check_model(model)
    if not holds_recurrent_layers(model):
        warnings.warn(
            f"timeloom found no nn.GRU, nn.LSTM or nn.RNN in {type(model).__name__}: nothing is changed. Cells and "
            f"loops over time are for timeloom.unroll.",
            stacklevel=2,
        )
    for name, module in model.named_modules():
        if isinstance(module, Recurrent):
            module.solver = solver
        elif isinstance(module, nn.RNNBase):
            if _swap_class(module, _PAIRS):
                module.solver = solver
            else:
                _warn_left_alone(name, module)
    return model


def sequentialize(model: Model) -> Model:
    """Undo `parallelize`: every timeloom GRU, LSTM and RNN becomes torch's own again; what torch does not have takes
    `solver="sequential"`. Returns the model.
    """
    _check_model(model)
    back = tuple((ours, theirs) for theirs, ours in _PAIRS)
    for name, module in model.named_modules():
        if not isinstance(module, Recurrent):
            continue
        if not module.has_torch_twin:
            module.solver = "sequential"
            continue
        if not _swap_class(module, back):
            _warn_left_alone(name, module)
            continue
        for attribute in (
            "_solver",
            "_solver_given",
            "_experiences",
            "_known",
            "_last",
            "_rehearsed",
            "_handle",
            "reports",
        ):
            module.__dict__.pop(attribute, None)
    return model


def holds_recurrent_layers(model: nn.Module) -> bool:
    """Whether a model has, or is, a layer of torch's or timeloom's."""
    return any(isinstance(module, nn.RNNBase) for module in model.modules())


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected an nn.Module, got {type(model).__name__}")


def _swap_class(module: nn.Module, pairs: tuple[tuple[type, type], ...]) -> bool:
    """Give the module its counterpart's class; False where its code is not exactly that of a known one."""
    if "forward" in vars(module):
        return False
    cls = type(module)
    parametrized = parametrize.is_parametrized(module)
    plain = cls.__bases__[0] if parametrized else cls
    for known, counterpart in pairs:
        if plain is known:
            module.__class__ = _reparametrized(cls, counterpart) if parametrized else counterpart
            return True
    return False


def _reparametrized(cls: type, counterpart: type) -> type:
    """The class that torch's parametrize made for a module, on top of another base."""
    body = {key: value for key, value in vars(cls).items() if key not in ("__dict__", "__weakref__", "__doc__")}
    return type(cls.__name__, (counterpart,), body)


def _warn_left_alone(name: str, module: nn.Module) -> None:
    warnings.warn(
        f"timeloom left {name or 'the model'!r} ({type(module).__name__}) alone: it is a subclass, or its forward was "
        f"replaced. Derive it from timeloom.nn instead, or write its step as a cell for timeloom.unroll.",
        stacklevel=3,
    )
