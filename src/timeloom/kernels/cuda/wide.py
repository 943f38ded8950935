"""Sweeps of wide layers by CUDA kernels: one launch per step for all rows, and a matrix product of torch's in between.

Float32 products run on the tensor cores with nearly float32's accuracy: both factors are split into two fp16 halves,
three products of which are one product of three times the depth (see wide.cuh). The tensor cores truncate as they
accumulate: outputs of an LSTM of 600 units were off by 7e-6 where cuDNN's float32 was off by 5e-7. So users who forbid
cuDNN to round to tf32 (the default allows it) get plain products, as does torch before 2.8, which cannot accumulate
fp16 products in float32. So does a single row, which cuDNN does not round either, and for which reading the weights is
all that counts: four bytes for each in float32, six in halves. Half precision weights are multiplied as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from timeloom.kernels.cuda.programs import AdjointArgs, Wide, WideAdjointArgs, WideForwardArgs, wide_function
from timeloom.kernels.cuda.split import split
from timeloom.torch_state import tf32

SPLIT, PLAIN = 0, 3
MODES = {torch.float32: SPLIT, torch.float16: 1, torch.bfloat16: 2}
OPERANDS = {SPLIT: torch.float16, 1: torch.float16, 2: torch.bfloat16, PLAIN: torch.float32}
SUMS_HALVES = hasattr(torch.ops.aten.mm, "dtype_out")


def mode_of(kernel: str, weights: torch.dtype, rows: int) -> int:
    """The mode of products of these rows with weights of this dtype; see wide.cuh.

    Without gates, the error of a product becomes the error of the state in full: with split halves it was 4e-6, with
    torch's float32 4e-7.
    """
    exact = weights == torch.float32 and (kernel.startswith("rnn") or rows == 1 or not tf32.cudnn_rounds())
    return MODES[weights] if SUMS_HALVES and not exact else PLAIN


class WideWeights:
    """The recurrent weights of a layer `(gates n, n)`, laid out for its forward and backward products."""

    def __init__(self, weights: Tensor, mode: int) -> None:
        self.mode = mode
        self.undo: Tensor | None = None
        """The inverse scale of split weights, a number on the device."""
        self._weights = weights if self.mode != PLAIN else weights.float()
        self._factors: dict[bool, Tensor] = {}

    def factor(self, adjoint: bool) -> Tensor:
        """The right factor of products with an operand: `(depth, width)`."""
        if adjoint not in self._factors:
            pieces = self._split() if self.mode == SPLIT else (self._weights,)
            joined = torch.cat(pieces, 0) if adjoint else torch.cat(pieces, 1).t()
            self._factors[adjoint] = joined
        return self._factors[adjoint]

    def _split(self) -> tuple[Tensor, ...]:
        """The fp16 halves low, high, high, to go with the operand's: large products come last, as sums are truncated
        relative to their own size.
        """
        high, low, self.undo = split(self._weights)
        return low, high, high


def sweep(args: Any, steps: int, variant: Wide, weights: WideWeights, device: torch.device) -> None:
    """Run a sweep as its arguments say; `steps`: those of its longest row."""
    rows, adjoint = args.rows, isinstance(args, AdjointArgs)
    n, gates = variant.units, variant.text.products
    depth, width = (gates * n, n) if adjoint else (n, gates * n)
    copies = 3 if weights.mode == SPLIT else 1
    factor = weights.factor(adjoint)
    operand = torch.empty(rows, copies * depth, dtype=OPERANDS[weights.mode], device=device)
    product = torch.empty(rows, width, dtype=torch.float32, device=device)
    scales, carried = product.new_empty(rows), product.new_empty(rows, variant.text.parts * n)
    function = wide_function(device.index or 0, variant)
    given: Any = (WideAdjointArgs if adjoint else WideForwardArgs)(sweep=args)
    given.product, given.operand = product.data_ptr(), operand.data_ptr()
    given.scales, given.carried = scales.data_ptr(), carried.data_ptr()
    given.of_weights = None if weights.undo is None else weights.undo.data_ptr()
    first = 0 if adjoint else -1
    with tf32.products(False):
        for step in range(first, steps + first + 1):
            given.step = step
            function(rows, given)
            if step < steps + first:
                _multiply(operand, factor, product)


def _multiply(operand: Tensor, factor: Tensor, product: Tensor) -> None:
    if operand.dtype == torch.float32:
        torch.mm(operand, factor, out=product)
    else:
        torch.ops.aten.mm.dtype_out(operand, factor, torch.float32, out=product)
