"""Torch's own layer: whether a module's call is to be one of it, and how it is called."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from timeloom.report import SolveReport
from timeloom.torch_state.precision import SOLVED

if TYPE_CHECKING:
    from timeloom.nn.base import Recurrent

LAYERS = {"GRU": nn.GRU, "LSTM": nn.LSTM, "RNN_TANH": nn.RNN, "RNN_RELU": nn.RNN}
"""Torch's classes by their mode, kept from the start: users put ours in their place (`torch.nn.GRU = timeloom.GRU`)."""
RUNS = {"GRU": torch.gru, "LSTM": torch.lstm, "RNN_TANH": torch.rnn_tanh, "RNN_RELU": torch.rnn_relu}
"""Torch's operators by their mode: what its classes call."""


SWEPT = ("cpu", "cuda")
"""Kinds of devices that timeloom has sweeps for."""


def obstacle(data: Tensor, hx: Any = None) -> str | None:
    """What timeloom's sweeps cannot run on or inside of, or None."""
    for given in (data, *(hx if isinstance(hx, tuple | list) else (hx,))):
        if type(given) not in (Tensor, nn.Parameter) and hasattr(type(given), "__torch_function__"):
            return f"no sweeps for a {type(given).__name__} of layout {getattr(given, 'layout', 'its own')}"
    if data.device.type not in SWEPT:
        _tell_once(data.device.type)
        return f"no sweeps on {data.device.type}"
    if data.dtype not in SOLVED:
        return f"no sweeps for {data.dtype}"
    if data.is_nested or data.layout != torch.strided:
        return f"no sweeps for a {type(data).__name__} of layout {data.layout}"
    if torch._C._get_tracing_state() is not None:
        return "no sweeps inside torch.jit.trace"
    return None


@cache
def _tell_once(device: str) -> None:
    if device != "meta":  # shapes alone: nobody waits for them
        warnings.warn(f"timeloom has no sweeps on {device}: torch's own layers run there", stacklevel=5)


def why(module: Recurrent, input: Tensor | PackedSequence) -> str | None:
    """Why torch's own layer is to run, or None where timeloom's sweeps are."""
    data = input.data if isinstance(input, PackedSequence) else input
    if not module.has_torch_twin or module._masks:
        return None
    if data.numel() == 0 or data.dim() not in (2, 3):
        return "nothing to solve"
    return module._solver.why_torch(module, data, *size(module, input), module.experiences())


def call(module: Recurrent, input: Tensor | PackedSequence, hx: Any, weights: Sequence[Any] | None = None) -> Any:
    """Torch's forward pass, with other weights than the module's where they are given, layer by layer."""
    if hx is not None:
        module._check_given(hx)
    if weights is None:
        return layer(module).forward(module, input, hx)
    twin = object.__new__(layer(module))
    flat = [weight for own in weights for weight in own if weight is not None]
    vars(twin).update(vars(module), _flat_weights=flat, _flat_weight_refs=[None] * len(flat))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # cuDNN, that these are not one block of memory
        return layer(module).forward(twin, input, hx)


def call_again(module: Recurrent, input: Tensor, hx: Any) -> Any:
    """Torch's forward pass on a batch of a shape that it has accepted before, without its checks of that shape.

    What is around torch's operators in Python is a quarter of a call of few steps.
    """
    stacked, batch = module._stacked, input.shape[0 if module.batch_first else 1]
    run: Any = RUNS[module.mode]
    if module.mode == "LSTM":
        width = module.proj_size or module.hidden_size
        if hx is None:
            zeros = torch.zeros(stacked, batch, width, dtype=input.dtype, device=input.device)
            hx = zeros, zeros if width == module.hidden_size else input.new_zeros(stacked, batch, module.hidden_size)
        elif not (
            isinstance(hx, tuple)
            and len(hx) == 2
            and hx[0].shape == (stacked, batch, width)
            and hx[1].shape == (stacked, batch, module.hidden_size)
        ):
            return call(module, input, hx)  # which says what is wrong with it
    elif hx is None:
        hx = torch.zeros(stacked, batch, module.hidden_size, dtype=input.dtype, device=input.device)
    elif hx.shape != (stacked, batch, module.hidden_size):
        return call(module, input, hx)
    module._update_flat_weights()
    output, *final = run(
        input, hx, module._flat_weights, module.bias, module.num_layers, module.dropout, module.training,
        module.bidirectional, module.batch_first,
    )  # fmt: skip
    return output, tuple(final) if len(final) == 2 else final[0]


def layer(module: Recurrent) -> Any:
    """The torch class that a module stands in for, or has the parameters of."""
    return LAYERS[module.mode]


def report(module: Recurrent, input: Tensor | PackedSequence, reason: str) -> SolveReport:
    steps, _ = size(module, input)
    return SolveReport.sequential(steps, f"{reason}; run by torch's own layer")


def size(module: Recurrent, input: Tensor | PackedSequence) -> tuple[int, int]:
    """Steps and batch of an input."""
    if isinstance(input, PackedSequence):
        return len(input.batch_sizes), int(input.batch_sizes[0])
    if input.dim() != 3:
        return (len(input) if input.dim() else 0), 1
    return (input.shape[1], input.shape[0]) if module.batch_first else (input.shape[0], input.shape[1])
