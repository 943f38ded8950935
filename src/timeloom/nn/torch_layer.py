"""Torch's own layer: whether it runs a module's call, and how it is called."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from timeloom.report import SolveReport
from timeloom.torch_state.precision import SOLVED
from timeloom.torch_state.saved_tensors import saved_through_hooks
from timeloom.torch_state.wrapped import wrapped

if TYPE_CHECKING:
    from timeloom.nn.base import Recurrent

LAYERS = {"GRU": nn.GRU, "LSTM": nn.LSTM, "RNN_TANH": nn.RNN, "RNN_RELU": nn.RNN}
"""Torch's classes by mode, kept at import: users may replace them by ours (`torch.nn.GRU = timeloom.GRU`)."""
RUNS: dict[str, Any] = {"GRU": torch.gru, "LSTM": torch.lstm, "RNN_TANH": torch.rnn_tanh, "RNN_RELU": torch.rnn_relu}
"""Torch's operators by mode, which its classes call."""


STAYS = 64
"""Default number of calls for which torch's layer runs a whole stack before its layers are looked at again."""
SWEPT = ("cpu", "cuda")
"""Types of devices for which timeloom has sweeps."""


def obstacle(module: Recurrent, data: Tensor, hx: Any) -> str | None:
    """Why timeloom's sweeps cannot run for these inputs or in this context, or None."""
    for given in (data, *(hx if isinstance(hx, tuple | list) else (hx,))):
        if type(given) not in (Tensor, nn.Parameter) and hasattr(type(given), "__torch_function__"):
            return f"no sweeps for a {type(given).__name__} of layout {getattr(given, 'layout', 'its own')}"
    standing_in = wrapped_weight(module)
    if standing_in is not None:
        return f"no sweeps for weights that are a {standing_in.__name__}"
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


def wrapped_weight(module: Recurrent) -> type | None:
    """The class of a weight that is a wrapper of other tensors; None if there is none."""
    return wrapped(module.parameters() if module._modules else module._parameters.values())


@cache
def _tell_once(device: str) -> None:
    if device != "meta":  # shapes only: speed does not matter
        warnings.warn(f"timeloom has no sweeps on {device}: torch's own layers run there", stacklevel=8)


def why(module: Recurrent, input: Tensor | PackedSequence) -> str | None:
    """Why torch's own layer runs, or None if timeloom's sweeps do."""
    data = input.data if isinstance(input, PackedSequence) else input
    if not module.has_torch_twin or module._masks:
        return None
    if data.numel() == 0 or data.dim() not in (2, 3):
        return "nothing to solve"
    return module._solver.why_torch(module, data, *size(module, input), module.experiences())


def call(module: Recurrent, input: Tensor | PackedSequence, hx: Any, weights: Sequence[Any] | None = None) -> Any:
    """Torch's forward pass; `weights`, listed by layer and direction, replace those of the module."""
    if hx is not None:
        module._check_given(hx)
    if weights is None:
        return layer(module).forward(module, input, hx)
    twin = object.__new__(layer(module))
    flat = [weight for own in weights for weight in own if weight is not None]
    vars(twin).update(vars(module), _flat_weights=flat, _flat_weight_refs=[None] * len(flat))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # cuDNN warns that these are not one block of memory
        return layer(module).forward(twin, input, hx)


