"""Torch's own layer inside of an operator: one layer and direction, with a tape of its own on a CPU."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from timeloom.report import SolveReport
from timeloom.solve.inputs import Inputs
from timeloom.torch_state import tf32

if TYPE_CHECKING:
    from timeloom.nn.base import Recurrent

Tape = tuple[list[Tensor | None], tuple[Tensor, Tensor]]
"""Of a run of torch's own layer: what to differentiate by, and the results."""
TAPE = "_timeloom_tape"
"""Attribute of the states that torch's own layer found on a CPU: its tape. It gets to the backward pass where torch
hands on the very tensor, as its compilers do; where it does not, the layer is run again."""


def run_forward(
    module: Recurrent, inputs: Inputs, taped: bool, reason: str
) -> tuple[list[Tensor], Tensor, SolveReport]:
    """The same by torch's own layer, which leaves states of h alone."""
    keeps_tape = taped and inputs.x.device.type == "cpu"
    tape = run_torch(module, inputs, keeps_tape)
    outputs, final = (result.detach() for result in tape[1])
    states = torch.cat([inputs.initial[:, : outputs.shape[-1]].to(outputs.dtype).unsqueeze(0), outputs])
    if keeps_tape:
        setattr(states, TAPE, tape)
    return [states], final, SolveReport.by_torch(len(outputs), reason)


def run_torch(module: Recurrent, inputs: Inputs, taped: bool) -> Tape:
    """Torch's own layer: what to differentiate by, outputs `(T, B, ·)` and final state `(B, S)`."""
    with autograd(True) if taped else torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # cuDNN, that one layer of many is not a block of memory by itself
        leaves = [None if tensor is None else tensor.detach().requires_grad_(taped) for tensor in inputs.live]
        x, initial, *weights = leaves
        assert initial is not None
        parts = initial.to(inputs.x.dtype).split(module._bare(*inputs.weights).parts, -1)
        hidden = tuple(part.unsqueeze(0).contiguous() for part in parts)  # cuDNN takes no other
        given = _weights_of_one(module, [weight for weight in weights if weight is not None])
        options = (module.bias, 1, 0.0, module.training, False, False)
        layer = getattr(torch._VF, module.mode.lower())
        with tf32.exact_cudnn() if module._stacked > 1 else nullcontext():  # of a stack cuDNN rounds at other widths
            outputs, *final = layer(x, hidden if len(hidden) > 1 else hidden[0], given, *options)
        return leaves, (outputs, torch.cat(final, -1).squeeze(0))


def _weights_of_one(module: Recurrent, weights: list[Tensor]) -> list[Tensor]:
    """A layer's weights for cuDNN to run by themselves. It takes weights that lie as its own would for a block with
    zeros behind them where biases would be; of a stack without biases, what is there are weights of the next layer.
    """
    alone = module.bias or module._stacked == 1 or not weights[0].is_cuda
    return weights if alone else [weight.clone() for weight in weights]


def differentiate(
    leaves: Sequence[Tensor | None], results: Sequence[Tensor], grads: Sequence[Tensor | None]
) -> list[Any]:
    """Gradients of the leaves that there are."""
    asked = [(result, grad) for result, grad in zip(results, grads, strict=True) if grad is not None]
    given = [leaf for leaf in leaves if leaf is not None]
    with autograd(False):
        found = iter(torch.autograd.grad([result for result, _ in asked], given, [grad for _, grad in asked]))
    return [None if leaf is None else next(found) for leaf in leaves]


@contextmanager
def autograd(on: bool) -> Iterator[None]:
    """Inside of an operator torch keeps autograd off whatever the gradient mode is, until inference mode is left."""
    with torch.inference_mode(False), torch.set_grad_enabled(on):
        yield
