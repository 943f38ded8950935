"""The adjoint of a narrow layer by dense transfers.

The adjoint of a chunk is a linear map of gradients. Unit vectors, one for each number of the state, are swept through
all chunks side by side to find its matrix. The chain of these maps gives the gradients at all chunk ends, however long
the memory is; one more sweep gives the rest.
"""

from __future__ import annotations

from functools import cache, partial

import torch
from torch import Tensor

from timeloom.kernels import faults
from timeloom.kernels.cuda.chain import on_device
from timeloom.kernels.cuda.driver import Function
from timeloom.kernels.cuda.nvrtc import compile_source
from timeloom.kernels.cuda.programs import FOLDER, DenseChainArgs, architecture
from timeloom.kernels.cuda.sweeper import CUDASweeper
from timeloom.kernels.reference import AdjointData
from timeloom.problem import cut_evenly

LARGEST = 128
"""Largest state size for which there is a chain kernel."""


def solve(
    sweeper: CUDASweeper, chunk: int, final: Tensor | None, reading: AdjointData, writing: AdjointData
) -> tuple[Tensor, Tensor]:
    """The gradients at the begins of all chunks `(C·B, S)`, last chunk first, and the largest relative error of one.

    The error is that of gradients at chunk ends, a number on the device. `final` `(B, S)`: the loss's gradient with
    respect to the final state, None for zero.
    """
    problem, size = sweeper.problem, sweeper.cell.size
    segments = cut_evenly(problem.steps, problem.batch, chunk, True)
    nothing = problem.initial.new_zeros(len(segments), size)
    offsets, _ = sweeper.adjoint(segments, nothing, reading)
    units = torch.eye(size, dtype=nothing.dtype, device=nothing.device).repeat(len(segments), 1)
    silent = AdjointData(reading.states, None)
    of_each = cut_evenly(problem.steps, problem.batch, chunk, True, copies=size)
    matrices, _ = sweeper.adjoint(of_each, units, silent)
    ends = faults.guarded(sweeper.told_as, partial(chain, matrices, offsets, final, problem.batch))
    begins, _ = sweeper.adjoint(segments, ends, writing)
    jumps = torch.zeros_like(begins)
    jumps[: -problem.batch] = begins[: -problem.batch] - ends[problem.batch :]
    moves = faults.guarded(sweeper.told_as, partial(chain, matrices, jumps, None, problem.batch))
    return begins, sweeper.measure(ends, begins, 0.0, moves, fading=True)


def chain(matrices: Tensor, offsets: Tensor, first: Tensor | None, batch: int) -> Tensor:
    """All v `(C·B, S)` of `v[p+1] = v[p] R[p] + b[p]` from `first`; matrices R `(C·B·S, S)`, offsets b `(C·B, S)`."""
    found, size = torch.empty_like(offsets), offsets.shape[1]
    args = DenseChainArgs(links=len(offsets) // batch, batch=batch)
    args.matrices, args.offsets, args.found = matrices.data_ptr(), offsets.data_ptr(), found.data_ptr()
    if first is not None:
        first = first.contiguous()
        args.first = first.data_ptr()
    index = offsets.device.index or 0
    with on_device(index):
        chain_function(index, size)(batch, args)
    return found


def source(size: int) -> str:
    padded = -(-size // 32) * 32
    return f'#define S {size}\n#define P {padded}\n#include "dense_chain.cu"\n'


@cache
def chain_function(device: int, size: int) -> Function:
    text = (("dense_chain.cu", (FOLDER / "dense_chain.cu").read_text()),)
    code = compile_source(source(size), architecture(device), text)
    return Function(device, code, "dense_chain", 8 * (-(-size // 32) * 32), 0)
