"""The Triton kernels against the reference in float64, through Triton's interpreter: no GPU is needed."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")  # read when the kernels are first imported

import pytest
import torch
from torch import Tensor, nn

import timeloom as tl
from timeloom.auto.experience import LayerExperience
from timeloom.cells import Cell, GRUCell, LSTMCell, RNNCell
from timeloom.kernels import AdjointData, CPUSweeper, ReferenceSweeper
from timeloom.kernels.cpu.layer import CPULayer
from timeloom.kernels.gpu import sweeper as gpu
from timeloom.kernels.gpu import wide
from timeloom.kernels.gpu.layer import GPULayer
from timeloom.kernels.gpu.sweeper import GPUSweeper
from timeloom.kernels.gpu.wide import WideSweeper
from timeloom.kernels.layer import Cutting
from timeloom.problem import Recurrence, Segments, cut, cut_evenly
from timeloom.solve.trunk import Inputs, LayerSolve
from timeloom.solvers import Shooting

pytest.importorskip("triton")

from timeloom.kernels.gpu import sweep_kernels, wide_kernels

CELLS = ("gru", "lstm", "rnn_tanh", "rnn_relu")
SIZES = [  # steps, batch, hidden, chunk, resets, lengths
    (17, 3, 5, 7, False, False),
    (24, 2, 16, 8, True, False),
    (25, 5, 33, 9, True, True),
]
KINDS = [(size, GPUSweeper) for size in SIZES] + [(SIZES[2], WideSweeper)]
LEADS = [(size, GPUSweeper, lead) for size in SIZES for lead in (1, 4, 30)] + [(SIZES[2], WideSweeper, 4)]
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


@pytest.mark.parametrize(("size", "kind"), KINDS)
@pytest.mark.parametrize("kernel", CELLS)
def test_forward_and_decay(kernel: str, size: tuple[int, int, int, int, bool, bool], kind: type[GPUSweeper]) -> None:
    problem = draw(kernel, size)
    segments = cut(problem, size[3])
    alive = segments.end > segments.begin
    starts = 0.3 * torch.randn(len(segments), problem.cell.size)
    results = []
    for sweeper in (kind(problem), ReferenceSweeper(double(problem))):
        shape = (problem.steps + 1, problem.batch)
        states = [poisoned(sweeper.problem, *shape, width) for width in problem.cell.parts]
        ends, decay = sweeper.forward(segments, starts.to(sweeper.problem.u.dtype), states, want_decay=True)
        assert decay is not None
        results.append([ends[alive].double(), decay[alive].double(), *(part.double() for part in states)])
    for ours, truth in zip(*results, strict=True):
        torch.testing.assert_close(ours, truth, equal_nan=True, **CLOSE)


class Watched:
    """A kernel that runs only while a device is chosen."""

    def __init__(self, kernel: Any, chosen: list[Tensor]) -> None:
        self.kernel, self.chosen = kernel, chosen

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernel, name)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        assert self.chosen
        return self.kernel[grid]


@pytest.mark.parametrize("kind", [GPUSweeper, WideSweeper])
def test_kernels_run_on_the_device_of_the_problem(kind: type[GPUSweeper], monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[Tensor] = []

    @contextmanager
    def device_of(tensor: Tensor) -> Iterator[None]:
        chosen.append(tensor)
        yield
        chosen.pop()

    for module in (sweep_kernels, wide_kernels):
        for name in [name for name in vars(module) if name.endswith(("_kernel", "_step"))]:
            monkeypatch.setattr(module, name, Watched(getattr(module, name), chosen))
    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    problem = draw("gru", (12, 2, 4, 5, False, False))
    segments, states, sweeper = cut(problem, 5), solved(problem), kind(problem)
    starts, ends, decay = sweeper.forward_entering(segments, 2, None, True)
    assert decay is not None
    sweeper.forward(segments, sweeper.correct(starts, ends, decay, boxed=True))
    sweeper.certify(starts, ends, 0.1, decay)
    data = AdjointData(states, None)
    finals, _, _ = sweeper.adjoint_entering(cut(problem, 5, True), 2, torch.zeros_like(problem.initial), data, False)
    sweeper.adjoint(cut(problem, 5, True), finals, data)
    assert not chosen


@pytest.mark.parametrize(("size", "kind"), KINDS)
@pytest.mark.parametrize("kernel", CELLS)
def test_adjoint(kernel: str, size: tuple[int, int, int, int, bool, bool], kind: type[GPUSweeper]) -> None:
    problem, exact = draw(kernel, size), double(draw(kernel, size))
    segments, states = cut(problem, size[3]), solved(exact)
    alive = segments.end > segments.begin
    ends = torch.randn(len(segments), problem.cell.size, dtype=torch.float64)
    incoming = torch.randn(problem.steps, problem.batch, problem.cell.parts[0], dtype=torch.float64)
    results = []
    for sweeper, cast in ((kind(problem), torch.float32), (ReferenceSweeper(exact), torch.float64)):
        gates = poisoned(sweeper.problem, problem.steps, problem.batch, problem.cell.gate_width)
        into_resets = torch.zeros(ends.shape, dtype=cast)
        data = AdjointData([part.to(cast) for part in states], incoming.to(cast), gates, into_resets)
        begins, decay = sweeper.adjoint(segments, ends.to(cast), data, True)
        assert decay is not None
        results.append([value.double() for value in (begins[alive], decay[alive], gates, into_resets)])
    for ours, truth in zip(*results, strict=True):
        torch.testing.assert_close(ours, truth, equal_nan=True, **CLOSE)


@pytest.mark.parametrize(("size", "kind", "lead"), LEADS)
@pytest.mark.parametrize("kernel", CELLS)
def test_lead_in(kernel: str, size: tuple[int, int, int, int, bool, bool], lead: int, kind: type[GPUSweeper]) -> None:
    """Entering a stretch early is the warm-up and the sweep that the reference makes in two passes."""
    problem, exact = draw(kernel, size), double(draw(kernel, size))
    segments, states = cut(problem, size[3]), solved(exact)
    alive = segments.end > segments.begin
    blank = single(solved(exact))
    ours = kind(problem).forward_entering(segments, lead, blank, False)
    truth = ReferenceSweeper(exact).forward_entering(segments, lead, solved(exact), False)
    for a, b in zip(ours[:2], truth[:2], strict=True):
        torch.testing.assert_close(a[alive].double(), b[alive], **CLOSE)

    final = torch.randn(problem.batch, problem.cell.size, dtype=torch.float64)
    incoming = torch.randn(problem.steps, problem.batch, problem.cell.parts[0], dtype=torch.float64)
    shape = (problem.steps, problem.batch, problem.cell.gate_width)
    gates, exact_gates = poisoned(problem, *shape), poisoned(exact, *shape)
    resets = torch.zeros(len(segments), problem.cell.size)
    data = AdjointData(single(states), incoming.float(), gates, resets)
    ours = kind(problem).adjoint_entering(segments, lead, final.float(), data, False)
    data = AdjointData(states, incoming, exact_gates, resets.double())
    truth = ReferenceSweeper(exact).adjoint_entering(segments, lead, final, data, False)
    for a, b in zip((*ours[:2], gates), (*truth[:2], exact_gates), strict=True):
        rows = alive if len(a) == len(alive) else slice(None)
        torch.testing.assert_close(a[rows].double(), b[rows], equal_nan=True, **CLOSE)


def test_a_lead_in_is_no_longer_than_all_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels would count steps that are not there, a million launches of a wide layer's."""
    problem, leads = draw("gru", SIZES[0]), []
    monkeypatch.setattr(GPUSweeper, "_launch", lambda self, *given: leads.append(given[3]))
    segments, data = cut(problem, 7), AdjointData([torch.zeros(18, 3, 5)], None)
    monkeypatch.setattr(GPUSweeper, "_slopes_at", lambda self, states: states[0])
    GPUSweeper(problem).forward_entering(segments, 10**6, None, False)
    GPUSweeper(problem).adjoint_entering(segments, 10**6, torch.zeros(3, 5), data, False)
    assert leads == [17, 17]


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
    joint = GPUSweeper(problem).certifier(0.0, fading=True)
    assert joint is not None
    scale = torch.maximum(starts[batch + 1].abs(), ends[1].abs()).max()  # of h and c together
    assert float(joint(starts, ends)) == pytest.approx(float(0.25 / scale), rel=1e-5)
    ends[0, 0] = torch.nan
    assert float(certify(starts, ends)) == torch.inf
    assert float(joint(starts, ends)) == torch.inf
    assert GPUSweeper(draw(kernel, SIZES[2])).certifier(0.1, fading=False) is None


