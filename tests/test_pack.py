"""Weights are packed for the CPU kernels as torch would move them, and their gradients come back as they went."""

from __future__ import annotations

import pytest
import torch

from timeloom.compile.emit_step import Pack
from timeloom.compile.graph import Matrix
from timeloom.kernels.cpu import build
from timeloom.kernels.cpu.pack import pack, packed_by_torch, unpack

pytestmark = pytest.mark.skipif(build.unavailable() is not None, reason="no compiled kernels here")
SIZES = [(1, 1, 1), (3, 5, 7), (4, 16, 16), (3, 33, 20), (2, 40, 1), (1, 64, 17)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("span", [1, 2])
@pytest.mark.parametrize(("count", "outputs", "inputs"), SIZES)
def test_dense_stacks_are_packed_as_torch_moves_them(
    count: int, outputs: int, inputs: int, span: int, transposed: bool, dtype: torch.dtype
) -> None:
    matrix, how = Matrix(count, 1, outputs, inputs), Pack(0, transposed, span)
    stack = torch.randn(matrix.shape, dtype=dtype)
    for turned in range(count):
        assert torch.equal(pack(stack, matrix, how, turned), packed_by_torch(stack, matrix, how, turned))


def test_stacks_need_not_lie_side_by_side_nor_be_shaped() -> None:
    matrix, how = Matrix(3, 1, 4, 6), Pack(0, False, 1)
    stack = torch.randn(6, 12, requires_grad=True).T
    assert torch.equal(pack(stack, matrix, how), packed_by_torch(stack.detach().reshape(3, 1, 4, 6), matrix, how))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("count", "outputs", "inputs"), SIZES)
def test_gradients_come_back_summed_over_threads_and_in_their_order(
    count: int, outputs: int, inputs: int, threads: int
) -> None:
    matrix, at = Matrix(count, 1, outputs, inputs), 5
    sums = torch.randn(threads, at + inputs * count * outputs + 3)
    whole = sums[0].clone()
    for thread in sums[1:]:
        whole += thread
    for turned in range(count):
        stack = whole[at : at + inputs * count * outputs].view(inputs, count, outputs).permute(1, 2, 0)
        assert torch.equal(unpack(sums, at, matrix, turned), stack.roll(-turned, 0).reshape(count * outputs, inputs))
