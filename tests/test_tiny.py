"""Numbers that fade to nothing along a sequence: the CPU kernels take them for zero before they become slow."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import timeloom as tl
from timeloom.cells import LiGRU
from timeloom.kernels.cpu import build

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(build.unavailable() is not None, reason="needs a C compiler"),
]

ONE_CHUNK = tl.solvers.Shooting(chunk=2**40, warmup=0)
LAYERS = {
    "GRU": lambda: tl.GRU(3, 16, solver=ONE_CHUNK),
    "LSTM": lambda: tl.LSTM(3, 16, solver=ONE_CHUNK),
    "RNN": lambda: tl.RNN(3, 16, solver=ONE_CHUNK),
    "LiGRU": lambda: tl.Layer(LiGRU(3, 16), solver=ONE_CHUNK),
}


def fading_gradient(layer: nn.Module, steps: int = 3000) -> Tensor:
    """Of inputs, by the last step alone."""
    x = torch.randn(steps, 2, 3, requires_grad=True)
    y: Tensor = layer(x)[0]
    return torch.autograd.grad(y[-1].sum(), [x])[0]


@pytest.mark.parametrize("name", LAYERS)
def test_what_fades_is_zero_before_it_is_slow(name: str) -> None:
    torch.manual_seed(0)
    sizes = fading_gradient(LAYERS[name]()).abs()
    assert bool((sizes[-1] > 0).all())
    assert not sizes[0].any()
    assert not ((sizes > 0) & (sizes < torch.finfo(torch.float32).tiny)).any()


def test_other_code_keeps_its_small_numbers() -> None:
    fading_gradient(tl.GRU(3, 16, solver=ONE_CHUNK), 50)
    small = torch.full((8,), 1e-39)
    assert torch.equal((2 * small) / 2, small)
