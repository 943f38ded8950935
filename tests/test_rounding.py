"""What is left of the jumps is rounding, or sweeps that contract slowly: the one is accepted, the other goes on."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import replace

import pytest
import torch
from torch import nn

import timeloom as tl
from benchmarks.fuzz.case import Case
from benchmarks.fuzz.judge import judge
from tests.gpu.checks import Check
from tests.gpu.gates import gates
from timeloom.kernels.cpu import build
from timeloom.solve.driver import is_rounding, march
from timeloom.solve.plan import Plan

pytestmark = pytest.mark.usefixtures("one_thread")
PLAN = Plan(chunk=1, warmup=0, driver=march, tolerance=2.5e-7, max_iters=40, on_divergence="sequential")


@pytest.mark.parametrize(
    ("residuals", "expected"),
    [
        ([1e-2, 1e-4, 9e-7], False),  # one look at it tells nothing
        ([1e-2, 1e-4, 9e-7, 4e-7], False),
        ([1e-2, 1e-4, 9e-7, 6e-7], False),  # they still do, by less
        ([1e-2, 1e-4, 9e-7, 8e-7], True),  # sweeps shrank jumps a hundredfold, and now they do not
        ([4e-6, 2.8e-6, 2e-6, 1.4e-6, 9e-7, 7e-7], False),  # two sweeps halve
        ([4e-6, 2.8e-6, 2e-6, 1.4e-6, 9e-7, 7e-7, 4e-7], False),
        ([4e-6, 2.8e-6, 2e-6, 1.4e-6, 9e-7, 8e-7, 8e-7], True),
        ([8e-7, 7e-7], True),
        ([1e-2, 9e-3, 8e-3, 7e-3], False),  # no rounding is that large
    ],
)
def test_rounding_is_what_as_many_sweeps_as_halved_before_do_not_halve(residuals: list[float], expected: bool) -> None:
    assert is_rounding(residuals, PLAN, torch.float32) == expected


def test_slow_sweeps_are_not_rounding_where_no_more_are_granted() -> None:
    slow = [4e-6, 2.8e-6, 2e-6, 1.4e-6, 9e-7, 7e-7]
    assert not is_rounding(slow, replace(PLAN, max_iters=len(slow)), torch.float32)
    assert is_rounding(slow, replace(PLAN, patience=1), torch.float32), "nobody waits for longer than that"


LSTM = {"cell": "LSTM", "x_scale": 0.1}
FINDINGS = {
    "jumps of single steps that add up, after a first correction": {"n": 2, "inputs": 33, "layers": 2, "T": 55, "B": 16}
    | {"ragged": "lengths", "tf32": False, "gate_bias": 6.0, "scale": 4.0, "x_scale": 0.1, "solver": "QuasiELK"}
    | {"options": {"tol": 0.001}, "grad": False, "seed": 441256821},
    "jumps of one sign in float64, which add up in the gradients of weights": {"cell": "LSTM", "n": 8}
    | {"inputs": 128, "layers": 3, "T": 88, "B": 3, "dtype": "float64", "solver": "Shooting"}
    | {"options": {"chunk": 3, "correction": "auto", "warmup": 5}, "seed": 361537134},
    "slow sweeps that were taken for rounding": LSTM
    | {"n": 15, "layers": 2, "bidirectional": True, "batch_first": True, "T": 98, "B": 1, "ragged": "lengths"}
    | {"gate_bias": 1.0, "solver": "Shooting", "options": {"chunk": 1, "warmup": 0}, "seed": 293717239},
    "slow sweeps at their last one, taken for rounding": {"cell": "LSTM", "n": 8, "inputs": 8, "layers": 2, "proj": 7}
    | {"bidirectional": True, "T": 86, "B": 1, "h0": True, "scale": 4.0, "solver": "Shooting", "seed": 1070367947}
    | {"options": {"chunk": 1, "correction": "diag"}},
    "jumps of the last sweep that add up, while sweeps still helped": {"cell": "LSTM", "n": 65, "inputs": 7}
    | {"layers": 2, "T": 108, "B": 1, "resets": True, "h0": True, "dtype": "float64", "solver": "Shooting"}
    | {"options": {"chunk": 1, "correction": "diag", "warmup": 5}, "seed": 348905224},
    "a fallback from states that were as exact as asked for, in a network that amplifies": LSTM
    | {"n": 100, "inputs": 16, "T": 548, "B": 0, "tf32": False, "gate_bias": 4.0, "solver": "QuasiDEER"}
    | {"options": {"tol": 0.001}, "seed": 674952442},
    "jumps of a tolerance that was asked for, that add up": {"n": 32, "inputs": 32, "T": 94, "B": 7, "tf32": False}
    | {"gate_bias": 3.0, "x_scale": 0.1, "solver": "QuasiELK", "options": {"tol": 0.0001}, "seed": 1374895320},
    "states that use little of their box, jumps beside all of it": {"n": 40, "inputs": 1, "layers": 3, "bias": False}
    | {"T": 18, "B": 1, "x_scale": 0.1, "solver": "Jacobi", "options": {"adjoint": "sequential"}, "seed": 607778512},
    "a last state far below the first ones": {"cell": "ImplicitGRU", "n": 5, "inputs": 1, "layers": 3, "bias": False}
    | {"batch_first": True, "T": 50, "B": 1, "h0": True, "x_scale": 0.1, "solver": "Shooting"}
    | {"options": {"correction": "diag", "warmup": 0}, "seed": 741413349},
    "jumps of quick sweeps that add up": {"n": 17, "inputs": 17, "layers": 2, "bidirectional": True, "T": 150}
    | {"batch_first": True, "dtype": "float64", "gate_bias": 6.0, "x_scale": 0.1, "solver": "QuasiELK", "grad": False}
    | {"seed": 506753675},
    "the same, by sweeps that are not as quick": {"n": 100, "inputs": 16, "bidirectional": True, "T": 300, "B": 1}
    | {"gate_bias": 3.0, "scale": 1.5, "x_scale": 0.1, "solver": "QuasiELK", "options": {"adjoint": "sequential"}}
    | {"grad": False, "seed": 2050689739},
    "a largest jump that is rounding, and others that are not": {"n": 17, "inputs": 1, "layers": 3, "T": 696, "B": 1}
    | {"ragged": "lengths", "gate_bias": 4.0, "solver": "Shooting", "grad": False, "seed": 545309129}
    | {"options": {"chunk": 1, "correction": "auto", "warmup": 0}},
    "a fallback from states with jumps within the tolerance": {"cell": "LSTM", "n": 17, "T": 600, "B": 7, "h0": True}
    | {"gate_bias": 6.0, "x_scale": 4.0, "solver": "QuasiELK", "grad": False, "seed": 1452828022},
    "roundings that a correction carries on, which the network would forget": {"n": 129, "inputs": 16, "layers": 2}
    | {"B": 0, "gate_bias": 3.0, "solver": "Picard", "grad": False, "seed": 2012113532},
    "a gradient that jumps where a unit crosses zero": {"cell": "RNN_RELU", "n": 40, "inputs": 33, "layers": 2, "T": 16}
    | {"B": 33, "h0": True, "dtype": "float64", "solver": "QuasiDEER", "options": {"tol": 0.001}, "seed": 1370749340},
    "norms of an own cell, with gradients added up in half precision": {"cell": "LayerNormGRU", "n": 15, "inputs": 2}
    | {"T": 150, "B": 31, "h0": True, "dtype": "bfloat16", "gate_bias": 2.0, "scale": 2.0, "x_scale": 0.1}
    | {"solver": "Shooting", "options": {"chunk": 50}, "seed": 1335672979},
    "an own cell's narrow weight, with the gradients of all rows added up in one long sum": {"cell": "Relaxing", "n": 1}
    | {"inputs": 1, "T": 150, "B": 33, "h0": True, "gate_bias": 2.0, "seed": 2031908651},
    "a float64 run that torch has not added up any better": {"cell": "RNN", "n": 33, "inputs": 33, "T": 146, "B": 64}
    | {"h0": True, "dtype": "float64", "solver": "Sequential", "seed": 1912380378},
}


@pytest.mark.parametrize("why", FINDINGS)
def test_findings_of_the_fuzzer_stay_mended(why: str) -> None:
    assert judge(Case.of(json.dumps(FINDINGS[why])), "cpu")["findings"] == []


@pytest.mark.skipif(build.unavailable() is not None, reason="torch's own operations run the gates")
def test_gates_near_one_are_as_exact_as_torchs() -> None:
    """Gradients are made of 1 − f. On average over networks: in one of them either may be lucky."""
    ratios, steps, n = [], 500, 3
    for seed in range(12):
        torch.manual_seed(seed)
        theirs = nn.LSTM(3, n)
        with torch.no_grad():
            theirs.bias_ih_l0[n : 2 * n] += 6
        ours = tl.LSTM(3, n, solver=tl.solvers.Shooting(chunk=steps))
        ours.load_state_dict(theirs.state_dict())
        exact = nn.LSTM(3, n, dtype=torch.float64)
        exact.load_state_dict(theirs.state_dict())
        x, c0, weight = 0.1 * torch.randn(steps, 1, 3), torch.randn(1, 1, n), torch.randn(1, 1, n)
        grads = []
        for layer in (exact, ours, theirs):
            dtype = layer.weight_ih_l0.dtype
            given = x.to(dtype).requires_grad_()
            final = layer(given, (torch.zeros(1, 1, n, dtype=dtype), c0.to(dtype)))[1][1]
            grads.append(torch.autograd.grad((final * weight).sum(), given)[0].double())
        ratios.append(math.log((grads[1] - grads[0]).abs().max() / (grads[2] - grads[0]).abs().max()))
    assert math.exp(statistics.mean(ratios)) < 1.4, ratios


def test_cycles_of_float64_gradients_are_polished_once() -> None:
    """Jumps of one sign add up in the gradients of weights, and no smaller tolerance is above rounding."""
    torch.manual_seed(3)
    solver = tl.solvers.MGRIT(coarsening=4, relaxation="F")
    layer = tl.GRU(7, 17, dtype=torch.float64, solver=solver)
    layer(4 * torch.randn(400, 1, 7, dtype=torch.float64))[0].square().mean().backward()
    found = layer.reports[0].backward
    assert found is not None
    assert found.converged
    assert not found.fell_back
    assert 0.25 * found.tolerance < found.residuals[-2] <= found.tolerance, found.residuals
    assert found.residuals[-1] < 0.5 * found.residuals[-2], found.residuals


@pytest.mark.skipif(build.unavailable() is not None, reason="torch's own operations sum the products")
def test_products_with_x_do_not_round_those_with_h() -> None:
    """On average over networks whose states grow, so that the inputs are small beside them."""
    ratios = []
    for seed in range(12):
        torch.manual_seed(seed)
        theirs = nn.RNN(64, 15, nonlinearity="relu")
        with torch.no_grad():
            theirs.weight_hh_l0 *= 3
        ours = tl.RNN(64, 15, nonlinearity="relu", solver=tl.solvers.Shooting(chunk=132))
        ours.load_state_dict(theirs.state_dict())
        exact = nn.RNN(64, 15, nonlinearity="relu", dtype=torch.float64)
        exact.load_state_dict(theirs.state_dict())
        x = 0.1 * torch.randn(132, 17, 64)
        with torch.no_grad():
            y = exact(x.double())[0]
            errors = [(layer(x)[0] - y).abs().max() for layer in (ours, theirs)]
        ratios.append(math.log(errors[0] / errors[1]))
    assert math.exp(statistics.mean(ratios)) < 1.5, ratios


@pytest.mark.parametrize("check", gates(), ids=lambda check: check.name)
def test_gates(check: Check) -> None:
    assert check.run("cpu")
