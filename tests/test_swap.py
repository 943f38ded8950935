"""`parallelize` and `sequentialize`: whole models, in place, and nothing of them lost."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from module_zoo import LAYERS, B, D, H, T, assert_same, call, distance, each_layer, inputs, torch_layer, used_sweeps
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import timeloom as tl
from timeloom.solvers import Auto, Shooting

pytestmark = pytest.mark.usefixtures("one_thread")
CHUNKS = Shooting(chunk=4)


class Model(nn.Module):
    """All kinds of recurrent layers, nested, one of them used twice, two of them with a weight in common."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(D, D), nn.GRU(D, H, batch_first=True), Take())
        self.layers = nn.ModuleDict({"lstm": nn.LSTM(H, H, proj_size=2), "rnn": nn.RNN(2, H, nonlinearity="relu")})
        self.twice = nn.GRU(H, H, num_layers=2, bidirectional=True)
        self.same = self.twice
        self.reduce = nn.Linear(2 * H, H)
        self.tied = nn.GRU(H, H)
        self.tied.weight_hh_l0 = self.encode[1].weight_hh_l0
        self.seen: list[Any] = [self.tied]

    def forward(self, x: Tensor) -> Tensor:
        y = self.encode(x)
        y, _ = self.layers["lstm"](y)
        y, _ = self.layers["rnn"](y)
        y = self.reduce(self.twice(y)[0])
        y = self.reduce(self.same(y)[0])
        output: Tensor = self.seen[0](y)[0]
        return output


class Take(nn.Module):
    def forward(self, result: tuple[Tensor, Tensor]) -> Tensor:
        return result[0]


def model() -> Model:
    torch.manual_seed(0)
    return Model().double()


def recurrent(model: nn.Module) -> list[nn.RNNBase]:
    return [module for module in model.modules() if isinstance(module, nn.RNNBase)]


