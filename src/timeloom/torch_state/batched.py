"""Batched gradients, which torch wraps into one tensor whose values a solve cannot read: they are taken one by one."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch

Gradients = tuple[Tensor | None, ...]


def one_by_one(backward: Callable[..., Gradients]) -> Callable[..., Gradients]:
    """Wrap a Function's `backward(ctx, *grads)` to run once for each of several batched gradients.

    These come from `torch.autograd.grad(is_grads_batched=True)`, `jacobian(vectorize=True)` and a `vmap` around
    `torch.autograd.grad`.
    """

    @wraps(backward)
    def run(ctx: Any, *grads: Any) -> Gradients:
        for grad in grads:
            if grad is not None and _is_wrapped(grad):
                break
        else:
            return backward(ctx, *grads)
        wrapped = [grad is not None and _is_wrapped(grad) for grad in grads]
        level, wrap = _wrapping(next(grad for grad, is_one in zip(grads, wrapped, strict=True) if is_one))
        many = [_unwrapped(grad, level) if is_one else grad for grad, is_one in zip(grads, wrapped, strict=True)]
        count = next(len(grad) for grad, is_one in zip(many, wrapped, strict=True) if is_one)
        rows = [
            run(ctx, *(grad[row] if is_one else grad for grad, is_one in zip(many, wrapped, strict=True)))
            for row in range(count)
        ]
        stacked = (None if parts[0] is None else torch.stack(parts) for parts in zip(*rows, strict=True))
        return tuple(None if part is None else wrap(part, 0, level) for part in stacked)

    return run


def _is_wrapped(grad: Tensor) -> bool:
    return bool(_functorch.is_batchedtensor(grad) or _functorch.is_legacy_batchedtensor(grad))


def _wrapping(grad: Tensor) -> tuple[int, Callable[[Tensor, int, int], Tensor]]:
    """The level of vmap that wrapped a gradient, and the function that wraps others like it."""
    if _functorch.is_batchedtensor(grad):
        return _functorch.maybe_get_level(grad), _functorch._add_batch_dim
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    return level, torch._add_batch_dim


def _unwrapped(grad: Tensor, level: int) -> Tensor:
    """The batched gradients, along a first dimension."""
    if _functorch.is_batchedtensor(grad):
        return _functorch.get_unwrapped(grad).movedim(_functorch.maybe_get_bdim(grad), 0)
    return torch._remove_batch_dim(grad, level, 1, 0)
