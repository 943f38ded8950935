"""Gradients of weights and biases, sums over all of time, against float64, compared with torch's own in float32."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from tests.gpu.checks import Check, as_good_as_torch
from timeloom.kernels import faults
from timeloom.kernels.cuda import weight_sums
from timeloom.kernels.cuda.weight_sums import WeightSums

SIZES = (
    ("gru", 16384, 32, 32),
    ("gru", 16384, 64, 64),
    ("gru", 16385, 128, 128),
    ("gru", 262144, 64, 64),
    ("gru", 3000, 33, 1),
    ("lstm", 65536, 100, 36),
    ("lstm", 16384, 512, 256),
    ("rnn_tanh", 4097, 20, 7),
    ("rnn_tanh", 100, 9, 9),
)
"""Kernel, steps, units and inputs: some not divided by tiles, some with rows that cannot be read in vectors."""
DATA = ("normal", "one sign", "fading by 1e6", "fading by 1e12", "apart by 1e6", "with zeros", "tiny", "with an inf")
GATES = {"gru": 4, "lstm": 4, "rnn_tanh": 1}
"""Gate gradients of a step and unit."""


def sums() -> list[Check]:
    named = [("{} T={} n={} inputs={}".format(*size), size, data) for size in SIZES for data in DATA]
    return [Check(f"{name} {data}", partial(_sums, size, data)) for name, size, data in named]


def _drawn(kernel: str, steps: int, units: int, inputs: int, data: str, device: str) -> list[Tensor]:
    """Gate gradients, inputs and states of all steps."""
    generator = torch.Generator(device).manual_seed(0)
    widths = GATES[kernel] * units, inputs, units
    grads, x, before = (torch.randn(steps, width, generator=generator, device=device) for width in widths)
    kind, _, by = data.partition(" by ")
    if by:  # gradients fade backwards in time, or do so while inputs fade forwards
        fading = torch.logspace(-math.log10(float(by)), 0, steps, device=device).unsqueeze(1)
        grads *= fading
        x *= fading.flip(0) if kind == "apart" else 1
    if data == "one sign":
        grads, x, before = grads.abs(), x.abs(), before.abs()
    if data == "with zeros":
        grads[: steps // 2], grads[:, : units // 2], x[steps // 3 :, 1::2] = 0, 0, 0
    if data == "tiny":
        grads *= 1e-30
    if data == "with an inf":
        grads[steps // 2, 3], x[steps // 3, min(5, inputs - 1)] = math.inf, -math.inf
    return [grads, x, before]


def _sums(size: tuple[str, int, int, int], data: str, device: str) -> str:
    given = _drawn(*size, data, device)
    own, again = (weight_sums.weight_sums(size[0], *given, True) for _ in range(2))
    if device == "cuda" and faults.broken(weight_sums.TOLD_AS) is not None:
        raise AssertionError("the kernel did not run")
    theirs = by_torch(size[0], *given)
    truth = by_torch(size[0], *(one.double() for one in given))
    sides = [dict[str, Tensor]() for _ in range(3)]
    for name, mine, other, plain, true in zip(WeightSums._fields, own, again, theirs, truth, strict=True):
        if mine is None or other is None or plain is None or true is None:
            raise AssertionError(f"{name} is missing")
        finite = true.isfinite()
        if not torch.equal(mine.isfinite(), finite) or not torch.equal(mine[finite], other[finite]):
            raise AssertionError(f"{name} is not finite elsewhere than in float64, or has other bits the second time")
        most = torch.where(finite, true, 0).abs().max().clamp(min=1e-300)
        for side, values in zip(sides, (mine, plain, true), strict=True):
            side[name] = torch.where(finite, values.double() / most, 0)
    return as_good_as_torch(*({name: value.float() for name, value in side.items()} for side in sides[:2]), sides[2])


def by_torch(kernel: str, grads: Tensor, x: Tensor, before: Tensor) -> WeightSums:
    """The same by one product for each, and a sum."""
    n, w, total = before.shape[1], grads.t() @ before, grads.sum(0)
    if kernel != "gru":
        return WeightSums(grads.t() @ x, w, total, total)
    w_hh, b_hh = (torch.cat([one[: 2 * n], one[3 * n :]]) for one in (w, total))
    return WeightSums(grads[:, : 3 * n].t() @ x, w_hh, total[: 3 * n], b_hh)
