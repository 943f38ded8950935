"""The C kernels over rows that carry masks: against their readable twin, and whole layers against plain loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_recurrent_dropout import EXACT, LAYERS, gradients, loop
from torch import Tensor

import timeloom as tl
from timeloom.cells import GRUCell, LSTMCell, RNNCell
from timeloom.cells.base import Cell, Masks
from timeloom.cells.masked import MaskedCell
from timeloom.kernels import AdjointData, CPUSweeper, ReferenceSweeper
from timeloom.kernels.cpu import build
from timeloom.nn.draws import HALF, drawn, ones_by_chance
from timeloom.problem import Recurrence, cut, empty_states
from timeloom.solvers import Shooting

pytestmark = pytest.mark.skipif(build.unavailable() is not None, reason="no C compiler")
ALL_MASKS = [Masks(True, False), Masks(False, True), Masks(True, True)]
OPTIONS: dict[str, dict[str, Any]] = {
    "variational": {"recurrent_dropout": 0.4},
    "zoneout": {"zoneout": 0.3},
    "both": {"recurrent_dropout": 0.25, "zoneout": 0.2},
}


def plain_cell(kind: str, n: int, dtype: torch.dtype) -> tuple[Cell, int]:
    """A cell and the width of its projected inputs."""
    gates = {"gru": 3, "lstm": 4}.get(kind, 1)
    w_hh = torch.randn(gates * n, n, dtype=dtype) / n**0.5
    if kind == "gru":
        return GRUCell(w_hh, torch.randn(n, dtype=dtype)), 3 * n
    return (LSTMCell(w_hh) if kind == "lstm" else RNNCell(w_hh, kind)), gates * n


def masked_problem(kind: str, n: int, masks: Masks, dtype: torch.dtype, resets: bool = False) -> Recurrence:
    torch.manual_seed(0)
    steps, batch = 23, 3
    plain, width = plain_cell(kind, n, dtype)
    rows = [torch.randn(steps, batch, width, dtype=dtype)]
    rows += [torch.rand(batch, n, dtype=dtype).expand(steps, batch, n)] if masks.dropped else []
    rows += [torch.rand(steps, batch, plain.size, dtype=dtype)] if masks.zoned else []
    initial = torch.randn(batch, plain.size, dtype=dtype).tanh()
    marks = torch.rand(steps, batch) < 0.1 if resets else None
    return Recurrence(MaskedCell(plain, masks), torch.cat(rows, -1), initial, None, marks)


def single(problem: Recurrence) -> Recurrence:
    """The same problem in float32."""
    weights = tuple(weight.float() for weight in problem.cell.weights)
    return Recurrence(
        problem.cell.with_weights(weights), problem.u.float(), problem.initial.float(), None, problem.resets
    )


@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize("n", [1, 5, 16, 33])
@pytest.mark.parametrize("masks", ALL_MASKS, ids=str)
@pytest.mark.parametrize("kind", ["gru", "lstm", "tanh", "relu"])
def test_sweeps_are_the_readable_twin_s(kind: str, masks: Masks, n: int, resets: bool) -> None:
    """Stretches forward and back, from their own starts and entered early: ends, decay, states, gradients of gates."""
    exact = masked_problem(kind, n, masks, EXACT, resets)
    problem = single(exact)
    assert CPUSweeper.supports(problem)
    found = sweep_all(CPUSweeper(problem), problem)
    expected = sweep_all(ReferenceSweeper(exact), exact)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=3e-5, atol=3e-5)


def sweep_all(sweeper: ReferenceSweeper, problem: Recurrence) -> list[Tensor]:
    segments, like = cut(problem, 7), problem.initial
    states = empty_states(problem.steps, like, problem.cell.parts)
    starts = like[segments.sequence]
    ends, decay = sweeper.forward(segments, starts, states, want_decay=True)
    entered = sweeper.forward_entering(segments, 4, [torch.empty_like(part) for part in states], want_decay=False)
    whole = [torch.empty_like(part) for part in states]  # of one trajectory: an adjoint sweep may read any state of it
    for part, first in zip(whole, like.split(problem.cell.parts, -1), strict=True):
        part[0] = first
    sweeper.forward(cut(problem, problem.steps), like, whole)
    torch.manual_seed(5)
    incoming = torch.randn(problem.steps, problem.batch, problem.cell.parts[0], dtype=EXACT).to(like.dtype)
    given = torch.randn(len(segments), problem.cell.size, dtype=EXACT).to(like.dtype)
    gates = torch.zeros(problem.steps, problem.batch, problem.cell.gate_width, dtype=like.dtype)
    into = torch.zeros(len(segments), problem.cell.size, dtype=like.dtype) if problem.resets is not None else None
    data = AdjointData(whole, incoming, gates, into)
    begins, back_decay = sweeper.adjoint(segments, given, data, want_decay=True)
    assert decay is not None
    assert back_decay is not None
    rest = [part for part in entered if part is not None]
    return [
        ends,
        decay,
        *(part[1:] for part in states),
        *rest,
        begins,
        back_decay,
        gates,
        *([] if into is None else [into]),
    ]


@pytest.mark.parametrize("masks", ALL_MASKS, ids=str)
@pytest.mark.parametrize("kind", ["gru", "lstm", "tanh", "relu"])
def test_the_twin_s_derivatives_are_autograd_s(kind: str, masks: Masks) -> None:
    problem = masked_problem(kind, 5, masks, EXACT)
    cell, state, u = problem.cell, problem.initial, problem.u[3]
    grad = torch.randn_like(state)
    leaf, rows = state.clone().requires_grad_(), u.clone().requires_grad_()
    weights = tuple(weight.clone().requires_grad_() for weight in cell.weights)
    out = cell.with_weights(weights).step(leaf, rows)
    by_state, by_u, *by_weights = torch.autograd.grad(out, (leaf, rows, *weights), grad)
    back, gates = cell.vjp(state, u, grad)
    torch.testing.assert_close(back, by_state)
    torch.testing.assert_close(cell.input_grads(gates)[..., : -cell.behind], by_u[..., : -cell.behind])
    previous = cell.multiplied(state.split(cell.parts, -1), u)
    torch.testing.assert_close(cell.weight_grads(previous, gates), tuple(by_weights))
    jacobian = torch.func.vmap(torch.func.jacrev(lambda s, v: cell.step(s[None], v[None])[0]))(state, u)
    torch.testing.assert_close(cell.jacobian(state, u), jacobian)


@pytest.mark.parametrize("solver", ["auto", Shooting(chunk=40, warmup=30), Shooting(chunk=16, warmup=0)])
@pytest.mark.parametrize(("steps", "batch", "units"), [(1, 3, 5), (300, 1, 17), (260, 4, 33)])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", LAYERS)
def test_layers_in_float32(kind: str, options: str, steps: int, batch: int, units: int, solver: Any) -> None:
    """Outputs, final states and all gradients against a float64 loop with the same masks, within torch's own error."""
    torch.manual_seed(0)
    exact = LAYERS[kind](7, units, dtype=EXACT, **OPTIONS[options])
    layer = LAYERS[kind](7, units, solver=solver, **OPTIONS[options])
    layer.load_state_dict(exact.state_dict())
    x = torch.randn(steps, batch, 7, dtype=EXACT)
    expected = gradients(exact, x, lambda x: loop(exact, x))
    found = gradients(layer, x.float(), layer)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=2e-5 * float(other.abs().max().clamp(min=1)))
    if steps > 1:
        assert "not fused" not in layer.reports[0].reason


