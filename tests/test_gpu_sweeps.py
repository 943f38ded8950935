"""The Triton kernels against the reference in float64, through Triton's interpreter: no GPU is needed."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # read when the kernels are first imported

import pytest
import torch
from torch import Tensor, nn

from timeloom.cells import Cell, GRUCell, LSTMCell, RNNCell
from timeloom.problem import Recurrence, Segments, cut
from timeloom.sweep import ReferenceSweeper
from timeloom.sweep.gpu import GPUSweeper
from timeloom.sweep.gpu_layer import GPULayer

pytest.importorskip("triton")

CELLS = ("gru", "lstm", "rnn_tanh", "rnn_relu")
SIZES = [  # steps, batch, hidden, chunk, resets, lengths
    (17, 3, 5, 7, False, False),
    (24, 2, 16, 8, True, False),
    (25, 5, 33, 9, True, True),
]
CLOSE = {"rtol": 0.0, "atol": 2e-6}


@pytest.fixture(autouse=True)
def exact_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def draw(kernel: str, size: tuple[int, int, int, int, bool, bool]) -> Recurrence:
    steps, batch, n, _, resets, lengths = size
    torch.manual_seed(n)
    gates = {"gru": 3, "lstm": 4}.get(kernel, 1)
    w_hh = torch.randn(gates * n, n) / n**0.5 * 0.6
    cell: Cell
    if kernel == "gru":
        cell = GRUCell(w_hh, 0.1 * torch.randn(n))
    elif kernel == "lstm":
        cell = LSTMCell(w_hh)
    else:
        cell = RNNCell(w_hh, kernel.removeprefix("rnn_"))
    return Recurrence(
        cell,
        torch.randn(steps, batch, gates * n),
        0.3 * torch.randn(batch, cell.size),
        torch.randint(1, steps + 1, (batch,)) if lengths else None,
        torch.rand(steps, batch) < 0.1 if resets else None,
    )


def double(problem: Recurrence) -> Recurrence:
    cell = problem.cell.with_weights(tuple(weight.double() for weight in problem.cell.weights))
    return Recurrence(cell, problem.u.double(), problem.initial.double(), problem.lengths, problem.resets)


def solved(problem: Recurrence) -> list[Tensor]:
    """All states, by a sequential run."""
    states = [problem.u.new_zeros(problem.steps + 1, problem.batch, width) for width in problem.cell.parts]
    for part, initial in zip(states, problem.initial.split(problem.cell.parts, -1), strict=True):
        part[0] = initial
    ReferenceSweeper(problem).forward(cut(problem, problem.steps), problem.initial, states)
    return states


def poisoned(problem: Recurrence, *shape: int) -> Tensor:
    return torch.full(shape, torch.nan, dtype=problem.u.dtype)


def single(values: list[Tensor]) -> list[Tensor]:
    return [value.float() for value in values]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kernel", CELLS)
def test_forward_and_leak(kernel: str, size: tuple[int, int, int, int, bool, bool]) -> None:
    problem = draw(kernel, size)
    segments = cut(problem, size[3])
    alive = segments.end > segments.begin
    starts = 0.3 * torch.randn(len(segments), problem.cell.size)
    results = []
    for sweeper in (GPUSweeper(problem), ReferenceSweeper(double(problem))):
        shape = (problem.steps + 1, problem.batch)
        states = [poisoned(sweeper.problem, *shape, width) for width in problem.cell.parts]
        ends, leak = sweeper.forward(segments, starts.to(sweeper.problem.u.dtype), states, want_leak=True)
        assert leak is not None
        results.append([ends[alive].double(), leak[alive].double(), *(part.double() for part in states)])
    for ours, truth in zip(*results, strict=True):
        torch.testing.assert_close(ours, truth, equal_nan=True, **CLOSE)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kernel", CELLS)
def test_adjoint(kernel: str, size: tuple[int, int, int, int, bool, bool]) -> None:
    problem, exact = draw(kernel, size), double(draw(kernel, size))
    segments, states = cut(problem, size[3]), solved(exact)
    alive = segments.end > segments.begin
    ends = torch.randn(len(segments), problem.cell.size, dtype=torch.float64)
    incoming = torch.randn(problem.steps, problem.batch, problem.cell.parts[0], dtype=torch.float64)
    results = []
    for sweeper, cast in ((GPUSweeper(problem), torch.float32), (ReferenceSweeper(exact), torch.float64)):
        gates = poisoned(sweeper.problem, problem.steps, problem.batch, problem.cell.gate_width)
        into_resets = torch.zeros(ends.shape, dtype=cast)
        given = [part.to(cast) for part in states]
        begins, leak = sweeper.adjoint(segments, ends.to(cast), given, incoming.to(cast), gates, into_resets, True)
        assert leak is not None
        results.append([value.double() for value in (begins[alive], leak[alive], gates, into_resets)])
    for ours, truth in zip(*results, strict=True):
        torch.testing.assert_close(ours, truth, equal_nan=True, **CLOSE)


@pytest.mark.parametrize("lead", [1, 4, 30])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kernel", CELLS)
def test_lead_in(kernel: str, size: tuple[int, int, int, int, bool, bool], lead: int) -> None:
    """Entering a stretch early is the warm-up and the sweep that the reference makes in two passes."""
    problem, exact = draw(kernel, size), double(draw(kernel, size))
    segments, states = cut(problem, size[3]), solved(exact)
    alive = segments.end > segments.begin
    blank = single(solved(exact))
    ours = GPUSweeper(problem).forward_entering(segments, lead, blank, False)
    truth = ReferenceSweeper(exact).forward_entering(segments, lead, solved(exact), False)
    for a, b in zip(ours[:2], truth[:2], strict=True):
        torch.testing.assert_close(a[alive].double(), b[alive], **CLOSE)

    final = torch.randn(problem.batch, problem.cell.size, dtype=torch.float64)
    incoming = torch.randn(problem.steps, problem.batch, problem.cell.parts[0], dtype=torch.float64)
    shape = (problem.steps, problem.batch, problem.cell.gate_width)
    gates, exact_gates = poisoned(problem, *shape), poisoned(exact, *shape)
    resets = torch.zeros(len(segments), problem.cell.size)
    ours = GPUSweeper(problem).adjoint_entering(
        segments, lead, final.float(), single(states), incoming.float(), gates, resets, False
    )
    truth = ReferenceSweeper(exact).adjoint_entering(
        segments, lead, final, states, incoming, exact_gates, resets.double(), False
    )
    for a, b in zip((*ours[:2], gates), (*truth[:2], exact_gates), strict=True):
        rows = alive if len(a) == len(alive) else slice(None)
        torch.testing.assert_close(a[rows].double(), b[rows], equal_nan=True, **CLOSE)


@pytest.mark.parametrize("kernel", ["gru", "lstm"])
def test_certificate_is_the_largest_relative_jump(kernel: str) -> None:
    problem = draw(kernel, SIZES[0])
    links, batch, size = 3, problem.batch, problem.cell.size
    starts = torch.randn(links * batch, size)
    ends = torch.cat([starts[batch:], torch.randn(batch, size)])  # every end is the next start
    certify = GPUSweeper(problem).certifier(0.1, fading=False)
    assert certify is not None
    assert float(certify(starts, ends)) == 0.0
    ends[1, 2] += 0.25
    scale = torch.maximum(starts[batch + 1, :5].abs(), ends[1, :5].abs()).max()
    assert float(certify(starts, ends)) == pytest.approx(float(0.25 / scale), rel=1e-5)
    ends[0, 0] = torch.nan
    assert float(certify(starts, ends)) == torch.inf
    assert GPUSweeper(draw(kernel, SIZES[2])).certifier(0.1, fading=False) is None


def test_only_what_fits_the_kernels_is_theirs() -> None:
    problem = draw("gru", SIZES[0])
    assert not GPUSweeper.supports(problem)  # on a CPU
    rows = Segments(*(torch.zeros(0, dtype=torch.int64) for _ in "sbe"))
    ends, _ = GPUSweeper(problem).forward(rows, torch.zeros(0, 5))
    assert ends.shape == (0, 5)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("warmup", [0, 25])
@pytest.mark.parametrize("kernel", CELLS)
def test_whole_layers(kernel: str, warmup: int, bias: bool) -> None:
    """States and the gradients of everything, against torch in float64."""
    torch.manual_seed(7)
    kind = {"gru": nn.GRU, "lstm": nn.LSTM}.get(kernel, nn.RNN)
    options = {"nonlinearity": kernel.removeprefix("rnn_")} if kind is nn.RNN else {}
    exact = kind(6, 11, bias=bias, **options).float().double()
    x = torch.randn(25, 3, 6, dtype=torch.float64, requires_grad=True)
    parts = [torch.zeros(1, 3, 11, dtype=torch.float64, requires_grad=True) for _ in range(1 + (kind is nn.LSTM))]
    output, final = exact(x, tuple(parts) if len(parts) == 2 else parts[0])
    finals = torch.cat(final if isinstance(final, tuple) else [final], -1)
    incoming, at_end = torch.randn_like(output), torch.randn_like(finals[0])
    loss = (output * incoming).sum() + (finals[0] * at_end).sum()
    truth = torch.autograd.grad(loss, [x, *parts, *exact.parameters()])

    weights = [weight.detach().float() for weight in exact.parameters()] + [None] * (0 if bias else 2)
    cell = {"gru": GRUCell.of, "lstm": lambda *given: LSTMCell(given[1])}.get(kernel)
    made = RNNCell(weights[1], kernel.removeprefix("rnn_")) if cell is None else cell(*weights)
    layer = GPULayer(made, x.detach().float(), torch.zeros(3, finals.shape[-1]), *weights)
    chunk = 8 if warmup else 25
    kept, jump = layer.forward(chunk, warmup, 0.1, True)
    assert float(jump) < 1e-6
    torch.testing.assert_close(kept[0][1:].double(), output.detach(), **CLOSE)
    grads, jump = layer.backward(chunk, warmup, kept, incoming.float(), at_end.float(), True)
    assert float(jump) < 1e-6
    initial = torch.cat([part[0] for part in truth[1 : 1 + len(parts)]], -1)
    for ours, expected in zip(grads, [truth[0], initial, *truth[1 + len(parts) :]], strict=False):
        assert ours is not None
        torch.testing.assert_close(ours.double(), expected, rtol=0.0, atol=2e-6 * float(expected.abs().max()))
