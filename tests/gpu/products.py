"""The large products of layers over all of time, against float64, compared with torch's own in float32."""

from __future__ import annotations

import math
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from tests.gpu.checks import Check, Unfit, as_good_as_torch
from timeloom.kernels.cuda import products as large

SIZES = (
    (1000, 64, 48),
    (16384, 384, 128),
    (16385, 512, 128),
    (8192, 512, 512),
    (8191, 1536, 512),
    (65536, 400, 144),
    (30000, 1008, 336),
    (16384, 768, 250),
    (16384, 4096, 1024),
    (262144, 384, 128),
)
"""Steps, gates and inputs: some too small to pay, some not divided by tiles, some with layouts no kernel reads."""
DATA = ("normal", "one sign", "decaying by 1e6", "decaying by 1e12", "apart by 1e6", "apart by 1e12", "with zeros")
MOST_ON_CPU = 2**28


def products() -> list[Check]:
    found = []
    for size in SIZES:
        for data in (*DATA, "with an inf"):
            named = "T={} gates={} inputs={}".format(*size)
            found.append(Check(f"{named} {data}", partial(_products, size, data)))
    return found


def _drawn(steps: int, gates: int, inputs: int, data: str, device: str) -> dict[str, Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    shapes = {"x": (steps, inputs), "grads": (steps, gates), "weights": (gates, inputs), "bias": (gates,)}
    given = {name: torch.randn(shape, generator=generator, device=device) for name, shape in shapes.items()}
    given["weights"] /= math.sqrt(inputs)
    kind, _, by = data.partition(" by ")
    if by:  # gradients fade backwards in time, or do so while inputs fade forwards
        fading = torch.logspace(-math.log10(float(by)), 0, steps, device=device).unsqueeze(1)
        given["grads"] *= fading
        given["x"] *= fading.flip(0) if kind == "apart" else 1
    if data == "one sign":
        given = {name: value.abs() for name, value in given.items()}
    if data == "with zeros":
        given["grads"][: steps // 2], given["grads"][:, : gates // 2], given["x"][steps // 3 :, ::2] = 0, 0, 0
        given["x"][: steps // 4] = 0
    if data == "with an inf":
        given["grads"][steps // 2, 3], given["x"][steps // 3, 5] = math.inf, -math.inf
    return given


def _products(size: tuple[int, int, int], data: str, device: str) -> str:
    if device == "cpu" and math.prod(size) > MOST_ON_CPU:
        raise Unfit("for a GPU")
    given, launched = _drawn(*size, data, device), set()

    def noted(kernel: Any, *launch: Any, **constants: Any) -> Any:
        launched.add(kernel.fn.__name__)
        return large_launch(kernel, *launch, **constants)

    large_launch = large.launch
    with torch.no_grad(), patch.object(large, "launch", noted):
        own = _by_kernels(**given)
    theirs, truth = _by_torch(**given), _by_torch(**{name: value.double() for name, value in given.items()})
    aligned, fits = size[1] % large.MULTIPLE == size[2] % large.MULTIPLE == 0, large._can_run(given["x"])
    for kernel, least in (("by_split_kernel", large.LEAST_TERMS), ("outer_kernel", large.LEAST_SUMMED)):
        pays = fits and aligned and math.prod(size) >= least
        assert (kernel in launched) is pays, f"{kernel} did{' not' if pays else ''} run"
    for name, true in truth.items():
        finite = true.isfinite()
        assert data == "with an inf" or finite.all()
        assert torch.equal(own[name].isfinite(), finite), f"{name} is not finite elsewhere than in float64"
        of_rows = name in ("u", "d_x")  # else scales are those of many columns
        sizes = torch.where(finite, true, 0).abs()
        sizes = (sizes.amax(1, keepdim=True) if of_rows else sizes.max()).clamp(min=1e-300)
        for side in (own, theirs, truth):
            side[name] = torch.where(finite, side[name].double() / sizes, 0)
    own, theirs = ({name: value.float() for name, value in side.items()} for side in (own, theirs))
    return f"{as_good_as_torch(own, theirs, truth)}; {', '.join(sorted(launched)) or 'torch'}"


def _by_kernels(x: Tensor, grads: Tensor, weights: Tensor, bias: Tensor) -> dict[str, Tensor]:
    found = {"u": large.multiply(x, weights.t(), bias), "d_x": large.multiply(grads, weights)}
    of_grads, of_x, gates = large.Rows(grads), large.Rows(x), len(weights)
    found["d_bias"] = of_grads.sum()
    found["d_weights"] = large.sum_outer(of_grads, of_x, 0, gates)
    found["d_last"] = large.sum_outer(of_grads, of_x, gates // 4 * 3, gates)
    return found


def _by_torch(x: Tensor, grads: Tensor, weights: Tensor, bias: Tensor) -> dict[str, Tensor]:
    d_weights = grads.t() @ x
    found = {"u": torch.addmm(bias, x, weights.t()), "d_x": grads @ weights}
    return found | {"d_bias": grads.sum(0), "d_weights": d_weights, "d_last": d_weights[len(weights) // 4 * 3 :]}
