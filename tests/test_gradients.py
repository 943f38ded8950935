"""Gradients by the adjoint solve against finite differences, and how they behave on autograd's tape."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import zoo
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck

import timeloom as tl
from timeloom.cells.base import sum_outer
from timeloom.solvers import Auto, Shooting, Solver

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS, BATCH = 7, 2
CHUNKS = {"1": 1, "3": 3, "ragged": 4, "T": STEPS}


def function_of(
    net: zoo.Network, solver: Solver, loss: str, lengths: Tensor | None = None, resets: Tensor | None = None
) -> Callable[..., tuple[Tensor, ...]]:
    """What gradcheck differentiates: the parameters are perturbed where they are."""

    def run(x: Tensor, initial: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
        solution = zoo.solve(net, x, initial, solver, lengths, resets)
        both = (solution.outputs, solution.final)
        return {"outputs": both[:1], "last": both[1:], "both": both}[loss]

    return run


def check(
    net: zoo.Network,
    solver: Solver,
    loss: str,
    fast: bool = True,
    lengths: Tensor | None = None,
    resets: Tensor | None = None,
) -> None:
    x, initial = zoo.data(net, STEPS, BATCH)
    inputs = (x, initial, *net.parameters.values())
    function = function_of(net, solver, loss, lengths, resets)
    assert gradcheck(function, inputs, fast_mode=fast, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("correction", ["none", "diag", "newton", "auto"])
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("name", zoo.ZOO)
def test_gradcheck(name: str, chunk: str, correction: str) -> None:
    """Losses on all states, on the last state and on both; random directions."""
    net = zoo.network(name, n=3)
    for loss in ("outputs", "last", "both"):
        check(net, Shooting(chunk=CHUNKS[chunk], correction=correction), loss)


@pytest.mark.parametrize("name", zoo.ZOO)
def test_gradcheck_of_every_entry(name: str) -> None:
    check(zoo.network(name, n=2), Shooting(chunk=3), "both", fast=False)


@pytest.mark.parametrize(("name", "regime"), [case for case in zoo.cases() if case[1] != "default"])
def test_gradcheck_in_every_regime(name: str, regime: str) -> None:
    check(zoo.network(name, regime, n=3), Shooting(chunk=3), "both")


@pytest.mark.parametrize("name", zoo.ZOO)
def test_gradcheck_with_a_sequential_adjoint(name: str) -> None:
    check(zoo.network(name, n=3), Shooting(chunk=3, adjoint="sequential"), "both")


@pytest.mark.parametrize("name", zoo.HAND_WRITTEN)
def test_gradcheck_with_lengths_and_resets(name: str) -> None:
    resets = torch.zeros(STEPS, BATCH, dtype=torch.bool)
    resets[0, 0] = resets[3, 0] = resets[4, 0] = resets[2, 1] = True
    net = zoo.network(name, n=3)
    for lengths in (torch.tensor([STEPS, 5]), torch.tensor([0, 1])):
        check(net, Shooting(chunk=3), "both", lengths=lengths, resets=resets)


def test_a_sequential_adjoint_is_reported() -> None:
    net = zoo.network("gru")
    x, initial = zoo.data(net, 20, 2)
    solution = zoo.solve(net, x, initial, Shooting(chunk=5, adjoint="sequential"))
    solution.outputs.sum().backward()
    assert solution.report.solver.startswith("shooting")
    assert solution.report.backward.solver == "sequential"
    assert "adjoint='sequential'" in solution.report.backward.reason


# ---- second order -----------------------------------------------------------------------------------------------


def test_second_order_works_sequentially() -> None:
    """In `unroll` by its own loop, in a module by torch's layer."""
    w = torch.randn(2, 2, dtype=torch.float64).requires_grad_()
    h0 = torch.randn(1, 2, dtype=torch.float64).requires_grad_()
    xs = torch.randn(4, 1, 2, dtype=torch.float64).requires_grad_()

    def run(h0: Tensor, xs: Tensor, w: Tensor) -> Tensor:
        states, _ = tl.unroll(lambda h, x: torch.tanh(h @ w + x), h0, xs, solver="sequential")
        return states

    assert gradgradcheck(run, (h0, xs, w), fast_mode=True)
    gru = tl.GRU(2, 3, solver="sequential", dtype=torch.float64)
    x = torch.randn(4, 1, 2, dtype=torch.float64).requires_grad_()
    assert gradgradcheck(lambda x: gru(x)[0], (x,), fast_mode=True)


