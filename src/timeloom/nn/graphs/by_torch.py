"""Torch's own layer inside an operator: one layer and direction, with a separate autograd tape on a CPU."""

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
"""The leaves and the results of a run of torch's own layer."""
TAPE = "_timeloom_tape"
"""Attribute of the states computed by torch's own layer on a CPU: its tape. The backward pass finds it if torch passes
on the same tensor object, as its compilers do; otherwise the layer is run again."""


def run_forward(
    module: Recurrent, inputs: Inputs, taped: bool, reason: str
) -> tuple[list[Tensor], Tensor, SolveReport]:
    """The forward pass by torch's own layer, of which only the states of h are known."""
    keeps_tape = taped and inputs.x.device.type == "cpu"
    tape = run_torch(module, inputs, keeps_tape)
    outputs, final = (result.detach() for result in tape[1])
    states = torch.cat([inputs.initial[:, : outputs.shape[-1]].to(outputs.dtype).unsqueeze(0), outputs])
    if keeps_tape:
        setattr(states, TAPE, tape)
    return [states], final, SolveReport.by_torch(len(outputs), reason)


def run_torch(module: Recurrent, inputs: Inputs, taped: bool) -> Tape:
    """Run torch's own layer; returns the leaves, and outputs `(T, B, ·)` and final state `(B, S)`."""
    with autograd(True) if taped else torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # cuDNN warns that one layer's weights are no block of their own
        leaves = [None if tensor is None else tensor.detach().requires_grad_(taped) for tensor in inputs.live]
        x, initial, *weights = leaves
        assert initial is not None
        parts = initial.to(inputs.x.dtype).split(module._bare(*inputs.weights).parts, -1)
        hidden = tuple(part.unsqueeze(0).contiguous() for part in parts)  # as cuDNN requires
        given = _weights_of_one(module, [weight for weight in weights if weight is not None])
        options = (module.bias, 1, 0.0, module.training, False, False)
        layer = getattr(torch._VF, module.mode.lower())
        with tf32.exact_cudnn() if module._stacked > 1 else nullcontext():  # in a stack, cuDNN rounds at other widths
            outputs, *final = layer(x, hidden if len(hidden) > 1 else hidden[0], given, *options)
        return leaves, (outputs, torch.cat(final, -1).squeeze(0))


def _weights_of_one(module: Recurrent, weights: list[Tensor]) -> list[Tensor]:
    """One layer's weights, such that cuDNN can run this layer alone.

    Weights that lie in memory as in cuDNN's own block are taken for one, with zeros behind them in place of biases. In
    a stack without biases the next layer's weights lie there instead, so the weights are copied.
    """
    alone = module.bias or module._stacked == 1 or not weights[0].is_cuda
    return weights if alone else [weight.clone() for weight in weights]


def differentiate(
    leaves: Sequence[Tensor | None], results: Sequence[Tensor], grads: Sequence[Tensor | None]
) -> list[Any]:
    """Gradients of the leaves that are not None."""
    asked = [(result, grad) for result, grad in zip(results, grads, strict=True) if grad is not None]
    given = [leaf for leaf in leaves if leaf is not None]
    with autograd(False):
        found = iter(torch.autograd.grad([result for result, _ in asked], given, [grad for _, grad in asked]))
    return [None if leaf is None else next(found) for leaf in leaves]


@contextmanager
def autograd(on: bool) -> Iterator[None]:
    """Set the gradient mode inside an operator, where torch keeps autograd off unless inference mode is left, too."""
    with torch.inference_mode(False), torch.set_grad_enabled(on):
        yield
