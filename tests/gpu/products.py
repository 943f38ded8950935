"""Products and sums of a layer over all of time, against float64, compared with torch's own in float32."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from tests.gpu.checks import Check, Unfit, as_good_as_torch
from timeloom.kernels import faults
from timeloom.kernels.cuda import products as large
from timeloom.kernels.cuda import weight_sums as sums

SIZES = (
    ("gru", 16384, 32, 32),
    ("gru", 16384, 64, 64),
    ("gru", 16385, 128, 128),
    ("gru", 8191, 512, 512),
    ("gru", 30000, 336, 250),
    ("gru", 262144, 128, 64),
    ("gru", 1000, 33, 1),
    ("lstm", 65536, 100, 36),
    ("lstm", 16384, 1024, 256),
    ("rnn_tanh", 4097, 20, 7),
)
"""Kernel, steps, units and inputs: some not divided by tiles, some with rows that cannot be read in vectors."""
DATA = (
    "normal", "one sign", "decaying by 1e6", "decaying by 1e12", "apart by 1e6", "apart by 1e12", "with zeros", "tiny",
    "denormal",
)  # fmt: skip
GATES = {"gru": 4, "lstm": 4, "rnn_tanh": 1}
"""Gate gradients of a step and unit."""
SMALL = {"tiny": 1e-30, "denormal": 1e-41}
LEAST = {"denormal": 1e-36}
"""Sizes beside which errors count at least: sums of denormal numbers have as few digits as these."""
MOST_ON_CPU = 2**24


def products() -> list[Check]:
    found = []
    for size in SIZES:
        for data in (*DATA, "with an inf"):
            named = "{} T={} n={} inputs={}".format(*size)
            found.append(Check(f"{named} {data}", partial(_products, size, data)))
    return found


def _drawn(kernel: str, steps: int, units: int, inputs: int, data: str, device: str) -> dict[str, Tensor]:
    """Gate gradients, inputs and states of all steps; weights and biases of the inputs."""
    gates = GATES[kernel] * units
    of_inputs = 3 * units if kernel == "gru" else gates
    shapes = {"grads": (steps, gates), "x": (steps, inputs), "before": (steps, units)}
    shapes |= {"weights": (of_inputs, inputs), "bias": (of_inputs,), "more": (2 * units if kernel == "gru" else gates,)}
    generator = torch.Generator(device).manual_seed(0)
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
    if data in SMALL:
        given["grads"] *= SMALL[data]
    if data == "with an inf":
        given["grads"][steps // 2, 3], given["x"][steps // 3, min(5, inputs - 1)] = math.inf, -math.inf
    return given


def _products(size: tuple[str, int, int, int], data: str, device: str) -> str:
    kernel, steps, units, inputs = size
    if device == "cpu" and steps * units * inputs > MOST_ON_CPU:
        raise Unfit("for a GPU")
    given = _drawn(*size, data, device)
    with torch.no_grad():
        own = _by_kernels(kernel, **given)
        again = _by_kernels(kernel, **given)
        theirs = _by_torch(kernel, **given)
        truth = _by_torch(kernel, **{name: value.double() for name, value in given.items()})
    assert not any(map(faults.broken, (large.TOLD_AS, sums.TOLD_AS))), "a kernel did not run"
    for name, true in truth.items():
        finite = true.isfinite()
        assert data == "with an inf" or finite.all()
        assert torch.equal(own[name].isfinite(), finite), f"{name} is not finite elsewhere than in float64"
        assert torch.equal(own[name][finite], again[name][finite]), f"{name} has other bits the second time"
        sizes = torch.where(finite, true, 0).abs().amax(-1, keepdim=True).clamp(min=LEAST.get(data, 1e-300))
        for side in (own, theirs, truth):
            side[name] = torch.where(finite, side[name].double() / sizes, 0)
    own, theirs = ({name: value.float() for name, value in side.items()} for side in (own, theirs))
    return as_good_as_torch(own, theirs, truth)


def _by_kernels(kernel: str, **given: Tensor) -> dict[str, Tensor]:
    grads, x, weights = given["grads"], given["x"], given["weights"]
    found = {"u": large.multiply(x, weights.t(), given["bias"], given["more"])}
    found["d_x"] = large.multiply(sums.input_gates(kernel, grads), weights)
    return found | sums.weight_sums(kernel, grads, x, given["before"], True)._asdict()


def _by_torch(kernel: str, **given: Tensor) -> dict[str, Tensor]:
    grads, x, weights, bias = given["grads"], given["x"], given["weights"], given["bias"].clone()
    bias[: len(given["more"])] += given["more"]
    found = {"u": torch.addmm(bias, x, weights.t()), "d_x": sums.input_gates(kernel, grads) @ weights}
    d_inputs, d_states, total = sums.input_gates(kernel, grads), grads.t() @ given["before"], grads.sum(0)
    found |= {"w_ih": d_inputs.t() @ x, "w_hh": sums.recurrent_gates(kernel, d_states)}
    return found | {"b_ih": d_inputs.sum(0), "b_hh": sums.recurrent_gates(kernel, total)}
