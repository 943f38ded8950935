"""Torch's two settings for tf32, one of which it refuses to read once the other was used."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import timeloom as tl
from timeloom.cells import Cell, GRUCell, ImplicitGRUCell, LSTMCell, RNNCell
from timeloom.cells.generic import GenericCell
from timeloom.kernels.cuda import wide
from timeloom.solvers import Auto
from timeloom.torch_state import tf32

matmul: Any = torch.backends.cuda.matmul
rnn: Any = torch.backends.cudnn.rnn
newer = pytest.mark.skipif(not hasattr(matmul, "fp32_precision"), reason="torch has the older setting alone")


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    yield
    torch.backends.cudnn.allow_tf32, matmul.allow_tf32 = True, False


def rounds() -> bool:
    """Whether torch's products round now."""
    return bool(matmul.fp32_precision == "tf32" if hasattr(matmul, "fp32_precision") else matmul.allow_tf32)


@pytest.mark.parametrize("matrices", [False, True])
@pytest.mark.parametrize("layers", [False, True])
def test_the_older_setting(layers: bool, matrices: bool) -> None:
    torch.backends.cudnn.allow_tf32, matmul.allow_tf32 = layers, matrices
    assert tf32.cudnn_rounds() == layers
    assert tf32.matmul_rounds() == matrices
    with tf32.products(False):
        assert not rounds()
        assert not matmul.allow_tf32, "torch looks at it too, where it is profiled"
    assert rounds() == matmul.allow_tf32 == matrices


@newer
@pytest.mark.parametrize("matrices", ["none", "ieee", "tf32"])
@pytest.mark.parametrize("layers", ["ieee", "tf32"])
def test_the_newer_setting(layers: str, matrices: str) -> None:
    rnn.fp32_precision, matmul.fp32_precision = layers, matrices
    assert tf32.cudnn_rounds() == (layers == "tf32")
    assert tf32.matmul_rounds() == (matrices == "tf32")
    with tf32.products(False):
        assert not rounds()
    assert (rnn.fp32_precision, matmul.fp32_precision) == (layers, matrices)


@pytest.mark.skipif(not wide.SUMS_HALVES, reason="torch cannot add up products of halves in float32")
@pytest.mark.parametrize("kernel", ["gru", "lstm"])
def test_wide_layers_split_their_products_where_rounding_is_allowed(kernel: str) -> None:
    for rounded, mode in ((True, wide.SPLIT), (False, wide.PLAIN)):
        torch.backends.cudnn.allow_tf32 = rounded
        assert wide.mode_of(kernel, torch.float32, rows=2) == mode
        assert wide.mode_of(kernel, torch.float32, rows=1) == wide.PLAIN, "cuDNN rounds no product with one vector"
        assert wide.mode_of(kernel, torch.float16, rows=1) == 1
    assert wide.mode_of("rnn_tanh", torch.float32, rows=2) == wide.PLAIN


def problem_on_a_gpu(cell: type[Cell]) -> Any:
    """What is looked at of a problem there."""
    return SimpleNamespace(cell=cell, rounded=SimpleNamespace(device=torch.device("cuda"), dtype=torch.float32))


@pytest.mark.parametrize("matrices", [False, True])
@pytest.mark.parametrize("layers", [False, True])
def test_tolerances_go_with_the_products(layers: bool, matrices: bool) -> None:
    """The kernels of cuDNN's cells never round to tf32, whatever cuDNN may do; a user's cell has torch's products."""
    torch.backends.cudnn.allow_tf32, matmul.allow_tf32 = layers, matrices
    for cells, rounded in (((GRUCell, LSTMCell, RNNCell), False), ((ImplicitGRUCell, GenericCell), matrices)):
        for cell in cells:
            problem = problem_on_a_gpu(cell)
            backward = 5e-7 if cell is GenericCell else 2.5e-7  # a layer norm's rounding stays near 3e-7
            assert Auto().tolerance(problem) == (2e-4 if rounded else 1e-6), cell
            assert Auto().adjoint_tolerance(problem) == (2e-4 if rounded else backward), cell
            assert Auto(tol=1e-3).tolerance(problem) == 1e-3


@newer
def test_solves_by_jacobians_under_the_newer_setting() -> None:
    matmul.fp32_precision = "tf32"
    layer = tl.GRU(2, 3, solver="deer").double()
    x = torch.randn(9, 2, 2, dtype=torch.float64)
    torch.testing.assert_close(layer(x)[0], torch.nn.GRU.forward(layer, x)[0], rtol=0.0, atol=1e-13)
    assert matmul.fp32_precision == "tf32"
