"""The express lane: whole layers by one call of the C kernels, against torch in float64."""

from __future__ import annotations

import math
import statistics
from typing import Any

import module_zoo as zoo
import pytest
import torch
from test_modules_ragged import InPieces
from torch import Tensor, nn

import timeloom as tl
from timeloom.kernels.cpu import build
from timeloom.kernels.cpu.layer import MOST_UNITS, CPULayer
from timeloom.kernels.cpu.sweeper import CPUSweeper
from timeloom.solve import trunk
from timeloom.solvers import Shooting

pytestmark = [
    pytest.mark.skipif(build.unavailable() is not None, reason=f"no C kernels: {build.unavailable()}"),
    pytest.mark.usefixtures("one_thread"),
]

LAYERS = {"gru": "GRU", "lstm": "LSTM", "rnn-tanh": "RNN", "rnn-relu": "RNN"}
SIZES = [(1, 1), (3, 5), (16, 16), (33, 17), (40, 64), (5, 100)]
"""Inputs and units: below, at and above the kernels' vectors, and odd."""
REGIMES = {"default": (0.0, 1.0), "gate+4": (4.0, 1.0), "gate+6": (6.0, 1.0), "x2": (0.0, 2.0), "x8": (0.0, 8.0)}
each_layer = pytest.mark.parametrize("name", LAYERS)


@pytest.fixture
def no_general_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is not solved on the express lane fails."""

    def refuse(*_: Any) -> None:
        pytest.fail("the general path was taken")

    for where, what in ((trunk, "run"), (trunk, "solve_states"), (trunk.LayerSolve, "_solve_adjoint")):
        monkeypatch.setattr(where, what, refuse)


def layers(
    name: str, inputs: int, units: int, solver: Any, regime: str = "default", seed: int = 3, **options: Any
) -> list[Any]:
    """Timeloom's layer, torch's, and torch's in float64, with the same weights."""
    options |= {"nonlinearity": "relu"} if name == "rnn-relu" else {}
    torch.manual_seed(seed)
    ours = getattr(tl, LAYERS[name])(inputs, units, solver=solver, **options)
    gate, scale = REGIMES[regime]
    with torch.no_grad():
        ours.weight_hh_l0.mul_(scale)
        if ours.bias and name in ("gru", "lstm"):
            ours.bias_hh_l0[units : 2 * units] += gate
    twins = [getattr(nn, LAYERS[name])(inputs, units, **options, dtype=t) for t in (torch.float32, torch.float64)]
    for twin in twins:
        twin.load_state_dict(ours.state_dict())
    return [ours, *twins]


def results(layer: Any, x: Tensor, hx: Any = None) -> dict[str, Any]:
    dtype = next(layer.parameters()).dtype
    cast = None if hx is None else tuple(part.to(dtype) for part in hx) if isinstance(hx, tuple) else hx.to(dtype)
    return zoo.call(layer, x.to(dtype), cast)


@pytest.mark.usefixtures("no_general_path")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
@each_layer
def test_sizes(name: str, size: tuple[int, int], bias: bool) -> None:
    """Ragged chunks, odd batches; a warm-up as long as all that came before makes any network fit at once."""
    ours, single, double = layers(name, *size, Shooting(chunk=20, warmup=67), bias=bias)
    x, hx = torch.randn(67, 3, size[0]), zoo.hidden(ours, dtype=torch.float32)
    zoo.assert_as_good(*(results(layer, x, hx) for layer in (ours, single, double)))
    assert ours.reports[0].iterations == ours.reports[0].backward.iterations == 1
    assert ours.reports[0].chunk == 20


@pytest.mark.usefixtures("no_general_path")
@pytest.mark.parametrize(("steps", "batch", "chunk"), [(1, 1, 1), (1, 4, 9), (2, 1, 1), (50, 1, 7), (50, 40, 13)])
@each_layer
def test_lengths_and_batches(name: str, steps: int, batch: int, chunk: int) -> None:
    ours, single, double = layers(name, 6, 10, Shooting(chunk=chunk, warmup=steps))
    x = torch.randn(steps, batch, 6)
    zoo.assert_as_good(*(results(layer, x) for layer in (ours, single, double)))


