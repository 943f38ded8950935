"""Random zeros and ones for every unit and step: as many as there are states, so drawing them must be cheap.

On a CPU, torch's generator gives one number, the seed; all others follow from it and from their indices (splitmix64),
in compiled code if that is available. On other devices torch draws all of them.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from timeloom.kernels.cpu import build
from timeloom.torch_state.transforms import transformed

HALF = 1 << 32
"""Number of values of half a 64-bit number; each half decides one draw."""
STRIDE, FIRST, SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
"""Splitmix64's constants, as signed numbers."""


def ones_by_chance(room: Tensor, share: float) -> Tensor:
    """Ones with probability `share`, to within 2⁻³³, and zeros, in the shape of `room`, whose memory may be used.

    Reproducible by torch's seed.
    """
    if room.device.type != "cpu":
        return room.bernoulli_(share)
    seed, below = torch.randint(-(1 << 63), (1 << 63) - 1, ()), round(share * HALF)
    if transformed() or torch.compiler.is_compiling() or build.unavailable() is not None:
        return drawn(seed, below, room.numel()).view(room.shape).to(room.dtype)
    out = room if room.dtype == torch.float32 and room.is_contiguous() else torch.empty(room.shape)
    build.library().timeloom_draw(
        ctypes.c_uint64(int(seed)), ctypes.c_uint64(below), ctypes.c_int64(out.numel()), ctypes.c_void_p(out.data_ptr())
    )
    return out if out is room else room.copy_(out)


def drawn(seed: Tensor | int, below: int, count: int) -> Tensor:
    """The draws of the compiled code, `(count,)`: one where half of a splitmix64 number is less than `below`."""
    z = torch.arange(1, count // 2 + 2) * STRIDE + seed
    z = (z ^ _shifted(z, 30)) * FIRST
    z = (z ^ _shifted(z, 27)) * SECOND
    z = z ^ _shifted(z, 31)
    halves = torch.stack([z & (HALF - 1), _shifted(z, 32)], -1).flatten()
    return (halves[:count] < below).float()


def _shifted(z: Tensor, bits: int) -> Tensor:
    """Logical shift to the right."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
