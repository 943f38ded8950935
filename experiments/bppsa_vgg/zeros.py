"""Jacobians layer by layer: their zeros, and the time to write one down against autograd's columns."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from experiments.harness import Results, now
from timeloom.bppsa.jacobians import LAYERS
from timeloom.bppsa.matrices import Cut, Dense


@torch.no_grad()
def jacobian_table(model: nn.Sequential, x: Tensor, columns: int, device: str) -> list[Results]:
    """For each layer: entries of its Jacobian, the share that is certain to be zero, and milliseconds to write it down.

    Autograd makes a Jacobian of one image column by column; `columns` of them are timed, and counted for
    all.
    """
    rows, point = [], x[:1]
    for number, layer in enumerate(model):
        out = layer(point)
        LAYERS[type(layer)](layer, point, out)  # warms up
        began = now(device)
        matrix = LAYERS[type(layer)](layer, point, out)
        taken = 1e3 * (now(device) - began)
        if matrix is not None and not isinstance(matrix, Cut):
            height, width = matrix.shape
            stored = height * width if isinstance(matrix, Dense) else matrix.stored
            by_autograd = _autograd_columns(layer, point, columns, device) * out.numel()
            rows.append(
                {
                    "layer": f"{number} {type(layer).__name__}",
                    "shape": [height, width],
                    "zeros": 1 - stored / (height * width),
                    "ms": taken,
                    "autograd_ms": by_autograd,
                }
            )
        point = out
    return rows


def _autograd_columns(layer: nn.Module, point: Tensor, columns: int, device: str) -> float:
    """Milliseconds of a column by autograd, the mean of some."""
    with torch.enable_grad():
        given = point.detach().requires_grad_()
        out = layer(given).flatten()
        count = min(columns, out.numel())
        began = now(device)
        for column in range(count):
            torch.autograd.grad(out[column], given, retain_graph=True)
        return 1e3 * (now(device) - began) / count