@pytest.mark.parametrize("sweeper", [GPUSweeper, WideSweeper])
def test_products_are_not_rounded(sweeper: type[GPUSweeper], monkeypatch: pytest.MonkeyPatch) -> None:
    """Though torch may let cuDNN round to tf32."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    problem = draw("rnn_tanh", (4, 3, 21, 4, False, False))
    h, u = torch.randn(12, 21), problem.u.flatten(0, 1).double()
    new = torch.tanh(u + h.double() @ problem.cell.weights[0].double().t())
    ends, _ = sweeper(problem).forward(cut(problem, 1), h)
    torch.testing.assert_close(ends.double(), new, **CLOSE)


@pytest.mark.parametrize("where", ["state", "weight", "gradient"])
@pytest.mark.parametrize("sweeper", [GPUSweeper, WideSweeper])
def test_rounding_keeps_what_is_not_a_number(
    sweeper: type[GPUSweeper], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU's NaN is 0x7fffffff, which overflows where digits are rounded up."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    lost = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    problem = draw("rnn_tanh", (4, 1, 5, 4, False, False))
    given = {"state": torch.zeros(1, 5), "weight": problem.cell.weights[0], "gradient": torch.zeros(1, 5)}
    given[where].view(-1)[2:3] = lost
    segments = cut(problem, 4)
    if where == "gradient":
        begins, _ = sweeper(problem).adjoint(segments, given[where], AdjointData([torch.zeros(5, 1, 5)], None))
        assert begins.isnan().all()
    else:
        ends, _ = sweeper(problem).forward(segments, given["state"])
        assert ends.isnan().all()


@pytest.mark.parametrize("sweeper", [GPUSweeper, WideSweeper])
def test_what_relu_makes_of_infinity(sweeper: type[GPUSweeper]) -> None:
    problem = draw("rnn_relu", (1, 1, 4, 1, False, False))
    problem.u[0, 0] = torch.tensor([-torch.inf, torch.inf, torch.nan, -1.0])
    ends, _ = sweeper(problem).forward(cut(problem, 1), torch.zeros(1, 4))
    torch.testing.assert_close(ends[0], torch.relu(problem.u[0, 0]), equal_nan=True)


def test_only_what_fits_the_kernels_is_theirs() -> None:
    problem = draw("gru", SIZES[0])
    assert not GPUSweeper.supports(problem)  # on a CPU
    rows = Segments(*(torch.zeros(0, dtype=torch.int64) for _ in "sbe"))
    ends, _ = GPUSweeper(problem).forward(rows, torch.zeros(0, 5))
    assert ends.shape == (0, 5)


@pytest.mark.parametrize(
    ("kilobytes", "fits"), [(227, (128, 64, 128)), (163, (64, 64, 128)), (99, (64, 64, 128)), (64, (32, 32, 64))]
)
def test_weights_that_do_not_fit_on_the_chip_stay_in_memory(
    kilobytes: int, fits: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On an H200, an A100, GPUs for consumers of the last years, and older ones."""
    chip = SimpleNamespace(shared_memory_per_block_optin=kilobytes << 10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: chip)
    gpu._on_chip.cache_clear()
    there = torch.device("cuda", 7)
    assert tuple(gpu.largest(kernel, there) for kernel in ("gru", "lstm", "rnn_tanh")) == fits
    gpu._on_chip.cache_clear()


