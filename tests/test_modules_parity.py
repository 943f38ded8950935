"""timeloom's GRU, LSTM and RNN beside torch's: same numbers, shapes and gradients, whatever the options and solver."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from module_zoo import (
    LAYERS,
    B,
    D,
    H,
    T,
    as_double,
    assert_as_good,
    assert_same,
    call,
    distance,
    each_layer,
    each_option,
    each_shooting,
    each_solver,
    each_way,
    hidden,
    inputs,
    loss_of,
    pair,
    parts_of,
    timeloom_layer,
    used_sweeps,
)
from torch import nn

import timeloom as tl
from timeloom.solvers import Shooting

pytestmark = pytest.mark.usefixtures("one_thread")


@each_solver
@each_option
@each_layer
def test_results_and_gradients(name: str, options: dict[str, Any], solver: Any) -> None:
    theirs, ours = pair(name, solver, **options)
    x, hx = inputs(theirs), hidden(theirs)
    assert_same(call(ours, x, hx), call(theirs, x, hx))
    assert used_sweeps(ours) == isinstance(solver, Shooting)


@each_solver
@each_layer
def test_without_an_initial_state(name: str, solver: Any) -> None:
    theirs, ours = pair(name, solver, num_layers=2)
    x = inputs(theirs)
    assert_same(call(ours, x), call(theirs, x))


@each_solver
@each_option
@each_layer
def test_float32_is_as_good_as_torch(name: str, options: dict[str, Any], solver: Any) -> None:
    theirs, ours = pair(name, solver, dtype=torch.float32, **options)
    x, hx = inputs(theirs, dtype=torch.float32), hidden(theirs, dtype=torch.float32)
    actual, torchs = call(ours, x, hx), call(theirs, x, hx)
    assert_as_good(actual, torchs, call(theirs.double(), x.double(), as_double(hx)))


@each_way
@each_option
@each_layer
def test_unbatched(name: str, options: dict[str, Any], solver: Any) -> None:
    theirs, ours = pair(name, solver, **options)
    x, hx = inputs(theirs, T, D), hidden(theirs, batch=None)
    assert_same(call(ours, x, hx), call(theirs, x, hx))
    assert_same(call(ours, x), call(theirs, x))


@pytest.mark.usefixtures("auto_takes_sweeps")
@pytest.mark.parametrize("steps", [T, 700])
@pytest.mark.parametrize(
    ("name", "threads"),
    [("gru", 1), ("gru", 2), ("lstm", 1), ("lstm-projected", 1), ("rnn-tanh", 1), ("rnn-relu", 1)],
)
def test_auto_with_sweeps(name: str, threads: int, steps: int) -> None:
    theirs, ours = pair(name, "auto", dtype=torch.float32, bidirectional=True)
    torch.set_num_threads(threads)
    x = inputs(theirs, steps, 2, D, dtype=torch.float32)
    torchs = call(theirs, x)
    truth = call(theirs.double(), x.double())
    for _ in range(2):  # the second call knows what the first one learned
        assert_as_good(call(ours, x), torchs, truth)
        assert used_sweeps(ours)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("size", [1, 2, 7, 8, 9, 16, 17, 33])
@pytest.mark.parametrize("name", [name for name in LAYERS if name != "lstm-projected"])
def test_widths_around_those_of_vector_registers(name: str, size: int, dtype: torch.dtype) -> None:
    kind, own = LAYERS[name]
    theirs = getattr(nn, kind)(1, size, **own, dtype=dtype)
    ours = getattr(tl, kind)(1, size, **own, dtype=dtype, solver=Shooting(chunk=5))
    ours.load_state_dict(theirs.state_dict())
    x, hx = inputs(theirs, T, 1, 1, dtype=dtype), hidden(theirs, batch=1, dtype=dtype)
    actual, torchs = call(ours, x, hx), call(theirs, x, hx)
    assert_as_good(actual, torchs, call(theirs.double(), x.double(), as_double(hx)))


@each_way
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@each_layer
def test_dropout_draws_the_same_numbers(name: str, dtype: torch.dtype, solver: Any) -> None:
    theirs, ours = pair(name, solver, dtype=dtype, num_layers=3, dropout=0.4, bidirectional=True)
    x, results = inputs(theirs, dtype=dtype), []
    for layer in (theirs, ours):
        torch.manual_seed(5)
        results.append(call(layer, x))
        results.append({"next number": torch.rand(1)})
    assert_same(results[2], results[0], 1e-12 if dtype == torch.float64 else 1e-5)
    assert results[3] == results[1]
    assert distance(call(theirs, x)["output"], results[0]["output"]) > 0.1  # it did drop something
    assert_same(call(ours.eval(), x), call(theirs.eval(), x), 1e-12 if dtype == torch.float64 else 1e-5)


@each_way
@each_layer
def test_dropout_of_everything(name: str, solver: Any) -> None:
    theirs, ours = pair(name, solver, num_layers=2, dropout=1.0)
    assert_same(call(ours, inputs(theirs)), call(theirs, inputs(theirs)))


@each_way
@pytest.mark.parametrize("lost", ["output", "final", "all but the last part", "output's end"])
@each_layer
def test_losses_on_part_of_the_results(name: str, lost: str, solver: Any) -> None:
    theirs, ours = pair(name, solver, num_layers=2, bidirectional=True)
    results = []
    for layer in (theirs, ours):
        x = inputs(theirs).requires_grad_()
        output, final = layer(x)
        kept = {
            "output": parts_of(final),
            "final": [output],
            "all but the last part": [parts_of(final)[-1]],
            "output's end": [output[: T // 2]],
        }[lost]
        grads = torch.autograd.grad(loss_of(kept), [x, *layer.parameters()], allow_unused=True)
        results.append(dict(enumerate(grads)))
    assert_same(results[1], results[0])


@each_way
@pytest.mark.parametrize("trained", ["x", "hx", "weight_ih", "weight_hh", "bias_ih", "bias_hh", "nothing"])
@each_layer
def test_frozen_parameters_and_inputs(name: str, trained: str, solver: Any) -> None:
    theirs, ours = pair(name, solver, num_layers=2)
    results = []
    for layer in (theirs, ours):
        x, hx = inputs(theirs).requires_grad_(trained == "x"), hidden(theirs)
        for part in parts_of(hx):
            part.requires_grad_(trained == "hx")
        for key, parameter in layer.named_parameters():
            parameter.requires_grad_(key.startswith(trained))
        output, final = layer(x, hx)
        if trained != "nothing":
            loss_of([output, *parts_of(final)]).backward()
        leaves = [x, *parts_of(hx), *layer.parameters()]
        needs = {"needs a gradient": torch.tensor([output.requires_grad, *(p.requires_grad for p in parts_of(final))])}
        results.append({**dict(enumerate(value.grad for value in leaves)), **needs})
    assert_same(results[1], results[0])


@each_way
@each_layer
def test_inputs_in_any_memory_layout(name: str, solver: Any) -> None:
    theirs, ours = pair(name, solver, num_layers=2, batch_first=True)
    spread = inputs(theirs, D, 2 * T, B).permute(2, 1, 0)[:, ::2]
    shared = tuple(part[:, :1].expand(-1, B, -1) for part in parts_of(hidden(theirs)))
    hx = shared if isinstance(theirs, nn.LSTM) else shared[0]
    assert not spread.is_contiguous()
    for x in (spread, inputs(theirs, B, 1, D).expand(B, T, D)):
        with torch.no_grad():
            expected, actual = flat(theirs(x, hx)), flat(ours(x, hx))
        assert_same(dict(enumerate(actual)), dict(enumerate(expected)))


@each_way
@each_option
@each_layer
def test_results_can_be_viewed_and_detached_as_torchs(name: str, options: dict[str, Any], solver: Any) -> None:
    theirs, ours = pair(name, solver, **options)
    for x in (inputs(theirs), inputs(theirs, T, D)):
        for expected, actual in zip(flat(theirs(x)), flat(ours(x)), strict=True):
            assert actual.is_contiguous() or not expected.is_contiguous()
            assert actual.is_leaf == expected.is_leaf
        for expected, actual in zip(parts_of(theirs(x)[1]), parts_of(ours(x)[1]), strict=True):
            if not expected._is_view():  # then torch lets truncated backpropagation through time do this
                actual.detach_()


@pytest.mark.parametrize("batch_first", [False, True])
@each_layer
def test_results_without_gradient_can_be_changed_in_place(name: str, batch_first: bool) -> None:
    theirs, ours = pair(name, Shooting(chunk=4), batch_first=batch_first)
    learned = torch.ones((), dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        results = flat(ours(inputs(theirs)))
    for result in results:
        result.add_(learned)
        result.sum().backward()
    assert learned.grad == sum(result.numel() for result in results)


@each_way
@each_layer
def test_state_carried_over_a_sequence_in_pieces(name: str, solver: Any) -> None:
    theirs, ours = pair(name, solver, num_layers=2)
    x = inputs(theirs, 30, B, D)
    whole, _ = theirs(x)
    state, pieces = None, []
    for piece in x.split([11, 1, 18]):
        output, state = ours(piece, state)
        pieces.append(output)
    assert_same({"output": torch.cat(pieces).detach()}, {"output": whole.detach()})


@each_shooting
def test_input_given_by_keyword(solver: Any) -> None:
    theirs, ours = pair("gru", solver)
    x, hx = inputs(theirs), hidden(theirs)
    assert torch.equal(ours(input=x, hx=hx)[0], ours(x, hx)[0])


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@each_way
@each_layer
def test_poisoned_input_gives_what_torch_gives(name: str, solver: Any, poison: float) -> None:
    theirs, ours = pair(name, solver)
    x = inputs(theirs)
    x[6, 1, 0] = poison
    for expected, actual in zip(flat(theirs(x)), flat(ours(x)), strict=True):
        torch.testing.assert_close(actual, expected, equal_nan=True, rtol=1e-12, atol=1e-12)


@each_way
@each_layer
def test_poisoned_weights_give_what_torch_gives(name: str, solver: Any) -> None:
    theirs, ours = pair(name, solver)
    for layer in (theirs, ours):
        with torch.no_grad():
            layer.weight_hh_l0[0, 0] = float("nan")
    for expected, actual in zip(flat(theirs(inputs(theirs))), flat(ours(inputs(theirs))), strict=True):
        torch.testing.assert_close(actual, expected, equal_nan=True, rtol=1e-12, atol=1e-12)


CONSTRUCTORS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("GRU", (D, H), {}),
    ("GRU", (D, H, 2, False, True, 0.25, True), {}),
    ("GRU", (), {"input_size": D, "hidden_size": H, "num_layers": 2, "dropout": 0.5}),
    ("LSTM", (D, H, 2, False, True, 0.25, True, 3), {}),
    ("LSTM", (), {"input_size": D, "hidden_size": H, "proj_size": 2, "dtype": torch.float64}),
    ("RNN", (D, H, 2, "relu", False, True, 0.25, True), {}),
    ("RNN", (D, H), {"nonlinearity": "tanh", "bias": False, "device": "cpu"}),
    ("GRU", (D, H), {"device": "meta"}),
]


@pytest.mark.parametrize(("kind", "args", "keywords"), CONSTRUCTORS)
def test_constructor(kind: str, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    theirs, ours = getattr(nn, kind)(*args, **keywords), getattr(tl, kind)(*args, **keywords)
    assert isinstance(ours, getattr(nn, kind))
    assert repr(ours) == repr(theirs)
    described = [
        [(key, value.shape, value.dtype, value.device) for key, value in m.named_parameters()] for m in (theirs, ours)
    ]
    assert described[0] == described[1]
    public = {key for key in vars(theirs) if not key.startswith("_")}
    assert {key: getattr(ours, key) for key in public} == {key: getattr(theirs, key) for key in public}


def test_attributes_users_read() -> None:
    ours = timeloom_layer("lstm", num_layers=2, bidirectional=True)
    assert [len(weights) for weights in ours.all_weights] == [4, 4, 4, 4]
    assert ours.mode == "LSTM"


def flat(result: tuple[Any, Any]) -> list[torch.Tensor]:
    output, final = result
    return [output, *parts_of(final)]
