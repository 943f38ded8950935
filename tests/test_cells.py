"""Cells: each step against torch's own, each derivative against autograd, in float64."""

from __future__ import annotations

import pytest
import torch
import zoo
from torch import Tensor, nn
from torch.func import jacrev, vmap

from timeloom.cells import Cell, GenericCell, GRUCell, LSTMCell, RNNCell, projection

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS = 5


def at_random(net: zoo.Network, rows: int = ROWS) -> tuple[zoo.Recurrence, Tensor, Tensor]:
    """A recurrence, a state far from zero and the projected inputs of one step."""
    x, initial = zoo.data(net, 1, rows)
    problem = net.recurrence(x, initial)
    return problem, (2 * initial).detach(), problem.u[0].detach()


def detached(problem: zoo.Recurrence) -> Cell:
    return problem.cell.with_weights(tuple(weight.detach() for weight in problem.cell.weights))


def jacobian_of(cell: Cell, state: Tensor, u: Tensor) -> Tensor:
    """∂s⁺/∂s by autograd, `(N, S, S)`."""
    return torch.stack(
        [
            torch.autograd.functional.jacobian(lambda s, u=u[i]: cell.step(s[None], u[None])[0], state[i])
            for i in range(len(state))
        ]
    )


@pytest.mark.parametrize(("name", "regime"), zoo.cases())
def test_step_is_torchs(name: str, regime: str) -> None:
    net = zoo.network(name, regime)
    x, initial = zoo.data(net, 1, ROWS)
    problem = net.recurrence(x, initial)
    torch.testing.assert_close(
        problem.cell.step(initial, problem.u[0]), net.step(initial, x[0]), rtol=1e-13, atol=1e-14
    )


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("layer", "options"),
    [
        (nn.GRU, {}),
        (nn.LSTM, {}),
        (nn.LSTM, {"proj_size": 2}),
        (nn.RNN, {"nonlinearity": "tanh"}),
        (nn.RNN, {"nonlinearity": "relu"}),
    ],
)
def test_projection_and_steps_are_torchs_layer(layer: type[nn.RNNBase], options: dict, bias: bool) -> None:
    """Over several steps, from torch's parameters, with and without biases."""
    torch.manual_seed(0)
    module = layer(zoo.INPUTS, 5, bias=bias, **options).double()
    x = torch.randn(6, 3, zoo.INPUTS, dtype=torch.float64)
    weights = {name.removesuffix("_l0"): weight for name, weight in module.named_parameters()}
    args = [weights.get(name) for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
    if layer is nn.LSTM:
        cell, u = LSTMCell.project(x, *args, weights.get("weight_hr"))
    elif layer is nn.GRU:
        cell, u = GRUCell.project(x, *args)
    else:
        cell, u = RNNCell.project(x, *args, **options)
    state, outputs = x.new_zeros(3, cell.size), []
    for t in range(len(x)):
        state = cell.step(state, u[t])
        outputs.append(state[:, : cell.parts[0]])
    expected, final = module(x)
    torch.testing.assert_close(torch.stack(outputs), expected, rtol=1e-12, atol=1e-13)
    final = torch.cat(final, -1) if isinstance(final, tuple) else final
    torch.testing.assert_close(state, final[0], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(("name", "regime"), zoo.cases())
def test_jacobian_and_vjp_are_autograds(name: str, regime: str) -> None:
    problem, state, u = at_random(zoo.network(name, regime))
    cell = detached(problem)
    expected = jacobian_of(cell, state, u)
    torch.testing.assert_close(cell.jacobian(state, u), expected, rtol=1e-11, atol=1e-13)
    grad = torch.randn(state.shape, dtype=state.dtype, generator=torch.Generator().manual_seed(3))
    back, gates = cell.vjp(state, u, grad)
    torch.testing.assert_close(back, (grad.unsqueeze(1) @ expected).squeeze(1), rtol=1e-11, atol=1e-13)
    assert gates.shape == (ROWS, cell.gate_width)


@pytest.mark.parametrize("name", ["function", "function of tuple", "elementwise", "module", "rnn tanh", "rnn relu"])
def test_decay_without_a_gate_is_the_jacobians_diagonal(name: str) -> None:
    problem, state, u = at_random(zoo.network(name))
    cell = detached(problem)
    diagonal = jacobian_of(cell, state, u).diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(cell.decay(state, u), diagonal, rtol=1e-11, atol=1e-13)


def test_decay_of_a_gru_is_its_update_gate() -> None:
    """With no recurrent weights nothing else carries the state, and the decay is the Jacobian."""
    problem, state, u = at_random(zoo.network("gru"))
    w_hh, b_hn = problem.cell.weights
    cell = GRUCell(torch.zeros_like(w_hh), b_hn.detach())
    torch.testing.assert_close(torch.diag_embed(cell.decay(state, u)), jacobian_of(cell, state, u))
    decay = problem.cell.decay(state, u).detach()
    _, update, _, _ = problem.cell._gates(state, u)
    torch.testing.assert_close(decay, update.detach())


@pytest.mark.parametrize("name", ["lstm", "lstm projected"])
def test_decay_of_an_lstm_is_its_forget_gate_on_c(name: str) -> None:
    problem, state, u = at_random(zoo.network(name))
    cell = detached(problem)
    h_width, c_width = cell.parts
    c_by_c = jacobian_of(cell, state, u)[:, h_width:, h_width:].diagonal(dim1=-2, dim2=-1)
    expected = torch.cat([torch.zeros(ROWS, h_width, dtype=state.dtype), c_by_c], -1)
    torch.testing.assert_close(cell.decay(state, u), expected)
    assert c_width == c_by_c.shape[-1]


@pytest.mark.parametrize("name", zoo.HAND_WRITTEN)
def test_input_and_weight_gradients_are_autograds(name: str) -> None:
    problem, state, u = at_random(zoo.network(name))
    cell = problem.cell
    weights = tuple(weight.detach().requires_grad_() for weight in cell.weights)
    live = u.requires_grad_()
    grad = torch.randn(state.shape, dtype=state.dtype, generator=torch.Generator().manual_seed(3))
    expected = torch.autograd.grad(cell.with_weights(weights).step(state, live), (live, *weights), grad)
    _, gates = detached(problem).vjp(state, u.detach(), grad)
    given = (cell.input_grads(gates), *cell.weight_grads(state.split(cell.parts, -1), gates))
    assert len(given) == len(expected)
    for one, other in zip(given, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize(("name", "regime"), zoo.cases(("gru", "lstm", "rnn tanh")))
def test_no_trajectory_leaves_the_bound(name: str, regime: str) -> None:
    """From initial states inside and outside the unit box."""
    net = zoo.network(name, regime)
    x, initial = zoo.data(net, 40, 6)
    x, initial = 5 * x.detach(), (initial * torch.tensor([0.1, 1.0, 1.0, 3.0, 10.0, 100.0])[:, None]).detach()
    bound = net.recurrence(x, initial).cell.bound(initial)
    states, _ = zoo.truth(net, x, initial)
    assert bool((initial.abs() <= bound).all())
    assert bool((states.abs() <= bound + 1e-12).all())
    if name != "lstm":
        assert bool((bound == initial.abs().clamp(min=1)).all())


def test_cells_without_a_box_claim_none() -> None:
    for name in ("rnn relu", "function", "function of tuple", "elementwise", "module"):
        problem, state, _ = at_random(zoo.network(name))
        assert problem.cell.bound(state) is None
    problem, state, _ = at_random(zoo.network("lstm projected"))
    assert bool(problem.cell.bound(state).isinf().all())
    problem, state, _ = at_random(zoo.network("lstm"))
    assert bool(problem.cell.bound(state)[:, 4:].isinf().all())


def test_structure_of_a_generic_cell_is_probed() -> None:
    for name, diagonal in (("elementwise", True), ("function", False), ("function of tuple", False), ("module", False)):
        problem, state, u = at_random(zoo.network(name))
        assert problem.cell.is_diagonal(state, u) is diagonal, name


def test_structure_that_shows_only_away_from_the_state_is_found() -> None:
    """At h = 0 the coupling vanishes; the probe must look around it too."""

    def cell(h: Tensor, x: Tensor) -> Tensor:
        return 0.5 * h + h.flip(-1) ** 2 + x

    state, u = torch.zeros(3, 4), torch.zeros(3, 4)
    assert GenericCell(cell, state, (4,)).is_diagonal(state, u) is False


def test_generic_pack_and_unpack_are_inverse() -> None:
    parts = (torch.randn(3, 2, 2), torch.randn(3), torch.randn(3, 5))
    cell = GenericCell(lambda h, x: h, parts, ())
    assert cell.parts == (4, 1, 5)
    flat = cell.pack(parts)
    assert flat.shape == (3, 10)
    for given, expected in zip(cell.unpack(flat), parts, strict=True):
        assert torch.equal(given, expected)
    lead = flat.expand(2, 3, 10)
    assert [tuple(part.shape) for part in cell.unpack(lead)] == [(2, 3, 2, 2), (2, 3), (2, 3, 5)]


def test_generic_cell_that_ignores_its_state_has_no_derivative() -> None:
    cell = GenericCell(lambda h, x: x.clone(), torch.zeros(2, 3), (3,))
    state, u = torch.randn(2, 3), torch.randn(2, 3)
    back, _ = cell.vjp(state, u, torch.ones(2, 3))
    assert bool((back == 0).all())
    assert bool((cell.jacobian(state, u) == 0).all())


def test_with_weights_leaves_the_cell_alone() -> None:
    problem, _, _ = at_random(zoo.network("gru"))
    before = problem.cell.weights
    twin = problem.cell.with_weights(tuple(weight * 2 for weight in before))
    assert problem.cell.weights is before
    assert twin.parts == problem.cell.parts
    assert twin.kernel == problem.cell.kernel == "gru"


def test_vmap_agrees_with_the_dense_jacobian_of_a_generic_cell() -> None:
    """A second opinion on `_dense`, which builds the Jacobian unit by unit."""
    net = zoo.network("function of tuple")
    problem, state, u = at_random(net)
    expected = vmap(jacrev(lambda s, u: net.step(s[None], u[None])[0]))(state, u)
    torch.testing.assert_close(problem.cell.jacobian(state, u), expected.detach())


@pytest.mark.parametrize("inputs", [1, 128, 129, 300])
@pytest.mark.parametrize("biased", [True, False])
def test_many_inputs_are_added_up_in_parts(inputs: int, biased: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(projection, "_adds_in_a_row", lambda a: True)  # as on a GPU
    multiply, terms = projection.torch.addmm, list[int]()

    def noted(total: Tensor, a: Tensor, b: Tensor, **given: Tensor) -> Tensor:
        terms.append(a.shape[1])
        return multiply(total, a, b, **given)

    monkeypatch.setattr(projection.torch, "addmm", noted)
    x, weight = torch.randn(7, 2, inputs + 3), torch.randn(12, inputs, requires_grad=True)
    bias = torch.randn(12) if biased else None
    u = projection.project(x, weight, bias)
    assert max(terms, default=0) <= 128
    assert len(terms) == -(-inputs // 128) - (not biased)
    exact = nn.functional.linear(x[..., :inputs].double(), weight.double(), bias if bias is None else bias.double())
    torch.testing.assert_close(u[..., :12].double(), exact, rtol=1e-5, atol=1e-5)
    assert torch.equal(u[..., 12:], x[..., inputs:])
    (found,) = torch.autograd.grad(u[..., :12].sum(), [weight])
    torch.testing.assert_close(found, x[..., :inputs].sum((0, 1)).expand(12, -1), rtol=1e-5, atol=1e-5)
