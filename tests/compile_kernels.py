"""Compiles whatever the host code launches for a Hopper GPU, which need not be there: run by test_kernels_compile.py.

Triton's interpreter runs kernels as Python, and takes more than its compiler does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from timeloom.cells import GRUCell, LSTMCell, RNNCell
from timeloom.problem import Recurrence, cut
from timeloom.scan import gpu as scan
from timeloom.scan import gpu_kernels as scan_kernels
from timeloom.scan import gpu_matrix_kernels as matrix_kernels
from timeloom.sweep import AdjointData, gpu_kernels, wide, wide_kernels
from timeloom.sweep.gpu import LARGEST, GPUSweeper
from timeloom.sweep.gpu_layer import GPULayer
from timeloom.sweep.layer import Cutting

KERNELS = {
    gpu_kernels: ("forward_kernel", "slopes_kernel", "adjoint_kernel", "jumps_kernel", "correct_kernel"),
    wide_kernels: ("forward_step", "adjoint_step"),
    scan_kernels: ("diagonal_kernel",),
    matrix_kernels: ("transfers_kernel", "matrix_kernel"),
}


class Absent:
    """A driver for a GPU of compute capability 9.0 that is not there."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


class Compiled:
    """A kernel that is compiled where it would be launched."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self.arg_names = kernel.arg_names

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def compile_(*args: Any, **options: Any) -> Relaunched:
            compiled = self._kernel.warmup(*args, grid=grid, **options)
            assert "ptx" in compiled.asm
            print("compiled", self._kernel.fn.__name__, flush=True)
            return Relaunched()

        return compile_


class Relaunched:
    """A compiled kernel that is launched again, without a look at its arguments."""

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args: None


def run_layer(kernel: str, n: int, sweeps: int, dtype: torch.dtype = torch.float32) -> None:
    kind = {"gru": nn.GRU, "lstm": nn.LSTM}.get(kernel, nn.RNN)
    weights = [weight.detach().to(dtype) for weight in kind(6, n).parameters()]
    cell = GRUCell.of(*weights) if kernel == "gru" else LSTMCell(weights[1]) if kernel == "lstm" else None
    made = RNNCell(weights[1], kernel.removeprefix("rnn_")) if cell is None else cell
    x = torch.randn(40, 2, 6, dtype=dtype)
    layer = GPULayer(made, x, torch.zeros(2, n * (2 if kernel == "lstm" else 1)), *weights)
    cutting = Cutting(8, 0 if sweeps > 1 else 5, sweeps)
    kept, _ = layer.forward(cutting, 0.1, True)
    layer.backward(cutting, kept, (torch.randn(40, 2, n, dtype=dtype), None), True)


def run_sweep_without_tape() -> None:
    problem = Recurrence(GRUCell(torch.randn(60, 20), torch.randn(20)), torch.randn(40, 2, 60), torch.zeros(2, 20))
    segments = cut(problem, 8, backwards=True)
    GPUSweeper(problem).adjoint(segments, torch.zeros(len(segments), 20), AdjointData([torch.randn(41, 2, 20)], None))


def run_scans() -> None:
    def draw(*shape: int) -> Tensor:
        return torch.randn(shape)

    a, b = draw(9000, 40), draw(9000, 40)
    scan.scan(a, b, b[0], "diagonal")
    scan.diagonal_adjoint(a, b, b[0], b, False, True)
    scan.scan(draw(600, 2, 3, 3), draw(600, 2, 3), draw(2, 3), "dense", True, True)
    scan.scan(draw(600, 2, 2, 2, 5), draw(600, 2, 2, 5), draw(2, 2, 5), "block")


def main() -> None:
    driver.set_active(Absent())
    for module, names in KERNELS.items():
        for name in names:
            setattr(module, name, Compiled(getattr(module, name)))
    run_layer("gru", 20, 2)
    run_layer("lstm", 20, 1)
    run_layer("rnn_tanh", 20, 1, torch.bfloat16)
    run_sweep_without_tape()
    LARGEST.update(dict.fromkeys(LARGEST, 0))
    run_layer("lstm", 40, 2)
    wide.BY_LIBRARY = 0
    run_layer("gru", 40, 1)
    run_scans()


if __name__ == "__main__":
    main()