def layers(kernel: str, bias: bool, steps: int = 25, memory: float = 0.0) -> tuple[GPULayer, nn.RNNBase, Tensor]:
    """A layer, torch's in float64, and its x."""
    torch.manual_seed(7)
    kind = {"gru": nn.GRU, "lstm": nn.LSTM}.get(kernel, nn.RNN)
    options = {"nonlinearity": kernel.removeprefix("rnn_")} if kind is nn.RNN else {}
    exact = kind(6, 11, bias=bias, **options)
    if memory:
        with torch.no_grad():
            exact.bias_ih_l0[11:22] += memory
    exact = exact.double()
    x = torch.randn(steps, 3, 6, dtype=torch.float64, requires_grad=True)
    weights = [weight.detach().float() for weight in exact.parameters()] + [None] * (0 if bias else 2)
    cell = {"gru": GRUCell.of, "lstm": lambda *given: LSTMCell(given[1])}.get(kernel)
    made = RNNCell(weights[1], kernel.removeprefix("rnn_")) if cell is None else cell(*weights)
    size = 22 if kernel == "lstm" else 11
    return GPULayer(made, x.detach().float(), torch.zeros(3, size), *weights), exact, x


def check_layer(layer: GPULayer, exact: nn.RNNBase, x: Tensor, way: tuple[int, int, int], close: float) -> None:
    """States and the gradients of everything, against torch in float64."""
    parts = [torch.zeros(1, 3, 11, dtype=torch.float64, requires_grad=True) for _ in layer.parts]
    output, final = exact(x, tuple(parts) if len(parts) == 2 else parts[0])
    finals = torch.cat(final if isinstance(final, tuple) else [final], -1)
    incoming, at_end = torch.randn_like(output), torch.randn_like(finals[0])
    loss = (output * incoming).sum() + (finals[0] * at_end).sum()
    truth = torch.autograd.grad(loss, [x, *parts, *exact.parameters()])
    kept, jump = layer.forward(Cutting(*way), 0.1, True)
    assert float(jump) < close
    assert kept[0].dtype == layer.x.dtype
    torch.testing.assert_close(kept[0][1:].double(), output.detach(), rtol=0.0, atol=close)
    given = incoming.to(layer.x.dtype), at_end.float()
    grads, jump = layer.backward(Cutting(*way), kept, given, True)
    assert float(jump) < close
    initial = torch.cat([part[0] for part in truth[1 : 1 + len(parts)]], -1)
    for ours, expected in zip(grads, [truth[0], initial, *truth[1 + len(parts) :]], strict=False):
        assert ours is not None
        torch.testing.assert_close(ours.double(), expected, rtol=0.0, atol=close * float(expected.abs().max()))