# ---- on autograd's tape -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", zoo.ZOO)
def test_any_subset_of_leaves_may_ask(name: str) -> None:
    """Only x, only the initial state, only one parameter: the same gradient as when all ask."""
    net = zoo.network(name)
    x, initial = zoo.data(net, 12, 2)
    leaves = {"x": x, "initial": initial, **net.parameters}
    solution = zoo.solve(net, x, initial, Shooting(chunk=5))
    expected = zoo.gradients(net, x, initial, solution.outputs, solution.final)
    for name_of, leaf in leaves.items():
        for other in leaves.values():
            other.requires_grad_(other is leaf)
        solution = zoo.solve(net, x, initial, Shooting(chunk=5))
        assert solution.outputs.requires_grad
        weights = torch.Generator().manual_seed(2)
        on = [torch.randn(p.shape, generator=weights, dtype=p.dtype) for p in (solution.outputs, solution.final)]
        (given,) = torch.autograd.grad((solution.outputs * on[0]).sum() + (solution.final * on[1]).sum(), leaf)
        torch.testing.assert_close(given, expected[name_of], rtol=1e-12, atol=1e-14)
    for leaf in leaves.values():
        leaf.requires_grad_(False)
    if name in zoo.HAND_WRITTEN:
        assert not zoo.solve(net, x, initial, Shooting(chunk=5)).outputs.requires_grad


@pytest.mark.parametrize("name", ["gru", "function"])
def test_no_grad_leaves_no_tape(name: str) -> None:
    net = zoo.network(name)
    x, initial = zoo.data(net, 12, 2)
    expected = zoo.solve(net, x, initial, Shooting(chunk=5))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            given = zoo.solve(net, x, initial, Shooting(chunk=5))
        assert not given.outputs.requires_grad
        assert torch.equal(given.outputs, expected.outputs)
        assert torch.equal(given.final, expected.final)


@pytest.mark.parametrize("name", ["lstm", "function of tuple"])
def test_backward_twice_needs_the_graph_and_gives_the_same(name: str) -> None:
    net = zoo.network(name)
    x, initial = zoo.data(net, 12, 2)
    loss = zoo.solve(net, x, initial, Shooting(chunk=5)).outputs.square().sum()
    once = torch.autograd.grad(loss, x, retain_graph=True)[0]
    twice = torch.autograd.grad(loss, x)[0]
    assert torch.equal(once, twice)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, x)


def test_outputs_changed_in_place_are_noticed() -> None:
    """The states are needed by the backward pass: writing over them must not give a wrong gradient silently."""
    net = zoo.network("lstm")
    x, initial = zoo.data(net, 12, 2)
    outputs = zoo.solve(net, x, initial, Shooting(chunk=5)).outputs
    loss = outputs.sum()
    with torch.no_grad():
        outputs.mul_(2)
    with pytest.raises(RuntimeError, match="inplace operation"):
        loss.backward()


def test_inputs_changed_in_place_are_noticed() -> None:
    net = zoo.network("gru")
    x, initial = zoo.data(net, 12, 2)
    loss = zoo.solve(net, x, initial, Shooting(chunk=5)).outputs.sum()
    with torch.no_grad():
        net.parameters["weight_hh_l0"].mul_(2)
    with pytest.raises(RuntimeError, match="inplace operation"):
        loss.backward()


