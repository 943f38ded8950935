"""A module's call by replays alone, which is the steady state of a training run on a GPU, and the checks for it."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from timeloom.distributed.context import alone
from timeloom.kernels.recording import surroundings
from timeloom.nn.sequence import drop
from timeloom.problem import joined
from timeloom.solve.inputs import Inputs
from timeloom.solve.steady import SteadyLayer
from timeloom.solve.steady_pass import Call
from timeloom.torch_state import streams
from timeloom.torch_state.precision import solved_in
from timeloom.torch_state.saved_tensors import saved_through_hooks
from timeloom.torch_state.transforms import transformed

if TYPE_CHECKING:
    from timeloom.nn.base import Recurrent

NAMES = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
MOST_KNOWN = 64
"""Largest number of calls that a module remembers to replay."""


def call_again(module: Recurrent, input: Tensor, hx: Any, resets: Tensor | None = None) -> tuple[Any, Any] | None:
    """A module's forward pass by replays alone, if a call like it has settled; None if that is not possible."""
    plain = (hx is None or _parts(hx) is not None) and (resets is None or type(resets) is Tensor)
    known = module._steady.get(_key(module, input, hx, resets)) if plain else None
    if known is None or transformed() or not alone() or not known.fits(module, input, hx):
        return None
    return known.run(module, input, hx, resets)


def settle(module: Recurrent, input: Tensor, hx: Any, resets: Tensor | None) -> None:
    """Have the next call like this one made by replays alone, if all of this one was replayed."""
    if not possible(input) or (resets is not None and type(resets) is not Tensor):
        return
    found = SteadyCall.of(module, input, hx, resets is not None)
    key = _key(module, input, hx, resets)
    module._steady.pop(key, None)
    if found is not None and len(module._steady) < MOST_KNOWN:
        module._steady[key] = found


class SteadyCall:
    """A call whose layers and directions were all replayed, to be repeated for the next call like it.

    It holds no tensors of a call, and no reference to the module that holds it.
    """

    __slots__ = ("hidden", "layers", "masks", "parameters", "weights", "widths")

    def __init__(self, module: Recurrent, input: Tensor, weights: list[list[tuple[str, Tensor]]]) -> None:
        self.hidden = (module._stacked, input.shape[0 if module.batch_first else 1], module.hidden_size)
        """Shape of the parts of the initial state."""
        self.widths = (module.hidden_size,) * (2 if module.mode == "LSTM" else 1)
        self.masks = module._drops
        """Whether there is dropout inside the recurrence."""
        self.parameters = [
            (name, weight, (weight.data_ptr(), weight.stride(), weight.dtype), weight.requires_grad)
            for own in weights
            for name, weight in own
        ]
        self.weights = [[weight for _, weight in own] + [None] * (len(NAMES) - len(own)) for own in weights]
        self.layers: list[SteadyLayer] = []

    def __reduce__(self) -> Any:
        """A copy of a module has no recordings: it finds its own steady state."""
        return type(None), ()

    @staticmethod
    def of(module: Recurrent, input: Tensor, hx: Any, marked: bool = False) -> SteadyCall | None:
        """The steady call for calls like this; None if not everything in them is replayed yet.

        marked: whether there are resets.
        """
        if input.dim() != 3 or not module._has_kernels or (marked and module.bidirectional):
            return None
        weights = _parameters_of(module)
        if weights is None or (hx is not None and _parts(hx) is None):
            return None
        call = SteadyCall(module, input, weights)
        taped, graded = torch.is_grad_enabled(), input.requires_grad
        if hx is not None:
            graded = graded or any(part.requires_grad for part in _parts(hx) or ())
        ways = 2 if module.bidirectional else 1
        steps, batch = input.shape[:2] if not module.batch_first else (input.shape[1], input.shape[0])
        size, after = sum(call.widths), False
        behind, makes = module._behind(batch, module.hidden_size, size), module._makes_weights(batch)
        for index, own in enumerate(call.weights):
            if index % ways == 0:
                before, after = graded or after, False
                width = module.input_size if index < ways else ways * module.hidden_size
            needs = before or any(weight is not None and weight.requires_grad for weight in own)
            x = input.detach().new_empty(()).expand(steps, batch, width + behind)
            initial = x.new_empty((batch, size), dtype=solved_in(x))
            given = [own[0], own[1].detach() if makes else own[1], *own[2:]]  # type: ignore[union-attr]
            solve = module._solve_of(index, module._experiences)
            with torch.no_grad():
                resets = x.new_empty((), dtype=torch.bool).expand(steps, batch) if marked else None
                layer = SteadyLayer.of(solve, Inputs._make([x, initial, *given, None, None, resets]), taped and needs)
            if layer is None:
                return None
            after = after or needs
            call.layers.append(layer)
        return call

    def fits(self, module: Recurrent, input: Tensor, hx: Any) -> bool:
        """Whether this can make another call with the same key, for a plain tensor, outside of transforms."""
        if not possible(input):
            return False
        held = module._parameters
        for name, weight, place, live in self.parameters:
            if name not in held or held[name] is not weight or weight.requires_grad is not live:
                return False
            if (weight.data_ptr(), weight.stride(), weight.dtype) != place:
                return False
        around = surroundings(input.device)
        for layer in self.layers:
            if not layer.forward.stands_in(*around):
                return False
        return hx is None or all(part.shape == self.hidden for part in _parts(hx) or ())

    def run(self, module: Recurrent, input: Tensor, hx: Any, resets: Tensor | None = None) -> tuple[Any, Any] | None:
        """The module's forward pass; None if a replay is gone or misses its certificate: all is then done anew."""
        x = input.transpose(0, 1) if module.batch_first else input
        if resets is not None:  # a copy, since it is kept, and users may write into theirs
            resets = (resets.t() if module.batch_first else resets).clone(memory_format=torch.contiguous_format)
        ways, stacked = 2 if module.bidirectional else 1, len(self.layers)
        drops, masks = module.dropout > 0 and module.training and stacked > ways, self.masks
        drawn = _generator(input.device).get_state() if drops or masks else None
        weights: Any = module._present_weights() if masks else self.weights
        calls, finals, outputs = [], [], []
        for index, layer in enumerate(self.layers):
            backwards = index % ways == 1
            call = Call(layer, partial(module._solve_of, index, module._experiences), resets)
            initial = None if hx is None else _initial(_parts(hx), index, layer)
            shown, own = module._with_masks(x, weights[index], self.widths) if masks else (x, weights[index])
            found = layer.run(call, shown.flip(0) if backwards else shown, initial, own[: len(NAMES)])
            if found is None:
                _draw_again(input.device, drawn)
                return None
            y, *final = found
            calls.append(call)
            finals.append(final)
            outputs.append(y.flip(0) if backwards else y)
            if len(outputs) == ways:
                x = outputs[0] if ways == 1 else torch.cat(outputs, -1)
                outputs = []
                if drops and index < stacked - 1:
                    x = drop(x, module.dropout, None)
        verdicts = [call.certify() for call in calls]
        if not all(verdicts):
            _draw_again(input.device, drawn)
            return None
        module._take_reports([], verdicts)
        parts = finals[0] if stacked == 1 else [torch.cat(part) for part in zip(*finals, strict=True)]
        y = x.transpose(0, 1) if module.batch_first else x
        return y if y.requires_grad else y.detach(), module._hidden_out(tuple(parts))  # no view: users may write to it


