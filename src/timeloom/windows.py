"""Training on sequences too long for memory, window by window, with a carried state and exact gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from timeloom.distributed.context import time_group
from timeloom.nn.base import Recurrent
from timeloom.options import check_count


def windowed(layer: nn.RNNBase, x: Tensor, hx: Any = None, *, window: int) -> tuple[Tensor, Any]:
    """`layer(x, hx)` in windows of `window` steps, each of which starts from the final state of the one before.

    Results and gradients equal those of one call. The backward pass of a window recomputes its forward pass, so that
    apart from inputs and outputs only one window's intermediate values are in memory at a time. x may stay on the CPU
    while the layer is on a GPU: windows are copied when they are needed.

    layer: a timeloom or torch layer (GRU, LSTM, RNN), in one direction.
    x: `(T, B, D)`, `(B, T, D)` if batch_first, or `(T, D)`.
    window: steps in a window; the last one may be shorter.
    """
    if not isinstance(layer, nn.RNNBase):
        raise TypeError(f"layer must be a recurrent layer of timeloom or torch.nn, got {type(layer).__name__}")
    if layer.bidirectional:
        raise ValueError(
            "windows carry a state from left to right, and this layer is bidirectional: use two layers, the second on "
            "x.flip(time), or one call"
        )
    if layer.dropout > 0 and layer.training:
        raise ValueError(
            f"dropout={layer.dropout} between layers would be drawn window by window: use dropout=0, or one call"
        )
    if layer.training and isinstance(layer, Recurrent) and layer._dropping.active:
        raise ValueError(
            "dropout inside the recurrence (recurrent_dropout=, zoneout=, weight_dropout=) would be drawn window by "
            "window: call .eval(), set it to 0, or use one call"
        )
    check_count("window", window)
    if time_group() is not None:
        raise NotImplementedError(
            "windows follow each other in time, and over many ranks all slices are run together: call the layer "
            "itself, with more time ranks where a slice does not fit into memory"
        )
    if not isinstance(x, Tensor) or x.dim() not in (2, 3):
        given = f"{x.dim()} dimensions" if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"x must be a Tensor of 2 or 3 dimensions, got {given}")
    time = 1 if layer.batch_first and x.dim() == 3 else 0
    if x.shape[time] == 0:
        raise ValueError(f"x must have at least one step, got shape {tuple(x.shape)}")
    device = layer.weight_ih_l0.device
    outputs = []
    for start in range(0, x.shape[time], window):
        piece = x.narrow(time, start, min(window, x.shape[time] - start))
        y, hx = checkpoint(_run, layer, piece, hx, device, use_reentrant=False, preserve_rng_state=False)
        outputs.append(y)
    return torch.cat(outputs, time), hx


def _run(layer: nn.Module, piece: Tensor, hx: Any, device: torch.device) -> Any:
    return layer(piece.to(device), hx)
