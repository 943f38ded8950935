"""`TimeParallel`: a model whose sequences are split over many ranks."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_unflatten

from timeloom.distributed.context import time_parallel
from timeloom.distributed.group import TimeGroup
from timeloom.distributed.mesh import group_of
from timeloom.distributed.span import same_on_all_ranks

_TORCHS = (nn.GRU, nn.LSTM, nn.RNN)  # kept at import: users may replace them by ours (`torch.nn.GRU = timeloom.GRU`)


class TimeParallel(nn.Module):
    """A model over the time ranks of a mesh, in the manner of DistributedDataParallel.

    The first argument of a call is this rank's slice of the input in time. Other arguments that require gradients (an
    initial state) must be the same on all ranks. Gradients of parameters and arguments are those of the mean of the
    time ranks' losses: if all ranks compute the same loss, from a final state or by `sum_over_time`, `mean_over_time`
    and `last_over_time`, they are the gradients of that loss, exactly as in one process. Each backward pass sums them
    up once. For more ranks in the data dimension wrap this in DistributedDataParallel.

    module: the model, with the same structure on all time ranks, which all take the parameters and buffers of the
        first one.
    """

    def __init__(self, module: nn.Module, mesh: DeviceMesh, timeout: timedelta | None = None) -> None:
        super().__init__()
        _refuse_torch_layers(module)
        self.module = module
        self._mesh = mesh
        self._timeout = timeout
        _begin_alike(module, group_of(mesh, timeout))

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        group = group_of(self._mesh, self._timeout)
        with time_parallel(self._mesh, self._timeout):
            if group.size == 1:
                return self.module(x, *args, **kwargs)
            x = _enter(x, group, shared=False)
            args, kwargs = _enter((args, kwargs), group, shared=True)
            live = _enter(dict(self.module.named_parameters()), group, shared=True)
            return functional_call(self.module, live, (x, *args), kwargs)


def average_gradients(module: nn.Module, mesh: DeviceMesh) -> None:
    """Turn the gradients of a backward pass under `time_parallel` into those of the mean of the time ranks' losses.

    For models that cannot be wrapped in `TimeParallel`, such as those sharded over the data dimension by `fully_shard`.
    Call it once, between the backward pass and the optimiser's step (or gradient clipping).
    """
    group = group_of(mesh)
    held = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    local = [grad.to_local() if hasattr(grad, "to_local") else grad for grad in held]
    for grad, mean in zip(local, _means(local, group), strict=True):
        grad.copy_(mean)


def _begin_alike(module: nn.Module, group: TimeGroup) -> None:
    """Give all time ranks the first one's parameters and buffers."""
    if group.size == 1:
        return
    held = dict(module.named_parameters()) | dict(module.named_buffers())
    shapes = str([(name, tuple(value.shape), value.dtype) for name, value in held.items()])
    device = next((value.device for value in held.values()), torch.device("cpu"))
    same_on_all_ranks(group, {"the model's parameters and buffers": shapes}, device)
    for kind in dict.fromkeys((value.dtype, value.device) for value in held.values()):
        alike = [value.detach() for value in held.values() if (value.dtype, value.device) == kind]
        told = group.share(torch.cat([value.reshape(-1) for value in alike]))
        for value, first in zip(alike, told.split([value.numel() for value in alike]), strict=True):
            value.copy_(first.view(value.shape))


def _enter(values: Any, group: TimeGroup, shared: bool) -> Any:
    """Pass tensors in nested tuples, lists and dicts to the ranks: their gradients are averaged over ranks.

    For a slice of the input (`shared=False`), gradients are only divided by the number of ranks.
    """
    parts, nesting = tree_flatten(values)
    leaves = [part for part in parts if isinstance(part, Tensor) and part.requires_grad]
    if not leaves or not torch.is_grad_enabled():
        return values
    entered = dict(zip(map(id, leaves), _Entry.apply(group, shared, *leaves), strict=True))
    return tree_unflatten([entered.get(id(part), part) for part in parts], nesting)


class _Entry(torch.autograd.Function):
    """Identity on tensors that enter the ranks; backward, it turns the sum of the ranks' losses into their mean."""

    @staticmethod
    def forward(ctx: Any, group: TimeGroup, shared: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.group, ctx.shared = group, shared
        ctx.like = [tensor.new_empty(()).expand(tensor.shape) for tensor in tensors]
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        group = ctx.group
        if not ctx.shared:
            return None, None, *(None if grad is None else grad / group.size for grad in grads)
        filled = [
            torch.zeros_like(like, memory_format=torch.contiguous_format) if grad is None else grad
            for grad, like in zip(grads, ctx.like, strict=True)
        ]
        used = filled[0].new_tensor([grad is not None for grad in grads])
        used, *means = _means([used, *filled], group)
        return None, None, *(mean if given > 0 else None for mean, given in zip(means, used.tolist(), strict=True))


def _means(tensors: list[Tensor], group: TimeGroup) -> list[Tensor]:
    """The mean over ranks of each tensor, in one exchange for each dtype."""
    means = list(tensors)
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        places = [place for place, tensor in enumerate(tensors) if tensor.dtype == dtype]
        flat = group.sum(torch.cat([tensors[place].reshape(-1) for place in places])) / group.size
        for place, mean in zip(places, flat.split([tensors[place].numel() for place in places]), strict=True):
            means[place] = mean.view(tensors[place].shape)
    return means


def _refuse_torch_layers(module: nn.Module) -> None:
    """Raise for torch's own layers, which would treat a slice as the whole sequence."""
    for name, layer in module.named_modules():
        if type(layer) in _TORCHS:
            raise TypeError(
                f"{name or 'the model'} is torch's own {type(layer).__name__}, which sees one rank's slice only: "
                f"call timeloom.parallelize(model) first"
            )
