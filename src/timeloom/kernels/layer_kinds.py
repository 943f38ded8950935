"""The kernels that run whole layers, best first."""

from __future__ import annotations

import torch
from torch import Tensor

from timeloom.cells.base import Cell
from timeloom.kernels.cpu.layer import CPULayer
from timeloom.kernels.cuda.layer import CUDALayer
from timeloom.kernels.cuda.sweeper import usable
from timeloom.kernels.layer import Layer

KINDS: tuple[type[Layer], ...] = (CPULayer, CUDALayer)


def layer_kind(cell: Cell, x: Tensor) -> type[Layer] | None:
    """The best kernels that can run a layer of this cell on x `(T, B, D)`, or None."""
    if cell.kernel is None:
        return None
    for kind in KINDS:
        if (kind.takes_masks or not cell.behind) and kind.supports(x, cell):
            return kind
    return None


def multiplies_as_given(x: Tensor) -> bool:
    """Whether kernels accept x in its own precision, including half precision."""
    return x.dtype != torch.float64 and usable(x.device)
