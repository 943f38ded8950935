"""Warm starts: how chunks are entered from known states, what is kept, and what a model's layers make of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import timeloom as tl
from timeloom.app import cli
from timeloom.app.errors import InputError
from timeloom.app.train import checkpoint, trainer
from timeloom.app.train.config import TrainConfig
from timeloom.cells import GRUCell
from timeloom.kernels.reference import ReferenceSweeper
from timeloom.known import KnownStates
from timeloom.problem import Recurrence, cut, empty_states
from timeloom.solve.recurrence import BEGUN
from timeloom.solve.warm_starts import WarmBatch
from timeloom.solvers import DEER


def solved(steps: int, batch: int, lengths: Tensor | None = None) -> tuple[Recurrence, Tensor]:
    """A problem and all its states, `(T + 1, B, n)`, in float64."""
    torch.manual_seed(steps)
    cell = GRUCell(torch.randn(9, 3).double(), torch.randn(3).double())
    problem = Recurrence(cell, torch.randn(steps, batch, 9).double(), torch.randn(batch, 3).double(), lengths)
    states = empty_states(steps, problem.initial, cell.parts)
    ReferenceSweeper(problem).forward(cut(problem, steps), problem.initial, states)
    return problem, states[0]


def known(problem: Recurrence, states: Tensor, every: int) -> KnownStates:
    """What is known of them, kept among states of others."""
    rows = torch.arange(problem.batch).flip(0) + 1
    kept = torch.full((problem.batch + 2, problem.steps // every, 3), torch.nan).double()
    kept[rows] = states[every::every].transpose(0, 1)
    return KnownStates(kept, rows, every, problem.initial)


@pytest.mark.parametrize("every", [1, 4, 7])
@pytest.mark.parametrize("lead", [0, 1, 5, 100])
@pytest.mark.parametrize(("steps", "batch", "chunk"), [(40, 2, 8), (41, 1, 7), (13, 3, 12), (9, 1, 1)])
def test_chunks_are_entered_from_the_last_state_that_is_known(
    steps: int, batch: int, chunk: int, lead: int, every: int
) -> None:
    problem, states = solved(steps, batch)
    begin, sweeper = known(problem, states, every), ReferenceSweeper(problem)
    right = states[torch.arange(0, steps, chunk)].flatten(0, 1)
    entry = begin.entry(steps, chunk, lead)
    torch.testing.assert_close(entry.chunk_starts(sweeper, problem.initial), right)
    if entry.early is not None:
        early = entry.early.end - entry.early.begin
        assert int(early.min()) > 0
        assert int(early.max()) <= max(lead, 1) + every - 1
    starts, ends, _ = begin.enter(sweeper, cut(problem, chunk), lead, None, False)
    torch.testing.assert_close(starts, right)
    torch.testing.assert_close(ends[-batch:], states[-1])


def test_chunk_starts_are_known_states_or_the_last_ones_before() -> None:
    problem, states = solved(40, 2)
    torch.testing.assert_close(known(problem, states, 4).starts(8, 5), states[:40:8])
    between = known(problem, states, 8).starts(12, 4)
    torch.testing.assert_close(between, states[torch.tensor([0, 8, 24, 32])])
    torch.testing.assert_close(known(problem, states, 8).starts(5, 8)[:2], states[:1].expand(2, -1, -1))


def test_ragged_sequences_are_entered_too() -> None:
    lengths = torch.tensor([40, 17, 24])
    problem, states = solved(40, 3, lengths)
    segments = cut(problem, 8)
    starts, ends, _ = known(problem, states, 4).enter(ReferenceSweeper(problem), segments, 6, None, False)
    there = segments.end > segments.begin
    torch.testing.assert_close(starts[there], states[segments.begin, segments.sequence][there])
    torch.testing.assert_close(ends[there], states[segments.end, segments.sequence][there])


# ---- what is kept ---------------------------------------------------------------------------------------------------


def saved(store: tl.WarmStarts, keys: list[int], steps: int, chunk: int, width: int = 3) -> Tensor:
    states = torch.randn(steps + 1, len(keys), width)
    store.save((0,), list(keys), [states], [steps] * len(keys), chunk)
    return states


@pytest.mark.parametrize(("chunk", "every"), [(1, 1), (7, 1), (8, 2), (64, 16), (4096, 32)])
def test_a_few_states_are_kept_for_each_chunk(chunk: int, every: int) -> None:
    store = tl.WarmStarts()
    states = saved(store, [5, 6], 100, chunk)
    assert store.nbytes == 2 * (100 // every) * 3 * 4
    torch.testing.assert_close(store.load(6), states[every::every, 1])


def test_every_and_limit_bound_the_memory() -> None:
    store = tl.WarmStarts(every=10, limit=4 * 10 * 3 * 4)
    saved(store, [0, 1, 2], 100, 1)
    states = saved(store, [2, 3, 4], 100, 1)
    assert [key in store for key in range(5)] == [True, True, True, True, False]
    assert store.nbytes == store.limit
    torch.testing.assert_close(store.load(3), states[10::10, 1])
    torch.testing.assert_close(store.load(2), states[10::10, 0])
    saved(store, [7], 200, 1)
    assert store.nbytes <= store.limit
    assert store.load(7).shape == (20, 3)
    nothing = tl.WarmStarts(limit=0)
    saved(nothing, [1], 100, 1)
    assert (len(nothing), nothing.nbytes) == (0, 0)


def test_a_finer_store_stays_fine_and_a_coarser_one_begins_anew() -> None:
    store = tl.WarmStarts()
    saved(store, [0], 64, 8)
    saved(store, [1], 64, 64)
    assert store.load(0).shape == store.load(1).shape == (32, 3)
    saved(store, [2], 64, 1)
    assert 0 not in store
    assert store.load(2).shape == (64, 3)


def test_bad_options_are_named() -> None:
    with pytest.raises(ValueError, match=r"every must be a whole number of steps, 1 or more, or None; got 0"):
        tl.WarmStarts(every=0)
    with pytest.raises(ValueError, match=r"limit must be a number of bytes, 0 or more; got -1"):
        tl.WarmStarts(limit=-1)


# ---- models ---------------------------------------------------------------------------------------------------------


class Stack(nn.Module):
    """Two layers, the second one called twice, and another batch in between."""

    def __init__(self) -> None:
        super().__init__()
        self.first = tl.GRU(3, 5, bidirectional=True, batch_first=True, solver=DEER(tol=1e-6))
        self.second = tl.LSTM(10, 10, batch_first=True, proj_size=9, solver=DEER(tol=1e-6))
        self.third = tl.GRU(9, 10, batch_first=True, solver=DEER(tol=1e-6))
        self.counts: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)[0]
        self.counts = [report.iterations for report in self.first.reports]
        self.third(torch.randn(len(x) + 1, 30, 9))
        y = self.third(self.second(y)[0])[0]
        y = self.third(y[..., :9])[0]
        self.counts += [self.second.reports[0].iterations, self.third.reports[0].iterations]
        return y


def test_every_layer_of_a_model_begins_where_its_samples_were() -> None:
    torch.manual_seed(0)
    model, x, warm = Stack(), torch.randn(4, 50, 3), tl.WarmStarts()
    expected = model(x)
    cold = model.counts
    for index in ([0, 1, 2, 3], [3, 1], [2, 0]):
        with warm.batch(torch.tensor(index)):
            y = model(x[index])
        torch.testing.assert_close(y, expected[index], rtol=1e-4, atol=1e-5)
        y.sum().backward()
    assert all(few < many for few, many in zip(model.counts, cold, strict=True)), (model.counts, cold)
    assert model.counts[:2] == [1, 1]
    model(x)
    assert model.counts == cold


def test_a_batch_with_a_new_sample_begins_as_usual() -> None:
    torch.manual_seed(0)
    gru, x, warm = tl.GRU(3, 5, solver="deer"), torch.randn(50, 3, 3), tl.WarmStarts()
    said = []
    for index in ([0, 1], [0, 2], [2, 1]):
        with warm.batch(index):
            gru(x[:, index])
        said.append(BEGUN in gru.reports[0].reason)
    assert said == [False, False, True]


def test_samples_are_forgotten_behind_the_batch_whatever_happens() -> None:
    gru, warm = tl.GRU(3, 5, solver="deer"), tl.WarmStarts()
    with pytest.raises(RuntimeError), warm.batch([0]):
        gru(torch.randn(50, 1, 4))
    gru(torch.randn(50, 1, 3))
    assert len(warm) == 0


def test_what_was_kept_without_gradients_serves_with_them() -> None:
    torch.manual_seed(0)
    gru, x, warm = tl.GRU(3, 5, solver=tl.solvers.Shooting(chunk=10)), torch.randn(50, 2, 3), tl.WarmStarts()
    with torch.inference_mode(), warm.batch([0, 1]):
        gru(x)
    for _ in range(2):
        with warm.batch([1, 0]):
            y = gru(x[:, [1, 0]])[0]
        assert BEGUN in gru.reports[0].reason
        y.sum().backward()
    torch.testing.assert_close(y, nn.GRU.forward(gru, x[:, [1, 0]])[0], rtol=1e-4, atol=1e-6)


def test_a_learned_warmup_from_known_states_is_shorter() -> None:
    """Lengths keep these calls with the driver, which begins at known states on a CPU, too."""
    torch.manual_seed(0)
    gru, x, lengths = tl.GRU(2, 6), torch.randn(6000, 2, 2), torch.tensor([6000, 5990])
    with torch.no_grad():
        gru.bias_hh_l0[6:12] += 1.0
    warm, seen = tl.WarmStarts(always=True), {}
    for name in ("cold", "warm"):
        for _ in range(12):
            if name == "cold":
                gru(x, lengths=lengths)
            else:
                with warm.batch([0, 1]):
                    y, _ = gru(x, lengths=lengths)
            seen[name] = gru.reports[0]
    assert BEGUN in seen["warm"].reason
    assert seen["warm"].converged
    assert 0 < seen["warm"].warmup < 0.8 * seen["cold"].warmup
    truth = nn.GRU(2, 6).double()
    truth.load_state_dict(gru.state_dict())
    torch.testing.assert_close(y[:, 0], truth(x[:, :1].double())[0][:, 0].float(), rtol=1e-4, atol=1e-5)


def test_a_permuted_batch_stays_with_its_place() -> None:
    batch = WarmBatch(tl.WarmStarts(), ["a", "b"], (3, 1)).permuted(torch.tensor([1, 0]))
    assert (batch.keys, batch.place) == (["b", "a"], (3, 1))


# ---- timeloom train --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("devices", "more", "warm"), [(("cpu",), [], True), (("cpu",), ["--warm-starts", "0"], False),
                                                        (("cuda",), [], False)])  # fmt: skip
def test_a_training_begins_series_at_their_states_of_the_epoch_before(
    devices: tuple[str, ...], more: list[str], warm: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(trainer, "WARM_ON", devices)
    options = ["--data", "turning:length=64,train=8,valid=4,test=4", "--hidden", "4", "--epochs", "3", "--batch", "4"]
    options += ["--solver", "deer", "--compare", "0", "--out", str(tmp_path / "run"), "--debug", *more]
    assert cli.run("train", options) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    told = " ".join(capsys.readouterr().out.split())
    assert summary["warm_share"] == (pytest.approx(4 / 6) if warm else 0.0)
    assert summary["warm_bytes"] == (8 * 64 * 4 * 4 * summary_layers(tmp_path / "run") if warm else 0)
    assert ("of the steps began at their series' states of the epoch before" in told) == warm
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    sweeps = [row["sweeps"] for row in rows if row["kind"] == "step"]
    if warm:
        assert max(sweeps[2:]) < sweeps[0]


def summary_layers(folder: Path) -> int:
    """Layers and directions of the model that was trained."""
    weights = checkpoint.load(folder / checkpoint.LAST).weights
    return sum("weight_hh" in name for name in weights)


def test_a_negative_bound_is_refused() -> None:
    with pytest.raises(InputError, match="--warm-starts must be at least 0, got -1"):
        TrainConfig(warm_starts=-1)