@pytest.mark.parametrize("kind", LAYERS)
def test_lengths_resets_and_evaluation_in_float32(kind: str) -> None:
    torch.manual_seed(0)
    exact = LAYERS[kind](3, 6, dtype=EXACT, recurrent_dropout=0.3, zoneout=0.2)
    layer = LAYERS[kind](3, 6, recurrent_dropout=0.3, zoneout=0.2)
    layer.load_state_dict(exact.state_dict())
    x, lengths = torch.randn(90, 3, 3, dtype=EXACT), torch.tensor([90, 41, 0])
    x = torch.where((torch.arange(90)[:, None] < lengths)[..., None], x, 0)
    resets = (torch.rand(90, 3) < 0.1) & (torch.arange(90)[:, None] < lengths)
    for training in (True, False):
        exact.train(training), layer.train(training)
        expected = gradients(exact, x, lambda x: loop(exact, x, None, lengths, resets))
        found = gradients(layer, x.float(), lambda x: layer(x, lengths=lengths, resets=resets))
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)


def test_an_elman_unit_that_mostly_keeps_itself_has_its_gradient_in_evaluation() -> None:
    """Of a mixture, what a unit would have been cannot be read off what it is."""
    torch.manual_seed(0)
    for nonlinearity in ("tanh", "relu"):
        exact = tl.RNN(3, 6, nonlinearity=nonlinearity, dtype=EXACT, zoneout=0.97).eval()
        layer = tl.RNN(3, 6, nonlinearity=nonlinearity, zoneout=0.97).eval()
        layer.load_state_dict(exact.state_dict())
        x = torch.randn(120, 2, 3, dtype=EXACT)
        expected = gradients(exact, x, lambda x, exact=exact: loop(exact, x)) if nonlinearity == "tanh" else None
        expected = expected or gradients(exact, x, exact)
        for one, other in zip(gradients(layer, x.float(), layer), expected, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(1,), (7,), (64, 3, 5), (0,)])