@dataclass(frozen=True, slots=True)
class LeftToTorch:
    """A call that torch's own layer has run, to recognise the next one like it with as few checks as possible."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    taped: bool
    lowered: bool
    reports: list[SolveReport]
    batch: int

    @staticmethod
    def of(module: Recurrent, input: Tensor, reports: list[SolveReport]) -> LeftToTorch:
        modes = torch.is_grad_enabled(), torch.is_autocast_enabled(input.device.type)
        return LeftToTorch(input.shape, input.dtype, input.device, *modes, reports, size(module, input)[1])

    def fits(self, input: Tensor) -> bool:
        """Whether another call is like this one."""
        return (
            input.shape == self.shape
            and input.dtype is self.dtype
            and torch.is_grad_enabled() is self.taped
            and input.device == self.device
            and torch.is_autocast_enabled(self.device.type) is self.lowered
        )


def call_again(
    module: Recurrent, data: Tensor, sizes: Tensor | None, input: Tensor | PackedSequence, hx: Any, batch: int
) -> Any:
    """Torch's forward pass on inputs of a shape that torch accepts, without its checks of the shape.

    sizes: the batch sizes of a PackedSequence, by step.

    The Python code around torch's operators takes a quarter of a call of few steps.
    """
    if sizes is None and data.dim() == 2:
        return _unbatched(module, data, hx)
    stacked, width, lstm = module._stacked, module.proj_size or module.hidden_size, module.mode == "LSTM"
    given = hx
    if hx is None:
        h = torch.zeros((stacked, batch, width), dtype=data.dtype, device=data.device)
        hx = (h, torch.zeros((stacked, batch, module.hidden_size), dtype=h.dtype, device=h.device)) if lstm else h
    elif lstm:
        if type(hx) is not tuple or len(hx) != 2 or hx[0].shape != (stacked, batch, width):
            return call(module, input, hx)  # which says what is wrong with it
        if hx[1].shape != (stacked, batch, module.hidden_size):
            return call(module, input, hx)
    elif hx.shape != (stacked, batch, width):
        return call(module, input, hx)
    parameters = module._parameters
    for reference, name in zip(module._flat_weight_refs, module._flat_weights_names, strict=True):
        if reference is None or reference() is not parameters.get(name):  # other weights, or no parameters
            module._update_flat_weights()
            break
    weights: Any = module._flat_weights
    if weights[0].dtype is not data.dtype:
        return call(module, input, hx)
    run = RUNS[module.mode]
    how = module.bias, module.num_layers, module.dropout, module.training, module.bidirectional
    if sizes is None:
        found = run(data, hx, weights, *how, module.batch_first)
        return found if len(found) == 2 else (found[0], found[1:])
    _, _, order, back = input
    hx = hx if given is None or order is None else module.permute_hidden(hx, order)
    output, *final = run(data, sizes, hx, weights, *how)
    hidden: Any = tuple(final) if lstm else final[0]
    return PackedSequence(output, sizes, order, back), hidden if back is None else module.permute_hidden(hidden, back)


def _unbatched(module: Recurrent, data: Tensor, hx: Any) -> Any:
    """The same on one sequence without a dimension for the batch."""
    if hx is not None:
        lstm = module.mode == "LSTM"
        if (lstm and type(hx) is not tuple) or any(part.dim() != 2 for part in (hx if lstm else (hx,))):
            return call(module, data, hx)  # which says what is wrong with it
        hx = tuple(part.unsqueeze(1) for part in hx) if lstm else hx.unsqueeze(1)
    across = 0 if module.batch_first else 1
    batched = data.unsqueeze(across)
    output, final = call_again(module, batched, None, batched, hx, 1)
    alone = tuple(part.squeeze(1) for part in final) if type(final) is tuple else final.squeeze(1)
    return output.squeeze(across), alone


def layer(module: Recurrent) -> Any:
    """The torch class that a module replaces, or whose parameters it has."""
    return LAYERS[module.mode]


def report(module: Recurrent, input: Tensor | PackedSequence, reason: str) -> SolveReport:
    steps, _ = size(module, input)
    return SolveReport.by_torch(steps, reason)


def calls_left(module: Recurrent, input: Tensor) -> int:
    """For how many calls like the last one torch's own layer runs the whole stack; 0 if one of its layers was ours.

    A stack takes torch less time than its layers one by one.
    """
    plain = input.device.type == "cpu" and input.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    if not plain or saved_through_hooks() or not all(report.ran_in_torch for report in module.reports):
        return 0
    return min(each.waits or max(each.forward.pause, each.backward.pause) or STAYS for each in module.experiences())


def size(module: Recurrent, input: Tensor | PackedSequence) -> tuple[int, int]:
    """Number of steps and batch size of an input."""
    if isinstance(input, PackedSequence):
        return len(input.batch_sizes), int(input.batch_sizes[0])
    if input.dim() != 3:
        return (len(input) if input.dim() else 0), 1
    return (input.shape[1], input.shape[0]) if module.batch_first else (input.shape[0], input.shape[1])