def results(model: nn.Module, seed: int = 0) -> dict[str, Tensor]:
    x = torch.randn(T, B, D, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    model.zero_grad()
    output = model(x)
    output.square().sum().backward()
    grads = {key: value.grad.clone() for key, value in model.named_parameters() if value.grad is not None}
    return {"output": output.detach(), "x": x.grad, **grads}


@pytest.mark.parametrize("solver", ["auto", "sequential", "shooting", CHUNKS, Auto(tol=1e-14)])
def test_there_and_back(solver: Any) -> None:
    plain = model()
    expected = results(plain)
    modules, parameters = dict(plain.named_modules()), dict(plain.named_parameters())
    types = {name: type(module) for name, module in modules.items()}

    assert tl.parallelize(plain, solver=solver) is plain
    assert [type(module) for module in recurrent(plain)] == [tl.GRU, tl.LSTM, tl.RNN, tl.GRU, tl.GRU]
    assert all(module.solver == solver for module in recurrent(plain))
    assert_same(results(plain), expected)

    assert tl.sequentialize(plain) is plain
    assert {name: type(module) for name, module in plain.named_modules()} == types
    assert_same(results(plain), expected)
    for before, after in ((modules, dict(plain.named_modules())), (parameters, dict(plain.named_parameters()))):
        assert before.keys() == after.keys()
        assert all(before[key] is after[key] for key in before)
    assert [vars(module).keys() for module in recurrent(plain)] == [vars(m).keys() for m in recurrent(model())]


@each_layer
def test_a_model_that_is_a_layer(name: str) -> None:
    layer = torch_layer(name, num_layers=2, bidirectional=True)
    expected = call(layer, inputs(layer))
    assert tl.parallelize(layer, CHUNKS) is layer
    assert type(layer) is getattr(tl, LAYERS[name][0])
    assert_same(call(layer, inputs(layer)), expected)
    assert used_sweeps(layer)
    assert type(tl.sequentialize(layer)) is getattr(nn, LAYERS[name][0])
    assert_same(call(layer, inputs(layer)), expected)


def test_state_dicts_and_reprs_stay_the_same() -> None:
    plain, swapped = model(), tl.parallelize(model())
    assert repr(swapped) == repr(plain)
    assert list(swapped.state_dict()) == list(plain.state_dict())
    with torch.no_grad():
        for parameter in swapped.parameters():
            parameter.add_(0.01)
    plain.load_state_dict(swapped.state_dict(), strict=True)
    assert_same(results(swapped), results(plain))


def test_twice_changes_nothing_but_the_solver() -> None:
    swapped = tl.parallelize(tl.parallelize(model()), CHUNKS)
    assert {type(module) for module in recurrent(swapped)} == {tl.GRU, tl.LSTM, tl.RNN}
    assert all(module.solver == CHUNKS for module in recurrent(swapped))
    assert repr(tl.sequentialize(tl.sequentialize(swapped))) == repr(model())


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_an_optimiser_goes_on(kind: Any) -> None:
    trajectories = []
    for swap in (False, True):
        trained = model()
        optimizer = kind(trained.parameters(), lr=0.01)
        trajectories.append([])
        for step in range(9):
            if swap and step == 3:
                tl.parallelize(trained, CHUNKS)
            if swap and step == 6:
                tl.sequentialize(trained)
            trajectories[-1].append(float(results(trained, step)["output"].square().sum()))
            optimizer.step()
    assert trajectories[1] == pytest.approx(trajectories[0], rel=1e-9)
    assert len(set(trajectories[0])) == 9


def test_hooks_survive() -> None:
    plain, log = model(), []
    layer = plain.twice
    layer.register_forward_pre_hook(lambda module, args: log.append("before"))
    layer.register_forward_hook(lambda module, args, result: log.append("after"))
    layer.register_full_backward_hook(lambda module, into, out: log.append("backward"))
    layer.register_state_dict_pre_hook(lambda module, prefix, keep: log.append("saved"))
    layer.weight_hh_l0.register_hook(lambda grad: log.append("weight"))
    counts = []
    for swap in (lambda m: m, tl.parallelize, tl.sequentialize):
        swap(plain)
        log.clear()
        results(plain)
        plain.state_dict()
        counts.append({entry: log.count(entry) for entry in sorted(set(log))})
    assert counts[0] == counts[1] == counts[2]
    assert counts[0].keys() == {"before", "after", "backward", "saved", "weight"}


@pytest.mark.parametrize("training", [False, True])
def test_modes_frozen_parameters_and_attributes_survive(training: bool) -> None:
    layer = nn.GRU(D, H, num_layers=2, dropout=0.5).train(training)
    layer.weight_ih_l0.requires_grad_(False)
    layer.note = "mine"
    tl.parallelize(layer)
    assert (layer.training, layer.weight_ih_l0.requires_grad, layer.note) == (training, False, "mine")


def test_copies_of_a_swapped_model() -> None:
    swapped = tl.parallelize(model(), CHUNKS)
    expected = results(swapped)
    for twin in (copy.deepcopy(swapped), pickle.loads(pickle.dumps(swapped))):
        assert twin.same is twin.twice
        assert twin.tied.weight_hh_l0 is twin.encode[1].weight_hh_l0
        assert_same(results(twin), expected)
        assert_same(results(tl.sequentialize(twin)), expected)
    assert type(swapped.twice) is tl.GRU


def test_dtype_changes_afterwards() -> None:
    plain, swapped = model().float(), tl.parallelize(model(), CHUNKS).float()
    x = torch.randn(T, B, D)
    with torch.no_grad():
        assert distance(swapped(x), plain(x)) < 1e-5
        assert distance(tl.sequentialize(swapped)(x), plain(x)) < 1e-5


PARAMETRIZATIONS = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
}


