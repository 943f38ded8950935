"""Transposed Jacobians of layers, built analytically from weights and activations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from timeloom.bppsa.matrices import WORTH_SPARSE, Cut, Dense, Matrix, Sparse
from timeloom.bppsa.windows import Windows, pair


def linear(layer: nn.Linear, x: Tensor, y: Tensor) -> Matrix:
    """The weight's transpose, once for every position of the dimensions in front of the features."""
    weight = layer.weight.detach()
    batch, places = len(x), x[0].numel() // layer.in_features
    outputs, inputs = weight.nonzero(as_tuple=True)
    if places == 1 and len(outputs) > WORTH_SPARSE * weight.numel():
        return Dense(weight.t().unsqueeze(0))
    place = torch.arange(places, device=x.device).unsqueeze(1)
    rows, columns = (place * layer.in_features + inputs).flatten(), (place * layer.out_features + outputs).flatten()
    shape = places * layer.in_features, places * layer.out_features
    return Sparse.shared(rows, columns, weight[outputs, inputs].repeat(places), shape, batch)


def conv2d(layer: nn.Conv2d, x: Tensor, y: Tensor) -> Matrix:
    """An entry for each nonzero weight and each place of its window in which it meets an input pixel."""
    _check_images(layer, x)
    if layer.padding_mode != "zeros":
        raise ValueError(f"chain_backward supports Conv2d with padding_mode='zeros' only, got {layer}")
    kernel, dilation = pair(layer.kernel_size), pair(layer.dilation)
    if layer.padding == "same":
        padding = (dilation[0] * (kernel[0] - 1) // 2, dilation[1] * (kernel[1] - 1) // 2)
    else:
        padding = (0, 0) if isinstance(layer.padding, str) else pair(layer.padding)
    geometry = Windows(pair(x.shape[2:]), pair(y.shape[2:]), kernel, pair(layer.stride), padding, dilation)
    pixel, out, place = geometry.entries(x.device)
    weight = layer.weight.detach().flatten(2)
    # pairs sorted by their place in the window, so that those of each weight are contiguous
    order = place.argsort(stable=True)
    pixel, out = pixel[order], out[order]
    counts = torch.bincount(place, minlength=weight.shape[2])
    begins = counts.cumsum(0) - counts
    to, of, at = weight.nonzero(as_tuple=True)
    of_all = of + to // (layer.out_channels // layer.groups) * weight.shape[1]
    which = torch.repeat_interleave(counts[at])
    meeting = torch.arange(len(which), device=x.device) - (counts[at].cumsum(0) - counts[at])[which] + begins[at][which]
    rows = of_all[which] * (x.shape[2] * x.shape[3]) + pixel[meeting]
    columns = to[which] * (y.shape[2] * y.shape[3]) + out[meeting]
    return Sparse.shared(rows, columns, weight[to, of, at][which], (x[0].numel(), y[0].numel()), len(x))


def relu(layer: nn.ReLU, x: Tensor, y: Tensor) -> Matrix:
    return Sparse.diagonal((y > 0).flatten(1).to(y.dtype))


def tanh(layer: nn.Tanh, x: Tensor, y: Tensor) -> Matrix:
    return Sparse.diagonal(1 - y.flatten(1).square())


def max_pool2d(layer: nn.MaxPool2d, x: Tensor, y: Tensor) -> Matrix:
    """A one at the input pixel that each output pixel equals; none for windows in the padding, -inf whatever x is."""
    _check_images(layer, x)
    sizes = layer.kernel_size, layer.stride, layer.padding, layer.dilation
    _, pixel = F.max_pool2d(x, *sizes, layer.ceil_mode, return_indices=True)
    plane = torch.arange(pixel.shape[0] * pixel.shape[1], device=x.device).view(*pixel.shape[:2], 1, 1)
    geometry = Windows(pair(x.shape[2:]), pair(y.shape[2:]), *(pair(size) for size in sizes))
    inside = torch.zeros(y[0, 0].numel(), dtype=torch.bool, device=x.device)
    inside[geometry.entries(x.device)[1]] = True
    columns = inside.expand(*y.shape[:2], -1).flatten().nonzero().squeeze(-1)
    rows = (plane * (x.shape[2] * x.shape[3]) + pixel).flatten()[columns]
    return Sparse.of(rows, columns, torch.ones_like(rows, dtype=y.dtype), (x[0].numel(), y[0].numel()), len(x))


def avg_pool2d(layer: nn.AvgPool2d, x: Tensor, y: Tensor) -> Matrix:
    """One over the divisor of a window's sum, for every pixel of the window."""
    _check_images(layer, x)
    kernel, stride, padding = (pair(value) for value in (layer.kernel_size, layer.stride, layer.padding))
    geometry = Windows(pair(x.shape[2:]), pair(y.shape[2:]), kernel, stride, padding)
    pixel, out, _ = geometry.entries(x.device)
    # Pooling ones counts a window's pixels by all the rules of F.avg_pool2d.
    options = layer.ceil_mode, layer.count_include_pad, layer.divisor_override
    ones = torch.ones(1, 1, *x.shape[2:], dtype=x.dtype, device=x.device)
    share = F.avg_pool2d(ones, kernel, stride, padding, *options).flatten() / torch.bincount(
        out, minlength=y[0, 0].numel()
    )
    channel = torch.arange(x.shape[1], device=x.device).unsqueeze(1)
    rows, columns = channel * (x.shape[2] * x.shape[3]) + pixel, channel * (y.shape[2] * y.shape[3]) + out
    values = share[out].repeat(x.shape[1])
    return Sparse.shared(rows.flatten(), columns.flatten(), values, (x[0].numel(), y[0].numel()), len(x))


BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d
NORM_FLOPS = 8.0
"""Floating-point operations per entry of a BatchNorm's gradient in training: two sums, and a line through them."""


def batch_norm(layer: BatchNorm, x: Tensor, y: Tensor) -> Matrix | Cut:
    """With running statistics a diagonal; with batch statistics a cut, since every entry depends on all samples."""
    if uses_batch(layer):
        return Cut(lambda grad: _pull_norm(layer, x, grad), NORM_FLOPS * x[0].numel())
    assert layer.running_var is not None
    scale = (layer.running_var + layer.eps).rsqrt()
    if layer.weight is not None:
        scale = scale * layer.weight.detach()
    return Sparse.diagonal(scale.to(y.dtype).view(1, -1, *[1] * (x.dim() - 2)).expand(x.shape).flatten(1))


def uses_batch(layer: nn.Module) -> bool:
    """Whether a layer is a BatchNorm that takes its statistics from the batch."""
    return isinstance(layer, BatchNorm) and (layer.training or layer.running_var is None)


@contextmanager
def statistics_kept(layer: nn.Module) -> Iterator[None]:
    """Context in which calls of a BatchNorm leave its running statistics alone: the forward pass has updated them."""
    tracks = getattr(layer, "track_running_stats", None)
    if tracks and uses_batch(layer):
        layer.track_running_stats = False  # type: ignore[assignment]
    try:
        yield
    finally:
        if tracks is not None:
            layer.track_running_stats = tracks


def _pull_norm(layer: BatchNorm, x: Tensor, grad: Tensor) -> Tensor:
    with torch.enable_grad(), statistics_kept(layer):
        point = x.detach().requires_grad_()
        (pulled,) = torch.autograd.grad(layer.forward(point), point, grad)
    return pulled


def flatten(layer: nn.Flatten, x: Tensor, y: Tensor) -> None:
    """None, the identity: the numbers stay in their order."""
    if len(y) != len(x):
        raise ValueError(f"chain_backward needs the batch to stay the first dimension, but {layer} flattens it")


def _check_images(layer: nn.Module, x: Tensor) -> None:
    if x.dim() != 4:
        raise ValueError(f"chain_backward needs a batch of images (B, C, H, W) at {layer}, got shape {tuple(x.shape)}")


LAYERS: dict[type[nn.Module], Callable[[Any, Tensor, Tensor], Matrix | Cut | None]] = {
    nn.Linear: linear,
    nn.Conv2d: conv2d,
    nn.ReLU: relu,
    nn.Tanh: tanh,
    nn.MaxPool2d: max_pool2d,
    nn.AvgPool2d: avg_pool2d,
    nn.BatchNorm1d: batch_norm,
    nn.BatchNorm2d: batch_norm,
    nn.Flatten: flatten,
}
"""Layers with a known Jacobian: `(layer, input, output)` to the transposed Jacobian, None for the identity."""