@pytest.mark.parametrize("share", [0.0, 1e-6, 0.1, 0.5, 0.999])
def test_draws_are_the_readable_twin_s(shape: tuple[int, ...], share: float) -> None:
    torch.manual_seed(11)
    found = ones_by_chance(torch.full(shape, torch.nan), share)
    torch.manual_seed(11)
    seed = torch.randint(-(1 << 63), (1 << 63) - 1, ())
    expected = drawn(seed, round(share * HALF), found.numel())
    assert torch.equal(found.flatten(), expected)
    torch.manual_seed(11)
    doubled = ones_by_chance(torch.full(shape, torch.nan, dtype=EXACT), share)
    assert torch.equal(doubled.float(), found)


def test_draws_are_as_likely_as_asked_and_know_nothing_of_each_other() -> None:
    torch.manual_seed(0)
    count, share = 1 << 20, 0.3
    found = ones_by_chance(torch.empty(count), share)
    deviation = (share * (1 - share) / count) ** 0.5
    assert abs(float(found.mean()) - share) < 4 * deviation
    centred = found - share
    for lag in (1, 2, 3, 32, 1024):
        together = float((centred[lag:] * centred[:-lag]).mean())
        assert abs(together) < 4 * share * (1 - share) / count**0.5
    other = ones_by_chance(torch.empty(count), share) - share
    assert abs(float((centred * other).mean())) < 4 * share * (1 - share) / count**0.5


@pytest.mark.parametrize("kind", ["RNN", "LSTM"])
def test_a_graph_of_torch_compile_draws_and_solves_the_same(kind: str) -> None:
    config = pytest.importorskip("torch._dynamo").config
    if not hasattr(config, "allow_rnn"):
        pytest.skip("this torch has no allow_rnn")
    torch.manual_seed(0)
    layer, x = LAYERS[kind](4, 6, recurrent_dropout=0.3, zoneout=0.2), torch.randn(90, 3, 4)
    expected = gradients(layer, x, layer)
    with config.patch(allow_rnn=True):
        found = gradients(layer, x, torch.compile(layer, fullgraph=True, backend="aot_eager"))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