@pytest.mark.parametrize("apply", PARAMETRIZATIONS.values(), ids=PARAMETRIZATIONS.keys())
def test_parametrized_layers(apply: Any) -> None:
    layer = apply(torch_layer("gru"), "weight_hh_l0").eval()
    x = inputs(layer)
    expected, name = call(layer, x), type(layer).__name__
    parameters = dict(layer.named_parameters())
    assert isinstance(tl.parallelize(layer, CHUNKS), tl.GRU)
    assert parametrize.is_parametrized(layer)
    assert type(layer).__name__ == name
    assert_same(call(layer, x), expected)
    assert used_sweeps(layer)
    tl.sequentialize(layer)
    assert not isinstance(layer, tl.GRU)
    assert_same(call(layer, x), expected)
    assert all(value is parameters[key] for key, value in layer.named_parameters())
    tl.parallelize(layer, CHUNKS)
    parametrize.remove_parametrizations(layer, "weight_hh_l0")
    assert type(layer) is tl.GRU
    assert distance(call(layer, x)["output"], expected["output"]) < 1e-12


def test_one_parametrized_layer_leaves_its_class_to_the_others() -> None:
    first, second = (parametrizations.weight_norm(torch_layer("gru"), "weight_hh_l0") for _ in range(2))
    tl.parallelize(first)
    assert isinstance(first, tl.GRU)
    assert not isinstance(second, tl.GRU)


def test_a_layer_with_a_replaced_forward_is_left_alone() -> None:
    layer = torch_layer("gru")
    original = layer.forward
    layer.forward = lambda *args: (original(*args)[0] + 1, None)
    with pytest.warns(UserWarning, match=r"left 'the model' \(GRU\) alone"):
        tl.parallelize(layer)
    assert type(layer) is nn.GRU


class Mine(tl.GRU):
    """A subclass of timeloom's."""


def test_a_subclass_of_timelooms_takes_the_solver_and_is_not_undone() -> None:
    layer = Mine(D, H)
    tl.parallelize(layer, CHUNKS)
    assert layer.solver == CHUNKS
    with pytest.warns(UserWarning, match=r"left 'the model' \(Mine\) alone"):
        tl.sequentialize(layer)
    assert type(layer) is Mine
    layer(torch.zeros(T, B, D))


def test_cells_and_other_modules_are_nobodys_business() -> None:
    others = [nn.GRUCell(D, H), nn.LSTMCell(D, H), nn.Linear(D, H), nn.TransformerEncoderLayer(4, 2)]
    mixed = nn.ModuleList([*others, nn.GRU(D, H)])
    types = [type(module) for module in mixed.modules()]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tl.sequentialize(tl.parallelize(mixed))
    assert [type(module) for module in mixed.modules()] == types


def test_a_model_without_a_recurrent_layer_is_told() -> None:
    cells = nn.ModuleList([nn.GRUCell(D, H), nn.Linear(D, H)])
    with pytest.warns(UserWarning, match=r"found no nn\.GRU, nn\.LSTM or nn\.RNN in ModuleList: nothing is changed"):
        assert tl.parallelize(cells) is cells
    assert [type(module) for module in cells] == [nn.GRUCell, nn.Linear]


def test_a_wrong_solver_swaps_nothing() -> None:
    plain = model()
    with pytest.raises(ValueError, match="solver must be one of"):
        tl.parallelize(plain, solver="nonsense")
    assert {type(module) for module in recurrent(plain)} == {nn.GRU, nn.LSTM, nn.RNN}


@pytest.mark.parametrize("swap", [tl.parallelize, tl.sequentialize])
def test_something_that_is_no_model(swap: Any) -> None:
    with pytest.raises(TypeError, match=r"expected an nn.Module, got list"):
        swap([nn.GRU(D, H)])


def test_layers_born_as_timelooms_become_torchs() -> None:
    ours = tl.LSTM(D, H, num_layers=2, dtype=torch.float64, solver=CHUNKS)
    x = inputs(ours)
    expected = call(ours, x)
    back = tl.sequentialize(nn.Sequential(ours))[0]
    assert type(back) is nn.LSTM
    assert_same(call(back, x), expected)
    assert not any(hasattr(back, key) for key in ("reports", "solver"))
    assert "timeloom" not in pickle.dumps(back).decode("latin1")
