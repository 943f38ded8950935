"""The implicit GRU as a module: its equations, every option of a GRU, and its three ways to be run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from module_zoo import OPTIONS, B, D, H, T, assert_same, call, hidden, inputs
from torch import Tensor, nn
from torch.autograd import gradgradcheck
from torch.nn.utils.rnn import pack_padded_sequence

import timeloom as tl
from timeloom.cells.implicit_gru import ImplicitGRUCell
from timeloom.kernels.cuda.layer import CUDALayer
from timeloom.problem import Recurrence
from timeloom.solve import recurrence
from timeloom.solvers import MGRIT, Shooting

pytestmark = pytest.mark.usefixtures("one_thread")

WAYS: dict[str, Any] = {
    "auto": "auto",
    "shooting": Shooting(chunk=4),
    "mgrit": MGRIT(coarsening=4),
    "mgrit as published, to the end": MGRIT(levels=3, coarsening=2, coarse="implicit", coarse_inputs="inject"),
}
each_way = pytest.mark.parametrize("solver", WAYS.values(), ids=WAYS.keys())
each_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())


def layer(solver: Any = "sequential", **options: Any) -> tl.ImplicitGRU:
    torch.manual_seed(0)
    return tl.ImplicitGRU(D, H, dtype=torch.float64, solver=solver, **options)


def by_hand(module: nn.RNNBase, x: Tensor, h: Tensor) -> Tensor:
    """One layer, one direction, step by step as in the paper."""
    outputs = []
    for step in x:
        i_r, i_z, i_n = (step @ module.weight_ih_l0.t() + module.bias_ih_l0).chunk(3, -1)
        h_r, h_z, h_n = (h @ module.weight_hh_l0.t() + module.bias_hh_l0).chunk(3, -1)
        g = 1 - torch.sigmoid(i_z + h_z)
        h = (h + g * torch.tanh(i_n + torch.sigmoid(i_r + h_r) * h_n)) / (1 + g)
        outputs.append(h)
    return torch.stack(outputs)


@pytest.mark.parametrize("solver", ["sequential", *WAYS.values()], ids=["sequential", *WAYS])
def test_equations(solver: Any) -> None:
    ours = layer(solver)
    x, hx = inputs(ours), hidden(ours)
    output, last = ours(x, hx)
    expected = by_hand(ours, x, hx[0])
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(last[0], expected[-1], rtol=1e-12, atol=1e-13)
    theirs = nn.GRU(D, H, dtype=torch.float64)
    theirs.load_state_dict(ours.state_dict())
    assert float((theirs(x, hx)[0] - output).detach().abs().max()) > 0.01, "it is another network than the GRU"


@each_way
@each_option
def test_results_and_gradients_are_the_sequential_ones(options: dict[str, Any], solver: Any) -> None:
    ours, truth = layer(solver, **options), layer(**options)
    x, hx = inputs(ours), hidden(ours)
    assert_same(call(ours, x, hx), call(truth, x, hx))
    assert_same(call(ours, x), call(truth, x))
    assert all(report.reason == "sequential, as asked for" for report in truth.reports)


@each_way
def test_lengths_and_packed_sequences(solver: Any) -> None:
    ours, truth = layer(solver), layer()
    x, lengths = inputs(ours), torch.tensor([T, 9, 4])
    packed = call(ours, x, pack=lambda x: pack_padded_sequence(x, lengths))
    assert_same(packed, call(truth, x, pack=lambda x: pack_padded_sequence(x, lengths)))
    output, last = ours(x, lengths=lengths)
    for row, length in enumerate(lengths):
        alone, final = truth(x[:length, row : row + 1])
        torch.testing.assert_close(output[:length, row : row + 1], alone, rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(last[:, row : row + 1], final, rtol=1e-12, atol=1e-13)


@each_way
def test_resets(solver: Any) -> None:
    ours, truth = layer(solver), layer()
    x, hx, resets = inputs(ours), hidden(ours), torch.zeros(T, B, dtype=torch.bool)
    resets[7] = True
    output, _ = ours(x, hx, resets=resets)
    for part in (slice(0, 7), slice(7, T)):
        torch.testing.assert_close(output[part], truth(x[part], hx)[0], rtol=1e-12, atol=1e-13)


def test_float32_is_close_to_float64() -> None:
    truth = layer()
    ours = tl.ImplicitGRU(D, H, solver=MGRIT(coarsening=8))
    ours.load_state_dict({key: value.float() for key, value in truth.state_dict().items()})
    x = torch.randn(400, 2, D, generator=torch.Generator().manual_seed(1))
    given, expected = call(ours, x), call(truth.float().double(), x.double())
    for key in expected:
        assert float((given[key] - expected[key]).abs().max() / expected[key].abs().max()) < 1e-5, key


def test_half_precision_where_other_layers_have_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's kernels multiply in half precision; this network has none, and is solved in float32."""
    monkeypatch.setattr(CUDALayer, "supports", lambda *_: True)
    ours = layer("auto").half()
    x = inputs(ours).detach().half().requires_grad_()
    output, _ = ours(x)
    assert output.dtype == torch.float16
    output.sum().backward()
    expected = by_hand(ours.double(), x.detach().double(), torch.zeros(B, H, dtype=torch.float64))
    torch.testing.assert_close(output.detach().double(), expected.detach(), rtol=0.0, atol=1e-3)


