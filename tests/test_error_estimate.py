"""What reports say of the error, held against float64: at most 3 times too little, at most 30 times too much."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import zoo

from benchmarks.certificate.audit import audit
from benchmarks.certificate.draw import CORRECTIONS, Case, drawn
from timeloom.solve.probes import first_order_error
from timeloom.solve.residual import error_estimate, rate_of_warmup
from timeloom.solvers import MGRIT, Shooting

pytestmark = pytest.mark.usefixtures("one_thread")


def judge(case: Case) -> None:
    for direction, found in zip(("forward", "backward"), audit(case.problem(), case.solver), strict=True):
        if found.told:
            said = f"{direction}: error {found.error:.1e}, rounding {found.rounding:.0e}; {found.report}; {case}"
            assert not found.too_little, said
            assert not found.too_much, said
        else:
            assert found.report.fell_back


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("seed", range(6))
def test_estimates_of_random_networks(seed: int, correction: str) -> None:
    """`python -m benchmarks.certificate` draws thousands of them."""
    judge(replace(drawn(seed), correction=correction, steps=96))  # type: ignore[arg-type]


@pytest.mark.parametrize("correction", ["none", "diag", "secant", "lowrank"])
@pytest.mark.parametrize("tol", [1e-2, 1e-4, 1e-6])
def test_jumps_add_up_over_a_long_memory_and_the_report_knows(tol: float, correction: str) -> None:
    """Update gates at +6 over short chunks: hundreds of chunks are remembered, so each jump counts in all of them."""
    case = replace(drawn(0), kind="GRU", units=8, steps=600, bias=6.0, scale=1.0, chunk=4, warmup=4, batch=1)
    case = replace(case, tol=tol, correction=correction, dtype=torch.float64)  # type: ignore[arg-type]
    judge(case)
    for found in audit(case.problem(), case.solver):
        if not found.report.fell_back:
            assert found.error <= 30 * tol, "the driver goes on until jumps add up to little"


@pytest.mark.parametrize("seed", [1556, 2676, 3656, 4679, 5234, 6650, 7521, 7668])
def test_what_cannot_be_told_is_run_one_step_after_the_other(seed: int) -> None:
    """Networks that amplify: gradients off by 29 were told to be off by 0.02, errors of 2e-4 to be one of 0.95."""
    judge(drawn(seed))


@pytest.mark.parametrize("seed", [2112, 2912, 4402, 5438, 6102, 8066, 8167, 20125, 21490, 22374])
def test_errors_of_links_that_amplify_are_told_along_themselves(seed: int) -> None:
    """Told by how far the last corrections moved, it was 3 to 17 times too little, and 30 to 180 times too much."""
    judge(drawn(seed))


def test_an_error_to_first_order_is_found_where_few_links_have_jumps() -> None:
    """Of random matrices that amplify and shrink, and a jump at the start alone."""
    torch.manual_seed(0)
    links, size = 12, 5
    matrices = 0.6 * torch.randn(links, 1, size, size, dtype=torch.float64)
    jumps = torch.zeros(links, 1, size, dtype=torch.float64)
    jumps[1] = 1e-6 * torch.randn(1, size, dtype=torch.float64)
    exact = [jumps[0]]
    for link in range(1, links):
        exact.append((matrices[link - 1] @ exact[-1].unsqueeze(-1)).squeeze(-1) + jumps[link])
    truth = float(torch.stack(exact).abs().max())
    found = first_order_error(
        lambda directions: matrices @ directions, jumps, torch.zeros_like(jumps), jumps,
        torch.randn_like(jumps), lambda moves: moves.abs().amax(-1),
    )  # fmt: skip
    assert truth > 3e-6
    assert found == pytest.approx(truth, rel=0.3)


@pytest.mark.parametrize("seed", [33, 115, 153, 175, 191])
def test_cycles_go_on_where_jumps_add_up(seed: int) -> None:
    """Networks of long memory whose jumps met the tolerance while states or gradients were off by ten of it, or whose
    cycles alone told too little.
    """
    case = drawn(seed)
    cycle, relaxation = ("F" if seed // 2 % 2 else "V"), ("FCF" if seed % 2 else "F")
    solver = MGRIT(coarsening=2 + seed % 3, relaxation=relaxation, cycle=cycle, tol=case.tol)  # type: ignore[arg-type]
    for found in audit(case.problem(), solver):
        if found.told:
            assert not found.too_little, str(found.report)
            assert not found.too_much, str(found.report)
            assert found.error <= 10 * case.tol + found.floor, str(found.report)
        else:
            assert found.report.fell_back


def test_outputs_inside_chunks_are_no_further_off() -> None:
    for seed in range(8):
        net = zoo.network("gru", "gate+4", n=6, seed=seed)
        x, initial = zoo.data(net, 200, 2, seed=seed)
        for correction in ("none", "diag", "secant"):
            solver = Shooting(chunk=8, correction=correction, tol=1e-4, max_iters=60)  # type: ignore[arg-type]
            solution = zoo.solve(net, x, initial, solver)
            states = zoo.truth(net, x, initial)[0].detach()
            scale = states.abs().amax(-1).clamp(min=0.1)
            error = float(((solution.outputs.detach() - states).abs().amax(-1) / scale).max())
            assert error <= 3 * solution.report.error_estimate + 1e-13, (seed, correction)


def test_a_series_of_corrections() -> None:
    assert error_estimate([1e-3], 100) == 1e-3, "one alone, and nothing known of others"
    assert error_estimate([1e-2, 1e-3], 100) == pytest.approx(1e-3 / 0.9)
    assert error_estimate([1e-2, 5e-3], 3) == pytest.approx(5e-3 * 1.75), "after so many sweeps all is exact"
    assert error_estimate([1e-3, 1e-3], 50) == pytest.approx(5e-2), "corrections that do not shrink"
    assert error_estimate([1e-3, 1e-2], 50) == pytest.approx(5e-1)
    assert error_estimate([8e-3, 1e-3, 1e-3, 1e-3], 50) == pytest.approx(2e-3), "in the mean they halve"
    assert error_estimate([1e-3, 0.0], 50) == 0
    assert error_estimate([1e-3], 100, rate=0.5) == pytest.approx(2e-3)
    assert math.isinf(error_estimate([1.0, math.inf], 5))


def test_a_warmup_tells_how_fast_a_chunk_forgets() -> None:
    """What shrinks to 1e-4 over 8 steps shrinks to 1e-8 over 16."""
    assert rate_of_warmup(1e-4, warmup=8, chunk=16) == pytest.approx(1e-8)
    assert rate_of_warmup(1e-4, warmup=16, chunk=8) == pytest.approx(1e-2)
    assert rate_of_warmup(3.0, warmup=8, chunk=8) == 1
    assert rate_of_warmup(0.5, warmup=0, chunk=8) == 0


def test_reports_tell_it() -> None:
    net = zoo.network("gru", "gate+4")
    x, initial = zoo.data(net, 64, 2)
    report = zoo.solve(net, x, initial, Shooting(chunk=8, tol=1e-4)).report
    assert f"error about {report.error_estimate:.1e}" in str(report)
    assert zoo.solve(net, x, initial, Shooting(chunk=64)).report.error_estimate == 0, "one chunk is the plain run"
    hard = Shooting(chunk=4, correction="none", warmup=0, max_iters=2)
    assert zoo.solve(net, x, initial, hard).report.error_estimate is None, "run sequentially: not the sweeps' any more"
    left = zoo.solve(net, x, initial, replace(hard, on_divergence="ignore")).report
    assert left.error_estimate is not None
    assert left.error_estimate > left.tolerance