def _key(module: Recurrent, input: Tensor, hx: Any, resets: Tensor | None) -> Hashable:
    """What must be the same between calls, apart from weights, the shape of hx and the stream."""
    marks = None if resets is None else (resets.shape, resets.dtype, resets.device)
    given = input.shape, input.dtype, input.device, input.requires_grad, torch.is_grad_enabled(), marks
    own = *given, module.training, module.mode, module.batch_first
    if hx is None:
        return own
    return *own, type(hx), *((part.dtype, part.device, part.requires_grad) for part in _parts(hx) or ())


def _generator(device: torch.device) -> torch.Generator:
    """The generator that dropout draws from."""
    if device.type != "cuda":
        return torch.default_generator
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


def _draw_again(device: torch.device, drawn: Tensor | None) -> None:
    """Set the generator back to the state `drawn`, since the call is done anew."""
    if drawn is not None:
        _generator(device).set_state(drawn)


def _parts(hx: Any) -> tuple[Tensor, ...] | None:
    """The parts of an initial state if they are plain tensors, else None."""
    parts = (hx,) if isinstance(hx, Tensor) else tuple(hx) if isinstance(hx, tuple | list) else ()
    return parts if parts and all(type(part) is Tensor for part in parts) else None


def _initial(parts: Any, index: int, layer: SteadyLayer) -> Tensor:
    """One layer's initial state `(B, S)`: a copy, since it is kept, and users may write into theirs."""
    found = joined([part[index] for part in parts])
    return found.to(layer.dtype, copy=len(parts) == 1)


def possible(input: Tensor) -> bool:
    """Whether replays may replace a call: not under autocast, tracing or dispatch modes, nor with saved-tensor hooks.

    Tensors that hooks return may stand for other weights than the replay's.
    """
    return (
        streams.may_replay(input.device)
        and not torch.is_autocast_enabled(input.device.type)
        and torch._C._get_tracing_state() is None
        and torch._C._len_torch_dispatch_stack() == 0
        and not saved_through_hooks()
    )


def _parameters_of(module: Recurrent) -> list[list[tuple[str, Tensor]]] | None:
    """The parameters by layer and direction; None if a weight is none, because it is parametrized or was replaced."""
    held, found = module._parameters, []
    for index in range(module._stacked):
        suffix = module._suffix(index)
        own = [(name + suffix, held.get(name + suffix)) for name in (NAMES if module.bias else NAMES[:2])]
        if not all(isinstance(weight, nn.Parameter) for _, weight in own):
            return None
        found.append(own)
    return found  # type: ignore[return-value]