def test_the_sequential_way_is_on_the_tape() -> None:
    for ours in (layer(), layer(bias=False)):
        x = inputs(ours, 4, 1, D).requires_grad_()
        assert gradgradcheck(lambda x, *_, net=ours: net(x)[0], (x, *ours.parameters()), fast_mode=True)


def test_in_order_by_kernels_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """There a loop over steps is dozens of launches for each of them."""
    truth, ours = layer(bidirectional=True), layer(bidirectional=True)
    x, hx = inputs(ours), hidden(ours)
    expected = call(truth, x, hx)
    monkeypatch.setattr(recurrence, "runs_in_order", lambda problem: problem.cell.generated)
    assert_same(call(ours, x, hx), expected)
    for report in ours.reports:
        assert report.reason == report.backward.reason == "sequential, as asked for"
        assert report.iterations == 1
    small = inputs(ours, 4, 1, D).requires_grad_()
    assert gradgradcheck(lambda x, *_: ours(x)[0], (small, *ours.parameters()), fast_mode=True)


def test_in_order_by_a_loop_where_there_are_no_launches() -> None:
    problem = Recurrence(ImplicitGRUCell(torch.zeros(3 * H, H), torch.zeros(H)), torch.zeros(T, B, 3 * H),
                         torch.zeros(B, H))  # fmt: skip
    assert not recurrence.runs_in_order(problem)


def test_weights_of_a_gru_load() -> None:
    theirs, ours = nn.GRU(D, H, num_layers=2, bidirectional=True), tl.ImplicitGRU(D, H, 2, bidirectional=True)
    ours.load_state_dict(theirs.state_dict())
    assert list(ours.state_dict()) == list(theirs.state_dict())


def test_parallelize_and_sequentialize_set_its_solver() -> None:
    model = nn.Sequential(tl.ImplicitGRU(D, H))
    tl.parallelize(model, MGRIT(coarsening=4))
    assert model[0].solver == MGRIT(coarsening=4)
    tl.sequentialize(model)
    assert type(model[0]) is tl.ImplicitGRU
    assert model[0].solver == "sequential"


def test_vmap_runs_it_too() -> None:
    ours, x = tl.ImplicitGRU(D, H), torch.randn(2, T, B, D)
    found = torch.func.vmap(lambda x: ours(x)[0])(x)
    torch.testing.assert_close(found, torch.stack([ours(one)[0] for one in x]), rtol=1e-5, atol=1e-6)


def test_an_empty_batch() -> None:
    output, last = layer("auto")(torch.zeros(T, 0, D, dtype=torch.float64))
    assert output.shape == (T, 0, H)
    assert last.shape == (1, 0, H)