CHAOTIC = {("gru", "x8"), ("lstm", "x8")}
"""Rounding alone grows a thousandfold in 120 steps, in every float32 program by its own factor."""


@pytest.mark.parametrize("warmup", [3, 40])
@pytest.mark.parametrize(
    ("name", "regime"), [(name, regime) for name in LAYERS for regime in REGIMES if (name, regime) not in CHAOTIC]
)
def test_regimes(name: str, regime: str, warmup: int) -> None:
    """Whether one sweep is enough or not, the results are the sequential ones."""
    ours, single, double = layers(name, 8, 12, Shooting(chunk=40, warmup=warmup), regime)
    x = torch.randn(400, 2, 8, generator=torch.Generator().manual_seed(5))
    if name == "rnn-relu" and regime in ("x2", "x8"):
        x = 1e-3 * x[:60]  # grows beyond all bounds
    expected = [results(layer, x) for layer in (single, double)]
    for _ in range(3):
        zoo.assert_as_good(results(ours, x), *expected)


@pytest.mark.parametrize("warmup", [3, 40])
@pytest.mark.parametrize(("name", "regime"), sorted(CHAOTIC))
def test_chaotic_networks_are_as_good_as_torchs_on_average(name: str, regime: str, warmup: int) -> None:
    """In one network either may be lucky, so the measure is many: the mean ratio of the worst errors."""
    ratios = []
    for seed in range(24):
        ours, single, double = layers(name, 8, 12, Shooting(chunk=40, warmup=warmup), regime, seed=seed)
        x = torch.randn(120, 2, 8, generator=torch.Generator().manual_seed(seed))
        truth = results(double, x)
        own, theirs = (
            max(zoo.distance(found[key], value) for key, value in truth.items())
            for found in (results(ours, x), results(single, x))
        )
        ratios.append(math.log(own / theirs))
    assert math.exp(statistics.mean(ratios)) < 2, ratios


@each_layer
def test_a_certificate_that_fails_is_heard(name: str) -> None:
    """Short warm-ups leave jumps: the general path corrects them, and is taken at once the next time."""
    ours, single, double = layers(name, 8, 12, Shooting(chunk=8, warmup=1))
    x = torch.randn(100, 2, 8, generator=torch.Generator().manual_seed(5))
    for _ in range(2):
        zoo.assert_as_good(*(results(layer, x) for layer in (ours, single, double)))
        assert ours.reports[0].iterations > 1
        assert ours.reports[0].backward.iterations > 1


@each_layer
def test_what_was_not_certified_is_corrected_and_not_made_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first sweep's starts and ends go to the driver: there is no second warm-up, and few rows are run again."""
    ours, single, double = layers(name, 8, 12, Shooting(chunk=20, warmup=6))
    x = torch.randn(400, 2, 8, generator=torch.Generator().manual_seed(5))
    rows, forward = [], CPUSweeper.forward

    def watched(self: CPUSweeper, segments: Any, *args: Any, **named: Any) -> Any:
        rows.append(len(segments))
        return forward(self, segments, *args, **named)

    monkeypatch.setattr(CPUSweeper, "forward_entering", lambda *_: pytest.fail("the warm-up was run again"))
    monkeypatch.setattr(CPUSweeper, "forward", watched)
    zoo.assert_as_good(*(results(layer, x) for layer in (ours, single, double)))
    report = ours.reports[0]
    assert report.converged
    assert not report.fell_back
    assert report.iterations == len(rows) + 1 > 1, "the first sweep counts, and was none of these"
    assert report.warmup == 6
    assert report.residuals[0] > report.tolerance >= report.residuals[-1]
    assert max(rows) <= 2 * 19, "the first chunks need not be run again"