@pytest.fixture
def width(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers by one of the three kinds of kernels, whatever their width."""
    if request.param != "narrow":
        monkeypatch.setattr(gpu, "LARGEST", dict.fromkeys(CELLS, 0))
    if request.param == "by library":
        monkeypatch.setattr(wide, "BY_LIBRARY", 0)


WAYS = [(13, 0, 1), (4, 13, 1), (4, 0, 4), (4, 2, 4)]
LAYERS = [("narrow", kernel, way, bias) for kernel in CELLS for way in WAYS for bias in (True, False)]
LAYERS += [("wide", kernel, WAYS[1], True) for kernel in CELLS] + [("wide", "lstm", WAYS[2], False)]
LAYERS += [("by library", "gru", WAYS[2], True), ("by library", "lstm", WAYS[1], True)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("width", ["narrow", "wide"], indirect=True)
@pytest.mark.parametrize("kernel", ["gru", "lstm"])
@pytest.mark.usefixtures("width")
def test_no_gradient_by_the_final_state_is_a_zero_one(kernel: str, way: tuple[int, int, int]) -> None:
    layer, *_ = layers(kernel, True, 13)
    kept, _ = layer.forward(Cutting(*way), 0.1, True)
    incoming = torch.randn(kept[0][1:].shape)
    found, certificate = layer.backward(Cutting(*way), kept, (incoming, None), True)
    truth, expected = layer.backward(Cutting(*way), kept, (incoming, torch.zeros_like(layer.initial)), True)
    torch.testing.assert_close(found, truth, rtol=0.0, atol=0.0)
    assert float(certificate) == float(expected)


@pytest.mark.parametrize(("width", "kernel", "way", "bias"), LAYERS, indirect=["width"])
@pytest.mark.usefixtures("width")
def test_whole_layers(kernel: str, way: tuple[int, int, int], bias: bool) -> None:
    check_layer(*layers(kernel, bias, 13), way, 2e-6)


@pytest.mark.parametrize("width", ["narrow", "wide"], indirect=True)
@pytest.mark.usefixtures("width")
def test_a_single_sequence() -> None:
    """Its number, 0, is told to every chunk: not by one number that kernels would read beyond."""
    assert all(column.is_contiguous() for column in cut_evenly(13, 1, 4, False).columns)
    layer, exact, x = layers("gru", True, 13)
    layer = replace(layer, x=layer.x[:, :1].contiguous(), initial=layer.initial[:1])
    kept, jump = layer.forward(Cutting(4, 13), 0.1, True)
    assert float(jump) < 2e-6
    torch.testing.assert_close(kept[0][1:].double(), exact(x[:, :1])[0].detach(), rtol=0.0, atol=2e-6)


@pytest.mark.parametrize(
    ("width", "kernel"), [("narrow", "gru"), ("narrow", "lstm"), ("wide", "gru")], indirect=["width"]
)
@pytest.mark.usefixtures("width")
def test_whole_layers_in_half_precision(kernel: str) -> None:
    layer, exact, x = layers(kernel, True, 13)
    half = [None if weight is None else weight.half() for weight in (layer.w_ih, layer.w_hh, layer.b_ih, layer.b_hh)]
    cell = layer.cell.with_weights(tuple(weight.half() for weight in layer.cell.weights))
    check_layer(GPULayer(cell, layer.x.half(), layer.initial, *half), exact, x, WAYS[1], 3e-3)


@pytest.mark.parametrize("lanes", [(False, True), (True, False), (False, False)], ids=str)
@pytest.mark.parametrize("name", ["GRU", "LSTM", "RNN"])
def test_half_precision_by_either_solver(name: str, lanes: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward pass may each be a whole layer's call or the general loop: they hand on the same tensors."""
    for kind in (CPULayer, CPUSweeper, WideSweeper):
        monkeypatch.setattr(kind, "supports", lambda *_: False)
    monkeypatch.setattr(GPULayer, "supports", lambda *_: True)
    monkeypatch.setattr(GPUSweeper, "supports", lambda _: True)
    torch.manual_seed(0)
    exact = getattr(nn, name)(3, 5)
    ours = getattr(tl, name)(3, 5).half()
    ours.load_state_dict(exact.state_dict())
    exact.load_state_dict(ours.state_dict())
    exact, memory, reports = exact.double(), LayerExperience(), []
    memory.forward.corrected, memory.backward.corrected = (not lane for lane in lanes)
    x = torch.randn(17, 2, 3).half().requires_grad_()
    initial = torch.zeros(2, 10 if name == "LSTM" else 5, requires_grad=True)
    solve = LayerSolve(ours._bare, ours._cell, Shooting(chunk=5, warmup=17), memory)
    solved = solve.run(Inputs(x, initial, *ours._weights_of(0)), reports.append)
    twin = x.detach().double().requires_grad_()
    outputs, incoming = exact(twin)[0], torch.randn(17, 2, 5).half()
    outputs.backward(incoming.double())
    for value in solved:
        assert value.dtype == torch.float16
    solved[0].backward(incoming)
    assert reports[-1].backward is not None
    found = [solved[0], x.grad, *(weight.grad for weight in ours.parameters())]
    for value, truth in zip(found, [outputs, twin.grad, *(weight.grad for weight in exact.parameters())], strict=True):
        torch.testing.assert_close(value.double(), truth, rtol=0.0, atol=2e-3 * float(truth.detach().abs().max()))


@pytest.mark.parametrize("memory", [4.0, 6.0])
def test_long_memory_takes_few_corrected_sweeps(memory: float) -> None:
    """Twenty chunks of a network that forgets over hundreds of steps: without corrections 20 sweeps would be needed.

    Float32 leaves 1 − z few digits there, in torch as here.
    """
    check_layer(*layers("gru", True, 80, memory), (4, 0, 9), 4e-5)


@pytest.mark.parametrize(("width", "sweeps"), [("narrow", 3), ("narrow", 5), ("wide", 4)], indirect=["width"])
@pytest.mark.usefixtures("width")
def test_the_certificate_of_corrected_sweeps_tells_the_error(sweeps: int) -> None:
    """Jumps add up over a long memory; the certificate is near what they add up to, in both passes."""
    layer, *_ = layers("gru", True, 96, 6.0)
    whole, cut_up = Cutting(96, 0), Cutting(4, 0, sweeps)
    kept, told = layer.forward(cut_up, 0.1, True)
    truth, _ = layer.forward(whole, 0.1, True)
    errors = (kept[0] - truth[0]).abs().amax(-1) / truth[0].abs().amax(-1).clamp(min=0.1)
    assert errors.max() / 3 <= float(told) <= 3 * errors.max()
    incoming = torch.randn_like(truth[0][1:])
    exact_grads, _ = layer.backward(whole, truth, (incoming, None), True)
    grads, told = layer.backward(cut_up, truth, (incoming, None), True)
    assert grads[1] is not None
    assert exact_grads[1] is not None
    error = (grads[1] - exact_grads[1]).abs().max() / exact_grads[1].abs().max()
    assert float(told) >= error / 3


def test_a_lost_number_is_never_certified() -> None:
    """Not even where corrections are kept in a box, which would hide it."""
    layer, *_ = layers("gru", True, 80, 6.0)
    layer.x[17, 0, 0] = math.nan
    for sweeps in (1, 6):
        assert math.isinf(float(layer.forward(Cutting(4, 0, sweeps), 0.1, True)[1]))


def test_corrections_carry_jumps_along() -> None:
    """`correct` against the recurrence it stands for, over more links than a program scans at once."""
    problem = draw("lstm", (5, 2, 3, 5, False, False))
    links, starts, ends = 1100, *(torch.randn(2200, 6) for _ in "se")
    decay = torch.rand(2200, 6)
    for boxed in (True, False):
        ours = GPUSweeper(problem).correct(starts, ends, decay, boxed).view(links, 2, 6)
        delta, truth = torch.zeros(2, 6), [starts.view(links, 2, 6)[0]]
        for p in range(1, links):
            delta = decay.view(links, 2, 6)[p - 1] * delta + ends.view(links, 2, 6)[p - 1] - starts.view(links, 2, 6)[p]
            truth.append(starts.view(links, 2, 6)[p] + delta)
        expected, bound = torch.stack(truth), problem.cell.bound(problem.initial)
        if boxed and bound is not None:
            expected[1:] = expected[1:].clamp(-bound, bound)
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
