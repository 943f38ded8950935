"""Gradients of inputs and weights that sweeps of compiled steps sum on their way, beside those from gate gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from random_cells import RandomCell
from test_compile_step import at_once, draw, problem_of  # noqa: F401
from torch import Tensor

import timeloom as tl
from timeloom.auto.experience import Experience
from timeloom.cells.fused import FusedCell
from timeloom.compile.fuse import compile_step
from timeloom.kernels import sweeper
from timeloom.kernels.cpu import build
from timeloom.kernels.cpu.fused import FusedSweeper
from timeloom.kernels.reference import AdjointData
from timeloom.problem import Recurrence, cut, empty_states
from timeloom.solve.adjoint_sweeps import Summed
from timeloom.solve.backward import solve_adjoint, solve_summed, weight_grads_of
from timeloom.solve.forward import solve_states
from timeloom.solve.plan import Plan
from timeloom.solvers import Shooting

pytestmark = [
    pytest.mark.usefixtures("at_once"),
    pytest.mark.skipif(build.unavailable() is not None, reason=f"no C kernels: {build.unavailable()}"),
]
STEPS, BATCH = 90, 3


def problem(name: str, units: int, ragged: bool = False, **options: int) -> Recurrence:
    """A cell of ours over x, in its normal form."""
    torch.manual_seed(0)
    cell = getattr(tl.cells, name)(5, units, **options).double()
    state, x = tuple(0.5 * draw(BATCH, units) for _ in range(cell.parts)), draw(STEPS, BATCH, 5)
    compiled = compile_step(cell, state, cell.parts > 1, x.flatten(0, 1), folds=True)
    with torch.no_grad():
        weights, u = compiled.prepare(cell, x.flatten(0, 1), x)
    lengths = torch.tensor([STEPS, 41, 0]) if ragged else None
    resets = torch.rand(STEPS, BATCH, generator=torch.Generator().manual_seed(1)) < 0.05 if ragged else None
    fused = FusedCell(compiled.fused, weights)
    return Recurrence(fused, u.view(STEPS, BATCH, -1), torch.cat(state, -1), lengths, resets)


def plan(given: Recurrence, **options: object) -> Plan:
    return Shooting(**options).plan(given, Experience(), "backward")  # type: ignore[arg-type]


def same(given: Tensor, expected: Tensor) -> bool:
    return bool((given - expected).abs().max() <= 1e-10 * (1 + expected.abs().max())) if expected.numel() else True


def assert_summed(given: Recurrence, how: Plan) -> None:
    """The sums of a solve are those of the gate gradients that it would have written."""
    serial = plan(given, chunk=STEPS)
    states, _ = solve_states(given, serial, sweeper(given))
    incoming, final = draw(STEPS, BATCH, given.cell.parts[0]), draw(BATCH, given.cell.size)
    summed, initial, report = solve_summed(given, states, incoming, final, how)
    gates, truth, same_report = solve_adjoint(given, states, incoming, final, how)
    assert isinstance(summed, Summed)
    assert report.iterations == same_report.iterations
    assert report.fell_back == same_report.fell_back
    inputs = given.cell.input_grads(gates)
    if given.lengths is not None:
        inputs = inputs * (torch.arange(STEPS)[:, None] < given.lengths).unsqueeze(-1)
    assert same(initial, truth)
    assert same(summed.inputs, inputs)
    for found, expected in zip(summed.weights, weight_grads_of(given, states, gates), strict=True):
        assert found.shape == expected.shape
        assert same(found, expected)


CASES = [("LayerNormGRU", 17, {}), ("SLSTM", 18, {"heads": 3}), ("CfC", 33, {}), ("BlockGRU", 24, {"blocks": 4}),
         ("LayerNormLSTM", 16, {}), ("PeepholeLSTM", 7, {})]  # fmt: skip


@pytest.mark.parametrize("ragged", [False, True], ids=["even", "ragged"])
@pytest.mark.parametrize(("name", "units", "options"), CASES, ids=[case[0] for case in CASES])
def test_sums_are_those_of_gate_gradients(name: str, units: int, options: dict[str, int], ragged: bool) -> None:
    given = problem(name, units, ragged, **options)
    assert_summed(given, plan(given, chunk=STEPS))
    assert_summed(given, plan(given, chunk=20, warmup=10))


@pytest.mark.parametrize("ragged", [False, True], ids=["even", "ragged"])
@pytest.mark.parametrize("iters", [1, 2, 3, 40])
def test_sums_are_of_the_sweeps_that_hold(iters: int, ragged: bool) -> None:
    """Where some chunks are swept again, or the rest of a sequence is finished as one."""
    given = problem("SLSTM", 9, ragged)
    assert_summed(given, plan(given, chunk=9, max_iters=iters))
    assert_summed(given, plan(given, chunk=30, warmup=3, max_iters=iters))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("seed", [1, 5, 11, 23, 42, 77])
def test_sums_of_random_cells(seed: int, threads: int) -> None:
    assert_sums_of_a_sweep(problem_of(RandomCell(seed).double(), 13, 3, folds=True), threads)


A, B = torch.randn(2, 5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64).mul_(0.5)
AS_WIDE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "both multiplied": lambda h, x: torch.tanh(h @ A + x @ B),
    "one product of both": lambda h, x: torch.tanh((h + x) @ A),
    "the same in two stages": lambda h, x: torch.tanh((h @ B + x) @ A),
    "taken apart": lambda h, x: torch.tanh((x - h) @ A) * torch.sigmoid(h @ B),
    "in a later stage": lambda h, x: torch.tanh(torch.tanh(h @ A + x @ B) @ B + x @ A),
}
"""Steps whose x is as wide as their state, 5 units."""


@pytest.mark.parametrize("name", AS_WIDE)
def test_sums_where_x_is_as_wide_as_the_state(name: str) -> None:
    state, x = draw(3, 5), draw(13, 3, 5)
    compiled = compile_step(AS_WIDE[name], (state,), False, x.flatten(0, 1), folds=True)
    weights, u = compiled.prepare(AS_WIDE[name], x.flatten(0, 1), x)
    assert_sums_of_a_sweep(Recurrence(FusedCell(compiled.fused, weights), u.view(13, 3, -1), state), 1)


def test_sums_of_two_inputs_with_one_gradient() -> None:
    def step(h: Tensor, x: Tensor) -> Tensor:
        return torch.tanh((h + x[:, 0] + x[:, 1]) @ A)

    state, x = draw(3, 5), draw(13, 3, 2, 5)
    compiled = compile_step(step, (state,), False, x.flatten(0, 1), folds=True)
    weights, u = compiled.prepare(step, x.flatten(0, 1), x)
    assert_sums_of_a_sweep(Recurrence(FusedCell(compiled.fused, weights), u.view(13, 3, -1), state), 1)


def assert_sums_of_a_sweep(given: Recurrence, threads: int) -> None:
    """One adjoint sweep's sums are those of the gate gradients that it writes where it is asked for them."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        made = FusedSweeper(given)
        states = empty_states(13, given.initial, given.cell.parts, zeroed=True)
        made.forward(cut(given, 13), given.initial, states)
        rows, sums = cut(given, 4, backwards=True), made.new_sums()
        assert sums is not None
        sums.inputs.fill_(torch.nan)  # what is not written is seen
        gates = torch.zeros(13, 3, given.cell.gate_width, dtype=torch.float64)
        data = AdjointData(states, draw(13, 3, given.cell.size), gates)
        sweep = partial(made.adjoint_entering, rows, 2, draw(3, given.cell.size), want_decay=False)
        begins = sweep(data)[1]
        assert torch.equal(begins, sweep(replace(data, gate_grads=None, sums=sums))[1])
    finally:
        torch.set_num_threads(before)
    assert same(sums.inputs, given.cell.input_grads(gates))
    for found, expected in zip(sums.weights(), weight_grads_of(given, states, gates), strict=True):
        assert same(found, expected)


@pytest.mark.parametrize("name", ["LayerNormGRU", "SLSTM", "LiGRU"])
def test_long_sums_lose_no_more_than_torchs(name: str) -> None:
    """Of float32 over many steps, beside the same gate gradients summed by torch."""
    torch.manual_seed(0)
    cell = getattr(tl.cells, name)(5, 24)
    layer, exact = tl.Layer(cell), tl.Layer(cell.again(5).double())
    exact.load_state_dict(layer.state_dict())
    x = torch.randn(6000, 2, 5)
    for one, given in ((layer, x), (exact, x.double())):
        one(given)[0].cumsum(0).square().mean().sqrt().backward()
    for (which, found), truth in zip(layer.named_parameters(), exact.parameters(), strict=True):
        error = (found.grad.double() - truth.grad).abs().max() / truth.grad.abs().max()
        assert float(error) < 2e-5, which