@pytest.mark.usefixtures("no_general_path")
@pytest.mark.parametrize("name", ["gru", "lstm"])
def test_a_certificate_missed_by_little_takes_a_longer_warmup(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the general path is slow, as on a GPU; and the network is still trusted afterwards."""
    monkeypatch.setattr(CPULayer, "corrects", True)
    ours, single, double = layers(name, 8, 12, Shooting(chunk=30, warmup=24, tol=2e-6))
    x = torch.randn(400, 2, 8, generator=torch.Generator().manual_seed(5))
    zoo.assert_as_good(*(results(layer, x) for layer in (ours, single, double)))
    reports = (ours.reports[0], ours.reports[0].backward)
    assert max(report.warmup for report in reports) == 36
    assert all(report.iterations == 1 and report.converged for report in reports)
    assert all(memory.forward.trusted and memory.backward.trusted for memory in ours.experiences())
    assert sum(memory.forward.misses + memory.backward.misses for memory in ours.experiences()) > 0


@each_layer
def test_gradients_that_are_not_certified_are_solved_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, single, double = layers(name, 8, 12, Shooting(chunk=30, warmup=100))
    honest = CPULayer.backward

    def doubtful(self: CPULayer, *args: Any, **named: Any) -> Any:
        grads, _ = honest(self, *args, **named)
        return tuple(None if grad is None else torch.full_like(grad, torch.nan) for grad in grads), float("nan")

    monkeypatch.setattr(CPULayer, "backward", doubtful)
    x, hx = torch.randn(100, 2, 8), zoo.hidden(ours, batch=2, dtype=torch.float32)
    zoo.assert_as_good(*(results(layer, x, hx) for layer in (ours, single, double)))
    assert ours.reports[0].backward.converged


@pytest.mark.usefixtures("no_general_path")
@pytest.mark.parametrize("loss", ["outputs", "final"])
@each_layer
def test_losses_on_a_part(name: str, loss: str) -> None:
    ours, _, double = layers(name, 4, 6, Shooting(chunk=10, warmup=35))
    x, grads = torch.randn(35, 2, 4), []
    for layer in (ours, double):
        given = x.to(next(layer.parameters()).dtype).requires_grad_()
        output, final = layer(given)
        value = output if loss == "outputs" else zoo.parts_of(final)[-1]
        grads.append(torch.autograd.grad(value.square().sum(), [given, *layer.parameters()]))
    for actual, expected in zip(*grads, strict=True):
        assert zoo.distance(actual, expected) < 2e-6


@pytest.mark.usefixtures("no_general_path")
@each_layer
def test_only_what_asks_for_gradients_gets_them(name: str) -> None:
    ours, _, _ = layers(name, 4, 6, Shooting(chunk=10, warmup=35))
    x = torch.randn(35, 2, 4)
    ours(x)[0].sum().backward()
    whole = ours.weight_ih_l0.grad.clone()
    ours.zero_grad()
    ours.weight_hh_l0.requires_grad_(False)
    ours(x)[0].sum().backward()
    assert x.grad is None
    assert ours.weight_hh_l0.grad is None
    assert torch.equal(ours.weight_ih_l0.grad, whole)
    with torch.no_grad():
        assert not ours(x)[0].requires_grad


@pytest.mark.usefixtures("no_general_path")
def test_the_tape_is_guarded() -> None:
    ours, _, _ = layers("lstm", 4, 6, Shooting(chunk=10, warmup=35))
    x = torch.randn(35, 2, 4, requires_grad=True)
    output, _ = ours(x)
    first = torch.autograd.grad(output.sum(), x, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(output.sum(), x, retain_graph=True)[0], first)
    with torch.no_grad():
        output[3] = 0.0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


@pytest.mark.parametrize("lengths", [None, torch.tensor([35, 20])])
@pytest.mark.parametrize("name", ["gru", "rnn-tanh", "rnn-relu"])
def test_outputs_may_be_written_into(name: str, lengths: Tensor | None) -> None:
    """As torch allows for all but the LSTM."""
    ours, single, _ = layers(name, 4, 6, Shooting(chunk=10, warmup=35))
    x, grads = torch.randn(35, 2, 4), []
    for layer, more in ((ours, {"lengths": lengths}), (single, {})):
        layer.zero_grad()
        output, _ = layer(x, **more)
        output.relu_()
        output.data.mul_(2)
        output[:20].sum().backward()
        grads.append([parameter.grad for parameter in layer.parameters()])
    for actual, expected in zip(*grads, strict=True):
        assert zoo.distance(actual, expected) < 2e-6


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@each_layer
def test_values_that_are_not_finite_spread_as_in_torch(name: str, value: float) -> None:
    ours, single, _ = layers(name, 4, 6, Shooting(chunk=10, warmup=15))
    x = torch.randn(40, 3, 4)
    x[17, 1, 2] = value
    for actual, expected in zip(results(ours, x).items(), results(single, x).items(), strict=True):
        assert torch.equal(actual[1].isnan(), expected[1].isnan()), actual[0]


@pytest.mark.usefixtures("no_general_path")
@pytest.mark.parametrize("name", ["gru", "lstm"])
def test_threads_change_rounding_at_most(name: str) -> None:
    """States do not depend on threads at all; sums over time are the same in every run with as many threads."""
    ours, _, _ = layers(name, 8, 20, Shooting(chunk=16, warmup=300))
    x, seen = torch.randn(300, 5, 8), {}
    for threads in (1, 3, 3, 2, 1):
        torch.set_num_threads(threads)
        found = results(ours, x)
        if threads in seen:
            assert all(torch.equal(found[key], value) for key, value in seen[threads].items())
        seen[threads] = found
    for found in seen.values():
        assert torch.equal(found["output"], seen[1]["output"])
        zoo.assert_same(found, seen[1], 1e-6)


@pytest.mark.usefixtures("no_general_path")
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("share", [0.0, 0.05, 0.5, 1.0])
@pytest.mark.parametrize(("batch", "chunk"), [(1, 20), (1, 70), (3, 20)])
@each_layer
def test_resets(name: str, batch: int, chunk: int, share: float, threads: int) -> None:
    """Marked steps, also in warm-ups and at the ends of chunks, begin at the initial state, whose gradient they get."""
    ours, single, double = layers(name, 5, 17, Shooting(chunk=chunk, warmup=67))
    x, hx = torch.randn(67, batch, 5), zoo.hidden(ours, batch, dtype=torch.float32)
    resets = torch.rand(67, batch) < share
    resets[[20, 39, 66], -1] = share > 0
    torch.set_num_threads(threads)
    found = zoo.call(ours, x, hx, resets=resets)
    torch.set_num_threads(1)
    expected = zoo.call(InPieces(single), x, hx, resets=resets)
    zoo.assert_as_good(found, expected, zoo.call(InPieces(double), x.double(), zoo.as_double(hx), resets=resets))
    assert ours.reports[0].iterations == ours.reports[0].backward.iterations == 1


@each_layer
def test_resets_behind_a_short_warm_up(name: str) -> None:
    """What the first sweep leaves is corrected from where resets let a network begin."""
    ours, single, double = layers(name, 8, 12, Shooting(chunk=8, warmup=1))
    x, resets = torch.randn(100, 2, 8), torch.arange(200).view(100, 2) % 37 == 5
    found, expected = (zoo.call(layer, x, resets=resets) for layer in (ours, InPieces(single)))
    zoo.assert_as_good(found, expected, zoo.call(InPieces(double), x.double(), resets=resets))
    assert ours.reports[0].iterations > 1


def test_what_takes_the_general_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths, projections, other dtypes, wide layers, no warm-up: not for the express lane, and solved too."""
    monkeypatch.setattr(CPULayer, "forward", lambda *_: pytest.fail("the express lane was taken"))
    solver, x = Shooting(chunk=5), torch.randn(12, 2, 3)
    cases: list[tuple[Any, dict[str, Tensor]]] = [
        (tl.GRU(3, 4, solver=solver), {"lengths": torch.tensor([12, 7])}),
        (tl.LSTM(3, 4, proj_size=2, solver=solver), {}),
        (tl.GRU(3, 4, solver=solver, dtype=torch.float64), {}),
        (tl.GRU(3, MOST_UNITS + 1, solver=solver), {}),
        (tl.GRU(3, 4, solver=Shooting(chunk=5, warmup=0)), {}),
    ]
    for layer, more in cases:
        given = x.to(layer.weight_hh_l0.dtype)
        found = layer(given, **more)[0].detach()
        assert zoo.used_sweeps(layer)
        layer.solver = "sequential"
        assert zoo.distance(found, layer(given, **more)[0].detach()) < 1e-5
