"""The contribution of all inputs to all steps, by one product, in memory that is cheap to touch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from timeloom.buffers import empty
from timeloom.cells.base import sum_outer
from timeloom.torch_state.autocast import without_autocast
from timeloom.torch_state.batched import one_by_one
from timeloom.torch_state.eager import eager

MOST_IN_A_ROW = 128
"""Terms that a GPU's float32 product may add up sequentially: with 300, states for large inputs are three times as far
off as cuDNN's."""


def project(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`u = x Wᵀ + b` for all of time: x `(T, B, D)` to `(T, B, K)`, as `F.linear` computes it, with gradients.

    Columns of x behind the first D are copied behind u, and have no gradient.
    """
    given = (x, weight) if bias is None else (x, weight, bias)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given):
        projected: Tensor = _Project.apply(x, weight, bias)
        return projected
    return _product(x, weight, bias)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    wide, inputs = weight.shape
    out = empty(*x.shape[:-1], wide + x.shape[-1] - inputs, like=x)
    flat, rows = out.flatten(0, -2), x.flatten(0, -2)
    multiply(rows[:, :inputs], weight.t(), bias, flat[:, :wide])
    if x.shape[-1] > inputs:
        flat[:, wide:] = rows[:, inputs:]
    return out


def multiply(a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """`a b + bias`, into `out` if given: `(N, depth)` by `(depth, width)`, and `(width,)`.

    In parts, where torch would add up too many terms sequentially.
    """
    depth = len(b)
    most = MOST_IN_A_ROW if _adds_in_a_row(a) else depth
    first, *more = ((a[:, i : i + most], b[i : i + most]) for i in range(0, max(depth, 1), max(most, 1)))
    found = torch.mm(*first, out=out) if bias is None else torch.addmm(bias, *first, out=out)
    for part in more:
        found = torch.addmm(found, *part, out=found)
    return found


def _adds_in_a_row(a: Tensor) -> bool:
    return a.device.type == "cuda" and a.dtype == torch.float32


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    @eager
    @one_by_one
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wide, inputs = weight.shape
        d_x = d_weight = d_bias = None
        flat, rows = grad.flatten(0, -2)[:, :wide], x.flatten(0, -2)[:, :inputs]
        behind = x.shape[-1] - inputs
        if torch.is_grad_enabled():  # to be differentiated again
            d_x = pad(_Product.apply(flat, weight).unflatten(0, x.shape[:-1]), (0, behind))
            return d_x, _Product.apply(flat.t(), rows), flat.sum(0) if ctx.needs_input_grad[2] else None
        with without_autocast(x.device):  # it may be on around the backward pass
            if ctx.needs_input_grad[0]:
                d_x = empty(*x.shape, like=grad)
                torch.mm(flat, weight, out=d_x.flatten(0, -2)[:, :inputs])
                d_x[..., inputs:] = 0
            if ctx.needs_input_grad[1]:
                d_weight = sum_outer(flat, rows)
            if ctx.needs_input_grad[2]:
                d_bias = flat.sum(0)
        return d_x, d_weight, d_bias


class _Product(torch.autograd.Function):
    """`a @ b` of two matrices, differentiable any number of times, and never in autocast's lower precision."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        with without_autocast(a.device):
            return a @ b

    @staticmethod
    @one_by_one
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        return _Product.apply(grad, b.t()), _Product.apply(a.t(), grad)
