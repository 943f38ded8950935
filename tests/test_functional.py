"""Modules inside `torch.func`: grad, vjp, jvp, vmap and ensembles, parallel in time, against torch's own layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, stack_module_state, vjp, vmap

import timeloom as tl
from timeloom.solvers import Shooting

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch.func itself makes use of it

EXACT = torch.float64
T, B, D, N = 23, 2, 3, 4
Params = dict[str, Tensor]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=EXACT)


def pair(kind: str, solver: Any = None, **options: Any) -> tuple[Any, Any, Params]:
    """timeloom's layer, torch's with the same weights, and these."""
    torch.manual_seed(0)
    ours = getattr(tl, kind)(D, N, dtype=EXACT, solver=solver or Shooting(chunk=5), **options)
    theirs = getattr(nn, kind)(D, N, dtype=EXACT, **options)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs, {name: value.detach() for name, value in ours.named_parameters()}


def outputs(module: nn.Module, **marks: Any) -> Callable[[Params, Tensor], Tensor]:
    """Everything a module returns, in one row, as a function of weights and input."""

    def run(params: Params, x: Tensor) -> Tensor:
        y, final = functional_call(module, params, (x,), marks)
        parts = final if isinstance(final, tuple) else (final,)
        return torch.cat([y.flatten(), *(part.flatten() for part in parts)])

    return run


def loss(module: nn.Module, **marks: Any) -> Callable[[Params, Tensor], Tensor]:
    run = outputs(module, **marks)
    return lambda params, x: run(params, x).square().sum()


@pytest.mark.parametrize("solver", [None, "auto", "deer"])
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}, {"bias": False}])
@pytest.mark.parametrize("kind", ["GRU", "LSTM", "RNN"])
def test_gradients_and_tangents(kind: str, options: dict[str, Any], solver: Any) -> None:
    ours, theirs, params = pair(kind, solver, **options)
    x = draw(T, B, D)
    found, expected = (grad(loss(module), argnums=(0, 1))(params, x) for module in (ours, theirs))
    torch.testing.assert_close(found, expected)
    assert "torch's own layer" not in str(ours.reports[0])
    assert ours.reports[0].backward is not None
    directions = {name: draw(*value.shape, seed=1) for name, value in params.items()}, draw(T, B, D, seed=2)
    found, expected = (jvp(outputs(module), (params, x), directions) for module in (ours, theirs))
    torch.testing.assert_close(found, expected)
    (found, pull), (expected, other) = (vjp(outputs(module), params, x) for module in (ours, theirs))
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(pull(torch.ones_like(found)), other(torch.ones_like(found)))


def test_a_projected_lstm() -> None:
    ours, theirs, params = pair("LSTM", proj_size=2)
    x = draw(T, B, D)
    torch.testing.assert_close(grad(loss(ours))(params, x), grad(loss(theirs))(params, x))


@pytest.mark.parametrize("kind", ["GRU", "LSTM", "RNN"])
def test_gradients_of_gradients(kind: str) -> None:
    ours, theirs, params = pair(kind)
    x = draw(T, B, D)

    def steepness(module: nn.Module) -> Callable[[Tensor], Tensor]:
        return lambda x: grad(lambda x: loss(module)(params, x))(x).square().sum()

    torch.testing.assert_close(grad(steepness(ours))(x), grad(steepness(theirs))(x))


@pytest.mark.parametrize("kind", ["GRU", "LSTM", "RNN"])
def test_an_ensemble_of_models_and_gradients_by_sample(kind: str) -> None:
    models = [pair(kind)[0] for _ in range(3)]
    for number, model in enumerate(models):
        for parameter in model.parameters():
            parameter.data += 0.1 * number
    params, _ = stack_module_state(models)
    first, x = models[0], draw(T, B, D)
    many = vmap(outputs(first), in_dims=(0, None))(params, x)
    by_model = vmap(grad(loss(first)), in_dims=(0, None))(params, x)
    assert "one of 3 models, one after the other" in first.reports[0].reason
    for number, model in enumerate(models):
        own = {name: value.detach() for name, value in model.named_parameters()}
        torch.testing.assert_close(many[number], outputs(model)(own, x))
        expected = grad(loss(model))(own, x)
        torch.testing.assert_close({name: value[number] for name, value in by_model.items()}, expected)
    shared = {name: value.detach() for name, value in first.named_parameters()}
    samples = draw(4, T, B, D, seed=5)
    torch.testing.assert_close(
        vmap(outputs(first), in_dims=(None, 0))(shared, samples),
        torch.stack([outputs(first)(shared, sample) for sample in samples]),
    )
    by_sample = vmap(grad(loss(first)), in_dims=(None, 0))(shared, samples)
    for number, sample in enumerate(samples):
        expected = grad(loss(first))(shared, sample)
        torch.testing.assert_close({name: value[number] for name, value in by_sample.items()}, expected)


def test_inputs_alone_are_mapped_as_one_batch() -> None:
    ours, _, params = pair("GRU")
    seen = []
    whole = ours._solve_of

    def watched(*args: Any) -> Any:
        seen.append(args)
        return whole(*args)

    ours.__dict__["_solve_of"] = watched
    samples = draw(T, 6, B, D)
    y = vmap(outputs(ours), in_dims=(None, 1))(params, samples)
    assert len(seen) == 1
    assert "models" not in ours.reports[0].reason
    del ours.__dict__["_solve_of"]
    torch.testing.assert_close(y[3], outputs(ours)(params, samples[:, 3]))


@pytest.mark.parametrize("kind", ["GRU", "LSTM"])
def test_lengths_and_resets(kind: str) -> None:
    ours, _, params = pair(kind, bidirectional=True)
    marks = {"lengths": torch.tensor([T, 9]), "resets": draw(T, B) > 1.5}
    x = draw(T, B, D)
    leaf = x.clone().requires_grad_()
    total = loss(ours, **marks)(dict(ours.named_parameters()), leaf)
    expected = torch.autograd.grad(total, [leaf, *ours.parameters()])
    by_params, by_x = grad(loss(ours, **marks), argnums=(0, 1))(params, x)
    torch.testing.assert_close([by_x, *by_params.values()], list(expected))


def test_a_jacobian_row_by_row() -> None:
    ours, theirs, params = pair("RNN")
    x = draw(6, 1, D)
    found, expected = (jacrev(lambda x, m=module: m(x)[0])(x) for module in (ours, theirs))
    torch.testing.assert_close(found, expected)
    assert params


def test_forward_mode_without_torch_func() -> None:
    ours, theirs, _ = pair("LSTM")
    x, direction = draw(T, B, D), draw(T, B, D, seed=1)
    found = []
    for module in (ours, theirs.requires_grad_(False)):
        with forward_ad.dual_level():
            found.append(forward_ad.unpack_dual(module(forward_ad.make_dual(x, direction))[0]).tangent)
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("options", [{"recurrent_dropout": 0.3}, {"zoneout": 0.2}, {"weight_dropout": 0.4}])
def test_dropout_inside_the_recurrence(options: dict[str, Any]) -> None:
    module = tl.GRU(D, N, dtype=EXACT, solver=Shooting(chunk=5), **options)
    params, x = {name: value.detach() for name, value in module.named_parameters()}, draw(T, B, D)
    torch.manual_seed(3)
    found = grad(loss(module))(params, x)
    torch.manual_seed(3)
    total = loss(module)(dict(module.named_parameters()), x)
    torch.testing.assert_close(list(found.values()), list(torch.autograd.grad(total, list(module.parameters()))))


def test_a_long_sequence_is_solved_in_chunks() -> None:
    torch.manual_seed(0)
    module, x = tl.GRU(D, 8), torch.randn(3000, 1, D)
    exact = nn.GRU(D, 8).double()
    exact.load_state_dict(module.state_dict())
    params = {name: value.detach() for name, value in module.named_parameters()}
    found = grad(loss(module))(params, x)
    expected = grad(loss(exact))({name: value.double() for name, value in params.items()}, x.double())
    assert module.reports[0].chunk < 3000
    assert module.reports[0].backward.chunk < 3000
    for name, value in found.items():
        error = (value.double() - expected[name]).abs().max() / expected[name].abs().max()
        assert float(error) < 2e-5, name


@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}])
@pytest.mark.parametrize("kind", ["GRU", "LSTM", "RNN"])
def test_forward_over_reverse(kind: str, options: dict[str, Any]) -> None:
    """A Hessian, and products with one, by weights and by inputs."""
    ours, theirs, params = pair(kind, **options)
    x, along = draw(9, B, D), draw(9, B, D, seed=4)
    around = {name: torch.ones_like(value) for name, value in params.items()}
    for number, direction in enumerate((around, along)):

        def product(module: nn.Module, number: int = number, direction: Any = direction) -> Any:
            given = [params, x]

            def gradient(at: Any) -> Any:
                return grad(loss(module), argnums=number)(*given[:number], at, *given[number + 1 :])

            return jvp(gradient, (given[number],), (direction,))[1]

        torch.testing.assert_close(product(ours), product(theirs))
    short = draw(2, 1, D)
    found, expected = (hessian(loss(module), argnums=1)(params, short) for module in (ours, theirs))
    torch.testing.assert_close(found, expected)


def test_what_is_not_there_is_said() -> None:
    ours, _, params = pair("GRU")
    x = draw(T, B, D)
    with pytest.raises(RuntimeError, match="take hessian, jvp of grad or grad of grad"):
        jacfwd(jacfwd(lambda x: loss(ours)(params, x)))(x[:3])
    with pytest.raises(RuntimeError, match="twice, not three times"):
        grad(lambda x: grad(lambda x: grad(lambda x: loss(ours)(params, x))(x).sum())(x).sum())(x)
    with pytest.raises(NotImplementedError, match=r"no guess= inside torch\.func"):
        grad(lambda x: ours(x, guess=draw(T, B, N))[0].sum())(x)
