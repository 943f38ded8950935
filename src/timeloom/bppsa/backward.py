"""`chain_backward`: gradients of a chain of layers by a scan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from timeloom.bppsa.jacobians import LAYERS, statistics_kept
from timeloom.bppsa.matrices import Cut, Matrix
from timeloom.bppsa.ranks import Each, Shared, alone
from timeloom.bppsa.scan import Operation, ScanTrace, scan_backward
from timeloom.options import check_count
from timeloom.torch_state.autocast import without_autocast
from timeloom.torch_state.eager import eager
from timeloom.torch_state.transforms import refuse_transforms


@eager
def chain_backward(
    model: nn.Sequential,
    x: Tensor,
    loss: Callable[[Tensor], Tensor],
    levels: int | None = None,
    record: Callable[[ScanTrace], None] | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """`loss(model(x)).backward()` with the gradients of all layers found by one scan, of log depth.

    The gradient at a layer's input is its transposed Jacobian times the gradient at its output: a chain of
    matrix-vector products, here as a modified Blelloch scan (Wang, Bai and Pekhimenko, "BPPSA: Scaling Back-propagation
    by Parallel Scan Algorithm", 2020). Jacobians are sparse where layers are: convolutions, pruned weights, ReLU.

    model: an nn.Sequential (or Sequentials within it) of Linear, Conv2d, ReLU, Tanh, MaxPool2d, AvgPool2d, Flatten,
        BatchNorm1d and BatchNorm2d. A BatchNorm in training couples the samples of the batch: the scan ends before
        it and starts anew behind it. In eval mode its Jacobian is diagonal.
    x: the input, `(B, ...)`; float32 or float64.
    loss: from the model's output to a scalar, such as `lambda y: F.cross_entropy(y, target)`.
    levels: levels of the scan in which matrices are multiplied; the roots above them are run through serially.
        0 is back-propagation; None takes as many as there are.
    record: called with the trace of the scan: its products and what they cost.
    group: processes of torch.distributed that share the products of every level. All of them hold the same model and
        call this with the same batch; each builds all Jacobians, and all have all gradients in the end.
    Returns the loss, detached. Gradients are added to `.grad` of parameters, and flow on into x if it wants one.
    Autocast is for the loss alone: the layers run in their own precision.
    """
    refuse_transforms("chain_backward", "loss(model(x))")
    layers = list(_layers(model))
    _check(layers, x, loss, levels)
    with torch.no_grad(), _own_precision(x):
        points = [x.detach()]
        for _, layer in layers:
            inplace = getattr(layer, "inplace", False)
            points.append(layer(points[-1].clone() if inplace else points[-1]))
            _check_hooks(layer, points[-2], points[-1])
        jacobians = [LAYERS[type(layer)](layer, *points[i : i + 2]) for i, (_, layer) in enumerate(layers)]
    output = points[-1].detach().requires_grad_()
    value = loss(output)
    _check_loss(value)
    each = _sharing(group, value)
    value.backward()
    if output.grad is None:
        raise ValueError("loss(y) does not depend on y: there is nothing to back-propagate")
    with torch.no_grad(), _own_precision(x):
        grads, trace = _gradients(output.grad, points, jacobians, _first_needed(layers, x), levels, each)
    with _own_precision(x):
        for (_, layer), point, grad in zip(layers, points, grads[1:], strict=False):
            _add_parameter_grads(layer, point, grad)
    if x.requires_grad:
        assert grads[0] is not None
        torch.autograd.backward(x, grads[0])
    if record is not None:
        record(trace)
    return value.detach()


def _sharing(group: Any, value: Tensor) -> Each:
    """Who computes the products of a level: this process, or those of a group."""
    if group is None:
        return alone
    if not dist.is_available() or not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group must be a process group of torch.distributed or None, got {type(group).__name__}")
    shared = Shared(group, value)
    if not shared.same(value):
        raise ValueError(
            "the processes of the group have different losses: all of them must hold the same model and call "
            "chain_backward with the same batch"
        )
    return shared


def _own_precision(x: Tensor) -> AbstractContextManager[None]:
    """Context without autocast, whose dtypes products of sparse matrices do not support."""
    return without_autocast(x.device)


def _gradients(
    gradient: Tensor,
    points: list[Tensor],
    jacobians: list[Matrix | Cut | None],
    first: int,
    levels: int | None,
    each: Each,
) -> tuple[list[Tensor | None], ScanTrace]:
    """The gradient at every point from `first` on, in the point's shape; None before.

    There is a scan for each piece between cuts.
    """
    grads: list[Tensor | None] = [None] * len(points)
    grads[-1], trace, end = gradient, ScanTrace(), len(jacobians)
    while end > first:
        begin = end
        while begin > first and not isinstance(jacobians[begin - 1], Cut):
            begin -= 1
        known = [
            jacobian for jacobian in jacobians[begin:end] if jacobian is not None and not isinstance(jacobian, Cut)
        ]
        here = grads[end]
        assert here is not None
        found, made = scan_backward(here.flatten(1), known[::-1], levels, each)
        trace.operations += made.operations
        trace.serial += made.serial
        for i in reversed(range(begin, end)):
            if jacobians[i] is not None:
                found = found[1:]
            grads[i] = found[0].view(points[i].shape)
        end = begin
        cut = jacobians[end - 1] if end > first else None
        if isinstance(cut, Cut):
            here = grads[end]
            assert here is not None
            end -= 1
            grads[end] = cut.pull(here)
            trace.operations.append(Operation("middle", 0, "matvec", cut.flops))
            trace.serial.append(cut.flops)
    return grads, trace


def _first_needed(layers: list[tuple[str, nn.Module]], x: Tensor) -> int:
    """The first point whose gradient is needed: the input, or the output of the first layer with parameters."""
    if x.requires_grad:
        return 0
    trained = (i for i, (_, layer) in enumerate(layers) if any(p.requires_grad for p in layer.parameters()))
    return next(trained, len(layers) - 1) + 1


def _add_parameter_grads(layer: nn.Module, point: Tensor, grad: Tensor | None) -> None:
    """Add a layer's own gradients, from its input and the gradient at its output."""
    parameters = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    if not parameters:
        return
    assert grad is not None
    with torch.enable_grad(), statistics_kept(layer):
        torch.autograd.backward(layer(point), grad, inputs=parameters)


def _layers(model: Any, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """All layers with their names, nested chains inlined; a layer used twice appears twice."""
    if not _is_chain(model):
        raise TypeError(
            f"model must be an nn.Sequential, a chain of layers, got {type(model).__name__}"
            + (" with a forward of its own" if isinstance(model, nn.Sequential) else "")
        )
    for key, layer in model._modules.items():
        if _is_chain(layer):
            yield from _layers(layer, f"{name}{key}.")
        else:
            yield f"{name}{key}", layer


def _is_chain(model: Any) -> bool:
    return isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward


def _check(layers: list[tuple[str, nn.Module]], x: Any, loss: Any, levels: object) -> None:
    for name, layer in layers:
        if type(layer) not in LAYERS:
            supported = ", ".join(kind.__name__ for kind in LAYERS)
            raise TypeError(
                f"chain_backward does not know the Jacobian of layer {name}, {layer}. Supported layers are {supported} "
                f"and nn.Sequential of them; for others use loss(model(x)).backward()."
            )
        if getattr(layer, "return_indices", False):
            raise ValueError(
                f"chain_backward needs layers that return one tensor: layer {name}, {layer}, returns indices"
            )
    if not layers:
        raise ValueError("model has no layers")
    if not torch.is_grad_enabled():
        raise RuntimeError("chain_backward needs gradients, and torch.no_grad() or inference_mode() has them off")
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a Tensor, got {type(x).__name__}")
    if x.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"x must be float32 or float64, got {x.dtype}")
    if x.dim() < 2 or len(x) == 0:
        raise ValueError(f"x must have shape (B, ...) with B ≥ 1, got {tuple(x.shape)}")
    if not callable(loss):
        raise TypeError(f"loss must be a function of the model's output, got {type(loss).__name__}")
    check_count("levels", levels, least=0)


def _check_hooks(layer: nn.Module, given: Tensor, returned: Tensor) -> None:
    """Refuse forward hooks that change a layer's output, since its Jacobian would not include the change."""
    if layer._forward_hooks or layer._forward_pre_hooks:
        with statistics_kept(layer):
            plain = layer.forward(given.clone())
        if not torch.equal(plain.nan_to_num(), returned.nan_to_num()):
            raise TypeError(
                f"a forward hook changes what {layer} returns, and chain_backward does not know its Jacobian: remove "
                f"the hook, or use loss(model(x)).backward()"
            )


def _check_loss(value: Any) -> None:
    if not isinstance(value, Tensor) or value.numel() != 1:
        given = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"loss(y) must return a scalar tensor, got {given}")
    if not value.requires_grad:
        raise ValueError("loss(y) does not depend on y: there is nothing to back-propagate")
