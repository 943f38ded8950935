"""The application's network: the same answers and gradients with timeloom's layers and with torch's."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from timeloom.app.data.splits import PADDING, Examples
from timeloom.app.errors import InputError
from timeloom.app.train.config import ModelConfig, OptimConfig, TrainConfig, preset
from timeloom.app.train.model import SequenceModel, solver_of
from timeloom.app.train.objective import Score, loss_of
from timeloom.app.train.setup import learning_rate
from timeloom.nn import sequentialize
from timeloom.solvers import Auto, Shooting

STACKS = {
    "plain": ModelConfig(hidden=5),
    "lstm, last": ModelConfig("lstm", hidden=5, pooling="last"),
    "rnn, both ways": ModelConfig("rnn", hidden=4, layers=2, bidirectional=True),
    "everything": ModelConfig("gru", hidden=6, layers=2, bidirectional=True, residual=True, norm=True, mlp=True),
    "eigenworms": replace(preset("eigenworms").model, hidden=8),
}


def make(config: ModelConfig, task: str = "classification") -> SequenceModel:
    torch.manual_seed(0)
    return SequenceModel(config, 3, 4, task, Shooting(chunk=7)).double()  # type: ignore[arg-type]


def answers_and_gradients(model: SequenceModel, x: Tensor, lengths: Tensor | None) -> list[Tensor]:
    x = x.clone().requires_grad_()
    answers = model(x, lengths)
    answers.square().sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    assert x.grad is not None
    assert all(gradient is not None for gradient in gradients)
    return [answers.detach(), x.grad, *[gradient for gradient in gradients if gradient is not None]]


@pytest.mark.parametrize("name", STACKS)
@pytest.mark.parametrize("task", ["classification", "labelling", "regression"])
@pytest.mark.parametrize("lengths", [None, torch.tensor([29, 3, 17])], ids=["even", "ragged"])
def test_a_model_is_the_same_with_torchs_layers(name: str, task: str, lengths: Tensor | None) -> None:
    ours = make(STACKS[name], task)
    theirs = sequentialize(deepcopy(ours))
    assert not theirs.recurrent_layers()
    x = torch.randn(29, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    if lengths is not None:
        x = x * (torch.arange(29).unsqueeze(1) < lengths).unsqueeze(-1)
    for a, b in zip(answers_and_gradients(ours, x, lengths), answers_and_gradients(theirs, x, lengths), strict=True):
        if task == "labelling" and lengths is not None and a.shape[:2] == (29, 3) and a.shape[2] == 4:
            continue  # answers at padding mean nothing; the gradients that follow cover the rest
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_padding_changes_nothing(pooling: str) -> None:
    model = make(ModelConfig(hidden=5, layers=2, bidirectional=True, pooling=pooling))  # type: ignore[arg-type]
    x = torch.randn(20, 2, 3, dtype=torch.float64)
    together = model(x, torch.tensor([20, 8]))
    torch.testing.assert_close(together[1:], model(x[:8, 1:]), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(together[:1], model(x[:, :1]), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("unit", [1e-20, 1e-9, 1.0, 1e30])
def test_small_and_large_units_are_scaled_alike(unit: float) -> None:
    torch.manual_seed(0)
    series = [unit * torch.randn(50, 2) for _ in range(4)]
    series = [torch.stack([values[:, 0], torch.full((50,), 7 * unit)], dim=1) for values in series]
    model = SequenceModel(ModelConfig(hidden=4), 2, 2, "classification", Auto())
    model.fit_scale(Examples(list("abcd"), series, [torch.tensor(0)] * 4))
    scaled = (torch.cat(series) - model.offset) * model.scale
    torch.testing.assert_close(scaled.std(0, correction=0)[0], torch.tensor(1.0), atol=1e-5, rtol=0)
    assert scaled[:, 1].abs().max() < 1e-5 + 1e-6 * unit


def test_the_scale_of_the_data_travels_with_the_weights() -> None:
    series = [torch.randn(10, 3) * torch.tensor([1.0, 10.0, 0.0]) + 5 for _ in range(4)]
    data = Examples(["a"] * 4, series, [torch.tensor(float(i)) for i in range(4)])
    model = SequenceModel(ModelConfig(hidden=4), 3, 1, "regression", Auto())
    model.fit_scale(data)
    scaled = (torch.cat(series) - model.offset) * model.scale
    torch.testing.assert_close(scaled.mean(0), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(scaled.std(0, correction=0)[:2], torch.ones(2), atol=1e-5, rtol=0)
    assert model.answer_offset == 1.5
    other = SequenceModel(ModelConfig(hidden=4), 3, 1, "regression", Auto())
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(series[0].unsqueeze(1)), model(series[0].unsqueeze(1)))


def test_solvers_by_name_and_options() -> None:
    assert solver_of("auto") == Auto()
    assert solver_of("shooting:chunk=8,on_divergence=raise") == Shooting(chunk=8, on_divergence="raise")
    with pytest.raises(InputError, match="solver must be one of 'auto'"):
        solver_of("magic")
    with pytest.raises(InputError, match="auto has no option 'chunk'"):
        solver_of("auto:chunk=3")


def test_configurations_survive_being_saved_and_refuse_nonsense() -> None:
    config = preset("eigenworms")
    assert TrainConfig.from_dict(config.to_dict()) == config
    assert (config.model.layers, config.model.hidden, config.optim.lr) == (5, 32, 3e-5)
    with pytest.raises(InputError, match="another version"):
        TrainConfig.from_dict({**config.to_dict(), "wings": 2})
    with pytest.raises(InputError, match="no preset 'mine'"):
        preset("mine")
    with pytest.raises(InputError, match="--hidden must be at least 1, got 0"):
        ModelConfig(hidden=0)
    with pytest.raises(InputError, match="--lr must be positive"):
        OptimConfig(lr=-1.0)
    with pytest.raises(InputError, match="--valid-fraction must be between 0 and 1"):
        TrainConfig(valid_fraction=1.0)


def test_the_learning_rate_rises_and_falls() -> None:
    linear = OptimConfig(lr=1.0, schedule="linear", warmup=3)
    assert [learning_rate(linear, step, 13) for step in (0, 1, 2, 3, 8)] == [0.25, 0.5, 0.75, 1.0, 0.5]
    cosine = OptimConfig(lr=1.0, schedule="cosine")
    assert learning_rate(cosine, 0, 10) == 1.0
    assert learning_rate(cosine, 5, 10) == pytest.approx(0.5)
    assert learning_rate(cosine, 10, 10) == pytest.approx(0.0)
    assert learning_rate(OptimConfig(lr=0.3, schedule="constant"), 9, 10) == 0.3


def test_scores_count_classes_steps_and_variance() -> None:
    score = Score("classification", 2)
    score.add(torch.tensor([[2.0, 0.0], [0.0, 2.0]]), torch.tensor([0, 0]))
    score.add(torch.tensor([[0.0, 2.0]]), torch.tensor([1]))
    assert score.confusion.tolist() == [[1, 1], [0, 1]]
    assert score.quality == pytest.approx(2 / 3)
    whole = loss_of(torch.tensor([[2.0, 0.0], [0.0, 2.0], [0.0, 2.0]]), torch.tensor([0, 0, 1]), "classification")
    assert score.loss == pytest.approx(whole.item())

    steps = Score("labelling", 2)
    steps.add(torch.tensor([[[1.0, 0.0]], [[1.0, 0.0]], [[1.0, 0.0]]]), torch.tensor([[0], [1], [PADDING]]))
    assert steps.count == 2
    assert steps.quality == 0.5

    numbers = Score("regression", 0)
    numbers.add(torch.tensor([[1.0], [2.0]]), torch.tensor([1.0, 3.0]))
    assert numbers.loss == pytest.approx(0.5)
    assert numbers.quality == pytest.approx(0.5)
