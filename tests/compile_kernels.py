"""Compiles all kernels that the host code launches for a Hopper GPU, without one: run by test_kernels_compile.py.

Triton's interpreter runs kernels as Python, and accepts more than its compiler does.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from timeloom.kernels.cuda import product_kernels, products
from timeloom.kernels.launch import launch
from timeloom.scan import gpu as scan
from timeloom.scan import gpu_kernels as scan_kernels
from timeloom.scan import gpu_matrix_kernels as matrix_kernels

KERNELS = {
    scan_kernels: ("diagonal_kernel",),
    matrix_kernels: ("transfers_kernel", "matrix_kernel"),
    product_kernels: ("split_kernel", "by_split_kernel", "look_kernel", "outer_kernel"),
}


class Absent:
    """A driver for an absent GPU of compute capability 9.0."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


class Compiled:
    """A kernel that is compiled instead of launched."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self.arg_names, self.pre_run_hooks = kernel.arg_names, kernel.pre_run_hooks

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def compile_(*args: Any, **constants: Any) -> Relaunched:
            compiled = self._kernel.warmup(*args, grid=grid, **constants)
            assert "ptx" in compiled.asm
            print("compiled", self._kernel.fn.__name__, flush=True)
            options = {name: value for name, value in constants.items() if name not in self.arg_names}
            return Relaunched(self._kernel, compiled, options)

        return compile_


class Relaunched:
    """A compiled kernel launched again without inspecting arguments: Triton's own inspection must choose the same."""

    def __init__(self, kernel: Any, compiled: Any, options: dict[str, Any]) -> None:
        self._kernel, self._compiled, self._options = kernel, compiled, options

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def check(*args: Any) -> None:
            assert len(grid) == 3
            assert len(args) == len(self._kernel.arg_names)
            assert self._kernel.warmup(*args, grid=grid, **self._options) is self._compiled
            print("relaunched", self._kernel.fn.__name__, flush=True)

        return check


@triton.jit(do_not_specialize=["steps"])
def tiny_kernel(x, y, steps, n, scale, SIZE: tl.constexpr):
    """A kernel with one argument of each kind."""
    at = tl.arange(0, SIZE)
    for _ in range(steps):
        tl.store(x + at, scale, mask=at < n)
    if y is not None:
        tl.store(y + at, scale, mask=at < n)


def run_scans() -> None:
    def draw(*shape: int) -> Tensor:
        return torch.randn(shape)

    for shape, tiles, chunks in (((9000, 40), 2, 36), ((4000, 32), 1, 16), ((100, 2048), 1, 1)):
        assert scan._tiling(*shape, torch.float32)[-2:] == (tiles, chunks)
        a, b = draw(*shape), draw(*shape)
        for _ in range(2):
            scan.scan(a, b, b[0], "diagonal")
    scan.diagonal_adjoint(a, b, None, b, False, True)
    scan.scan(draw(600, 2, 3, 3), draw(600, 2, 3), draw(2, 3), "dense", True, True)
    scan.scan(draw(600, 2, 20, 20), draw(600, 2, 20), draw(2, 20), "dense", True, True)
    scan.scan(draw(600, 2, 2, 2, 5), draw(600, 2, 2, 5), draw(2, 2, 5), "block")


def run_products() -> None:
    """Products in every layout they are launched with: rows or columns of either factor contiguous."""
    grads, x, weights, bias = torch.zeros(4096, 384), torch.zeros(4096, 128), torch.zeros(384, 128), torch.zeros(384)
    for narrower in (0, 16):
        given, by_x = grads[:, : 384 - narrower], weights[: 384 - narrower]
        products.multiply(x, by_x.t(), bias[: len(by_x)])
        products.multiply(given, by_x)
        products.sum_outer(products.Rows(grads), products.Rows(x), 0, 384 - narrower)
    products.Rows(grads).sum()


def run_all_kinds() -> None:
    """Launches that differ in what Triton specializes on, each twice, and launches that differ only in other things."""
    kernel, (x, y) = Compiled(tiny_kernel), torch.zeros(2, 64)
    tensors = [(x, y), (x[1:], y), (x.double(), y), (x, None), (x.view(torch.int32), y.bfloat16())]
    numbers = [(5, 7, 0.5), (5, 1, 0.5), (5, 32, 0.5), (5, 1 << 40, 0.5), (1 << 31, 7, 0.5), (5, 7, 3), (5, 7, True)]
    kinds = [(given, numbers[0], 16) for given in tensors] + [(tensors[0], given, 16) for given in numbers]
    alike = [(tensors[0], (6, 9, 1e-30), 16), (tensors[0], (1, 1 - (1 << 31), -2.0), 16), ((y, x), numbers[0], 16)]
    for _ in range(2):
        for given, sizes, size in (*kinds, (tensors[0], numbers[0], 32), *alike):
            launch(kernel, (3, 1, 1), given, sizes, SIZE=size, num_warps=1)
        launch(kernel, (3, 1, 1), tensors[0], numbers[0], SIZE=16, num_warps=2)


def main() -> None:
    driver.set_active(Absent())
    run_all_kinds()
    for module, names in KERNELS.items():
        for name in names:
            setattr(module, name, Compiled(getattr(module, name)))
    products._can_run, products._processors = lambda x: True, lambda x: 132
    products.LEAST_TERMS = products.LEAST_SUMMED = 0
    products.on_device = lambda index: nullcontext()
    for _ in range(2):
        run_scans()
        run_products()


if __name__ == "__main__":
    main()
