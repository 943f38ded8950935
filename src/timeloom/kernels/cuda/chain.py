"""Work between two sweeps on an NVIDIA GPU: the certificate from jumps, and corrections by the decay. See chain.cu."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor

from timeloom.kernels import faults
from timeloom.kernels.cuda.programs import ChainArgs, chain_function
from timeloom.kernels.mending import largest_within
from timeloom.kernels.reference import ReferenceSweeper
from timeloom.problem import Recurrence, Segments, cut_evenly

LANES = 32
"""Units of a block that carries errors along the chain."""
CLUSTER = 8
"""Blocks that measure and compare short chains in one launch, on GPUs with clusters."""
MOST_TOGETHER = 2**18
"""Most numbers in all starts of such a chain: more take longer to read for so few blocks than another launch."""


class ChainSweeper(ReferenceSweeper):
    """A sweeper that compares and corrects starts and ends on the device, for states with parts of one width."""

    told_as: str
    """The name of its kernels in messages to users."""

    def __init__(self, problem: Recurrence) -> None:
        super().__init__(problem)
        self._n = problem.cell.parts[0]
        self._initial = problem.initial.contiguous()
        self._device = index_of(problem.initial.device)

    def _whole(self, reverse: bool) -> Segments:
        """Every sequence as one chunk."""
        return cut_evenly(self.problem.steps, self.problem.batch, self.problem.steps, reverse)

    def least_scale(self, share_of_box: float) -> float:
        """The least scale of a jump in the first part of a state."""
        return 0.0

    def certifier(self, share_of_box: float, fading: bool) -> Callable[[Tensor, Tensor], Tensor | float] | None:
        if self.problem.lengths is not None or len(set(self.cell.parts)) > 1:
            return None

        def certify(starts: Tensor, ends: Tensor) -> Tensor | float:
            try:
                return self.certify(starts, ends, share_of_box, fading=fading)
            except faults.KernelFault:
                return math.inf  # nothing is known: the driver measures by itself

        return certify

    def certify(
        self, starts: Tensor, ends: Tensor, share_of_box: float, decay: Tensor | None = None, fading: bool = False
    ) -> Tensor:
        """The largest relative jump between each stretch's end and the next one's start, a number on the device.

        Given `decay`, the largest relative error of a start instead: how far one more correction would move it, the
        sum of the jumps before it as the decay carries them.
        """
        moves = None if decay is None else self.carry(starts, ends, decay, None, None)
        return self.measure(starts, ends, share_of_box, moves, fading)

    def measure(self, starts: Tensor, ends: Tensor, share_of_box: float, moves: Tensor | None, fading: bool) -> Tensor:
        """The largest relative jump, or, given `moves`, the largest relative move of a start."""
        links, parts = len(starts) // self.problem.batch, 1 if fading else len(self.cell.parts)
        walks = links * self.problem.batch * parts
        found = starts.new_empty(2 * walks + 2)
        args = self._chain_args(starts=starts, ends=ends, moves=moves, measured=found)
        args.worst = found[-2:].data_ptr()
        args.fading, args.limit = fading, largest_within(self.limit)
        args.floor[0] = self.least_scale(share_of_box)
        if fading:  # an LSTM's gradient of h is small, mostly rounding, and enters the gates along with that of c
            args.parts, args.n = 1, self.cell.size
        if starts.numel() <= MOST_TOGETHER and has_clusters(self._device):
            self._run_chain("certify", CLUSTER, args)
        else:
            self._run_chain("measure", -(-walks // 8), args)
            self._run_chain("compare", 1, args)
        worst, self.met = found[-2:].unbind()
        return worst

    def correct(self, starts: Tensor, ends: Tensor, decay: Tensor, boxed: bool) -> Tensor:
        """New starts from the jumps between stretches, carried along by the decay; sequences have one length.

        `boxed` clamps the starts to the box of the cell's states.
        """
        corrected = torch.empty_like(starts)
        self.carry(starts, ends, decay, corrected, self._box if boxed else None)
        return corrected

    @cached_property
    def _box(self) -> Tensor | None:
        """The box of the cell's states, found once for all sweeps."""
        return self.cell.bound(self._initial)

    def carry(
        self, starts: Tensor, ends: Tensor, decay: Tensor, corrected: Tensor | None, bound: Tensor | None
    ) -> Tensor:
        """The error of each start, from the jumps before it and the decay."""
        moves = torch.empty_like(starts)
        args = self._chain_args(starts=starts, ends=ends, decay=decay, moves=moves, corrected=corrected, bound=bound)
        self._run_chain("carry", -(-self._initial.numel() // LANES), args)
        return moves

    def _run_chain(self, name: str, blocks: int, args: ChainArgs) -> None:
        with on_device(self._device):
            faults.guarded(self.told_as, lambda: chain_function(self._device, name)(blocks, args))

    def _chain_args(self, **tensors: Tensor | None) -> ChainArgs:
        pointers = {name: tensor.data_ptr() for name, tensor in tensors.items() if tensor is not None}
        starts = tensors["starts"]
        assert starts is not None
        links, parts = len(starts) // self.problem.batch, len(self.cell.parts)
        return ChainArgs(links=links, batch=self.problem.batch, parts=parts, n=self._n, **pointers)


@cache
def has_clusters(device: int) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


def aligned(tensor: Tensor) -> Tensor:
    """The tensor, contiguous and aligned to 16 bytes for the kernels' vector loads."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def index_of(device: torch.device) -> int:
    return device.index or 0  # tensors say which one they are on


def on_device(index: int) -> AbstractContextManager[Any]:
    """Context in which this GPU is the current one; does nothing if it is already."""
    return nullcontext() if torch.cuda.current_device() == index else torch.cuda.device(index)
