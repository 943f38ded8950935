"""What is left of the jumps is rounding, or sweeps that contract slowly: the one is accepted, the other goes on."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.fuzz.case import Case
from benchmarks.fuzz.judge import judge
from timeloom.solve.driver import is_rounding, march
from timeloom.solve.plan import Plan

pytestmark = pytest.mark.usefixtures("one_thread")
PLAN = Plan(chunk=1, warmup=0, driver=march, tolerance=2.5e-7, max_iters=40, on_divergence="sequential")


@pytest.mark.parametrize(
    ("residuals", "expected"),
    [
        ([1e-2, 1e-4, 9e-7], False),  # one look at it tells nothing
        ([1e-2, 1e-4, 9e-7, 4e-7], False),
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


def test_no_more_sweeps_are_waited_for_than_there_are() -> None:
    slow = [4e-6, 2.8e-6, 2e-6, 1.4e-6, 9e-7, 7e-7]
    last = Plan(chunk=1, warmup=0, driver=march, tolerance=2.5e-7, max_iters=len(slow), on_divergence="sequential")
    assert is_rounding(slow, last, torch.float32)
    impatient = Plan(
        chunk=1, warmup=0, driver=march, tolerance=2.5e-7, max_iters=40, on_divergence="sequential", patience=1
    )
    assert is_rounding(slow, impatient, torch.float32)


LSTM = {"cell": "LSTM", "x_scale": 0.1}
FINDINGS = {
    "slow sweeps that were taken for rounding": LSTM
    | {"n": 15, "layers": 2, "bidirectional": True, "batch_first": True, "T": 98, "B": 1, "ragged": "lengths"}
    | {"gate_bias": 1.0, "solver": "Shooting", "options": {"chunk": 1, "warmup": 0}, "seed": 293717239},
    "a fallback from states that were as exact as asked for, in a network that amplifies": LSTM
    | {"n": 100, "inputs": 16, "T": 548, "B": 0, "tf32": False, "gate_bias": 4.0, "solver": "QuasiDEER"}
    | {"options": {"tol": 0.001}, "seed": 674952442},
    "jumps of a tolerance that was asked for, that add up": {"n": 32, "inputs": 32, "T": 94, "B": 7, "tf32": False}
    | {"gate_bias": 3.0, "x_scale": 0.1, "solver": "QuasiELK", "options": {"tol": 0.0001}, "seed": 1374895320},
}


@pytest.mark.parametrize("why", FINDINGS)
def test_findings_of_the_fuzzer_stay_mended(why: str) -> None:
    assert judge(Case.of(json.dumps(FINDINGS[why])), "cpu")["findings"] == []