def test_gradients_flow_through_what_came_before() -> None:
    """Inputs and initial state that are themselves computed, and a second network on top of the first."""
    first, second = zoo.network("gru", n=3), zoo.network("lstm", seed=1)
    raw = torch.randn(14, 2, zoo.INPUTS, dtype=torch.float64, requires_grad=True)
    _, h0 = zoo.data(first, 1, 2)
    _, s0 = zoo.data(second, 1, 2)

    def stack(run: Callable[..., Tensor]) -> Tensor:
        return run(second, run(first, raw.tanh(), 2 * h0), s0.sin()).square().sum()

    given = torch.autograd.grad(stack(lambda *args: zoo.solve(*args, Shooting(chunk=4)).outputs), (raw, h0, s0))
    expected = torch.autograd.grad(
        stack(lambda net, x, initial: zoo.truth(net, x, initial)[0][..., : net.parts[0]]), (raw, h0, s0)
    )
    for one, other in zip(given, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-13)


def test_unused_results_cost_nothing_and_change_nothing() -> None:
    """A loss on the final state's h alone, on c alone, on one step: the rest of the gradient is zero, not missing."""
    net = zoo.network("lstm")
    x, initial = zoo.data(net, 15, 2)
    for pick in (
        lambda y, f: f[:, :4].sum(),
        lambda y, f: f[:, 4:].sum(),
        lambda y, f: y[3].sum(),
        lambda y, f: y[-1, 0, 0],
    ):
        solution = zoo.solve(net, x, initial, Shooting(chunk=4))
        states, final = zoo.truth(net, x, initial)
        given = torch.autograd.grad(pick(solution.outputs, solution.final), (x, initial, *net.parameters.values()))
        wanted = torch.autograd.grad(pick(states[..., :4], final), (x, initial, *net.parameters.values()))
        for one, other in zip(given, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-13)


def test_a_gradient_that_is_not_contiguous() -> None:
    """`y.sum()` sends back one number expanded to all of y; a transpose sends strides."""
    net = zoo.network("gru", dtype=torch.float32)
    x, initial = zoo.data(net, 40, 3, dtype=torch.float32)
    results = []
    for run in ("ours", "truth"):
        y = zoo.solve(net, x, initial, Shooting(chunk=8)).outputs if run == "ours" else zoo.truth(net, x, initial)[0]
        weight = torch.randn(4, 3, 40, generator=torch.Generator().manual_seed(0))
        results.append(torch.autograd.grad(y.sum() + (y.transpose(0, 2) * weight).sum(), x)[0])
    assert zoo.difference(*results) < 1e-5


def test_auto_solves_backwards_too() -> None:
    net = zoo.network("gru", dtype=torch.float32, n=8)
    x, initial = zoo.data(net, 2048, 1, dtype=torch.float32)
    solution = zoo.solve(net, x, initial, Auto())
    solution.outputs.sum().backward()
    assert solution.report.converged
    assert solution.report.backward.converged
    assert "auto" in solution.report.backward.reason


@pytest.mark.parametrize("layer", [tl.GRU, tl.LSTM, tl.RNN])
@pytest.mark.parametrize("solver", ["deer", Shooting(chunk=50, warmup=0)], ids=str)
def test_gradients_of_weights_are_sums_of_short_sums(layer: type[nn.RNNBase], solver: object) -> None:
    """Over 6,000 terms, one long sum in float32 would be off by 2e-6 and more."""
    torch.manual_seed(1)
    module = layer(4, 6, solver=solver)
    exact = {tl.GRU: nn.GRU, tl.LSTM: nn.LSTM, tl.RNN: nn.RNN}[layer](4, 6, dtype=torch.float64)
    exact.load_state_dict(module.state_dict())
    x = torch.randn(3000, 2, 4)
    module(x)[0].square().mean().backward()
    exact(x.double())[0].square().mean().backward()
    for given, expected in zip(module.parameters(), exact.parameters(), strict=True):
        assert zoo.difference(given.grad, expected.grad) < 1e-6


@pytest.mark.parametrize("terms", [1, 255, 511, 512, 513, 6000, 16387])
def test_outer_products_are_summed_over_all_terms(terms: int) -> None:
    generator = torch.Generator().manual_seed(0)
    grads = torch.randn(terms, 9, generator=generator)[:, 2:] + 0.2
    values = torch.randn(terms, 3, generator=generator) + 0.3
    assert zoo.difference(sum_outer(grads, values), grads.double().t() @ values.double()) < 1e-6
