"""The zoo of trained networks and the whole training runs, in small form, on the CPU."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

import timeloom as tl
from benchmarks.gpu import table, whole_runs
from benchmarks.gpu.layouts import RUN_COLUMNS
from benchmarks.gpu.run_pictures import draw
from benchmarks.gpu.whole_runs import Curve, Run, blocks, compared
from benchmarks.zoo import __main__ as program
from benchmarks.zoo import networks, public, recordings
from benchmarks.zoo.layers import OWN_CELLS, outputs, own_layer, torch_layer
from benchmarks.zoo.measure import Subject, error, measured
from benchmarks.zoo.networks import ZOO, Model, Network, trained
from benchmarks.zoo.tasks import DELAY, SHOWN, SYMBOLS, TASKS, Batch, _faded

CPU = torch.device("cpu")
SMALL = Network("policy", "GRU", 6, 3, 64, 3, sizes=((80, 2),))
DRAWN = [name for name, task in TASKS.items() if not task.needs()]


# ---- tasks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DRAWN)
def test_a_task_draws_what_it_says_and_the_same_again(name: str) -> None:
    task = TASKS[name]
    one, other = (task.draw(300, 2, torch.Generator().manual_seed(3)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one[:2], other[:2], strict=True))
    assert one.x.shape[:2] == (300, 2)
    assert task.answers == "bytes" or one.x.shape[2] == task.inputs
    if task.answers == "numbers":
        assert one.answers.shape == (300, 2, task.outputs)
    else:
        assert one.answers.shape == (300, 2)
        assert 0 <= int(one.answers.min()) <= int(one.answers.max()) < task.outputs


def test_copies_are_asked_for_after_the_delay() -> None:
    batch = TASKS["copy"].draw(2 * SHOWN + DELAY, 2, torch.Generator().manual_seed(0))
    assert torch.equal(batch.x[:SHOWN, :, :SYMBOLS].argmax(-1), batch.answers[SHOWN + DELAY :])
    assert bool((batch.answers[: SHOWN + DELAY] == SYMBOLS).all())
    assert batch.x[SHOWN + DELAY, 0, SYMBOLS] == 1


def test_the_sign_at_a_corridors_entrance_says_where_to_turn() -> None:
    x, answers, resets = TASKS["policy"].draw(2000, 2, torch.Generator().manual_seed(0))
    assert resets is not None
    sign = 0.0
    for step in range(2000):
        sign = float(x[step, 1, 0]) if resets[step, 1] else sign
        assert int(answers[step, 1]) == (0 if x[step, 1, 1] == 0 else 1 if sign < 0 else 2)
    assert int((answers > 0).sum()) > 10


def test_the_amplifiers_filter_is_the_recurrence() -> None:
    x, y, found = torch.randn(500, 2, 1).double(), torch.zeros(2, 1).double(), []
    for step in x:
        y = 0.9 * y + step
        found.append(y)
    torch.testing.assert_close(_faded(x, 0.9), torch.stack(found))


def test_real_series_are_left_out_where_they_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recordings, "find_spec", lambda name: None)
    assert "aeon" in TASKS["motions"].needs()
    with pytest.raises(FileNotFoundError, match="aeon"):
        recordings._all.__wrapped__()


# ---- layers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", ["GRU", "LSTM", "RNN"])
def test_packed_episodes_are_resets(layer: str) -> None:
    torch.manual_seed(0)
    theirs, ours = torch_layer(layer, 3, 5), own_layer(layer, 3, 5)
    ours.load_state_dict(theirs.state_dict())
    x, resets = torch.randn(50, 4, 3), torch.rand(50, 4) < 0.1
    torch.testing.assert_close(outputs(theirs, x, resets), outputs(ours, x, resets), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(outputs(theirs, x, resets)[:, 2], _by_hand(theirs, x[:, 2], resets[:, 2]))


def _by_hand(layer: nn.Module, x: torch.Tensor, resets: torch.Tensor) -> torch.Tensor:
    state, found = None, []
    for step, again in zip(x, resets, strict=True):
        y, state = layer(step.view(1, 1, -1), None if again else state)
        found.append(y[0, 0])
    return torch.stack(found)


@pytest.mark.parametrize("layer", OWN_CELLS)
def test_own_cells_run_as_their_loop(layer: str) -> None:
    torch.manual_seed(0)
    loop, own = torch_layer(layer, 3, 5), own_layer(layer, 3, 5)
    own.load_state_dict(loop.state_dict())
    x = torch.randn(40, 2, 3)
    torch.testing.assert_close(outputs(own, x), outputs(loop, x), rtol=1e-4, atol=1e-5)


# ---- measuring ------------------------------------------------------------------------------------------------------


def test_training_lowers_the_loss_and_comes_out_the_same() -> None:
    network = Network("flip-flop", "GRU", 8, 2, 100, 4, rate=1e-2)
    (_, early), (model, late), (again, same) = (trained(network, CPU, updates=count) for count in (1, 40, 40))
    assert late < 0.9 * early
    assert late == same
    assert torch.equal(model.head.weight, again.head.weight)


def test_a_row_has_times_errors_and_sweeps() -> None:
    model, _ = trained(SMALL, CPU)
    subject = Subject.of(SMALL, model, 80, 2, CPU)
    row = measured(subject)
    assert all(row[f"{name} ms"] > 0 for name in ("torch", "one chunk", "auto"))
    assert max(row[f"{name} error"] for name in ("torch", "one chunk", "auto")) < 1e-4
    assert {"none", "diag", "newton"} <= set(row["sweeps"])
    assert row["memory"] is None or row["memory"] > 0
    assert error([torch.ones(2)], [torch.ones(2, dtype=torch.float64) * 2]) == 0.5


def test_the_program_writes_what_it_measured_and_names_what_it_did_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(program, "ZOO", (SMALL, replace(SMALL, task="motions")))
    monkeypatch.setattr(program, "weights_file", lambda given: None)
    monkeypatch.setattr(recordings, "find_spec", lambda name: None)
    assert program.main(["--device", "cpu", "--out", str(tmp_path)]) == 0
    content = json.loads((tmp_path / "trained-cpu.json").read_text())
    assert [row["network"] for row in content["rows"]] == ["policy GRU 6"]
    assert set(content["left_out"]) == {"motions GRU 6", program.SPEECH}
    page = (tmp_path / "trained-cpu.md").read_text()
    assert "| policy GRU 6 | " in page
    assert "| 80 | 2 |" in page
    assert "Not measured: motions GRU 6" in page
    assert "left out" in capsys.readouterr().out
    assert program.main(["--device", "cpu", "--out", str(tmp_path), "--only", "nothing"]) == 0


def test_without_torch_one_chunk_stands_beside_auto(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "ZOO", (SMALL,))
    monkeypatch.setattr(program, "weights_file", lambda given: None)
    kept = tmp_path / "kept.pt"
    options = ["--device", "cpu", "--out", str(tmp_path), "--own", "--brief"]
    assert program.main([*options, "--store", str(kept)]) == 0
    (row,) = json.loads((tmp_path / "trained-cpu.json").read_text())["rows"]
    assert "torch ms" not in row
    assert row["one chunk ms"] > 0 < row["auto ms"]
    page = (tmp_path / "trained-cpu.md").read_text()
    assert "Over one chunk of our own: median" in page
    assert "Over torch" not in page
    monkeypatch.setattr(networks, "trained", None)
    assert program.main([*options, "--trained", str(kept)]) == 0, "what was stored is not trained again"


@pytest.mark.parametrize("name", sorted(networks.stored_weights()))
def test_stored_weights_have_learned_their_task(name: str) -> None:
    network = next(network for network in ZOO if network.name == name)
    if TASKS[network.task].needs():
        pytest.skip(TASKS[network.task].needs())
    network = replace(network, steps=256, batch=4)
    model = networks.model_of(network, networks.stored_weights(), CPU)
    torch.manual_seed(0)
    assert networks.unseen_loss(network, model, CPU) < 0.8 * networks.unseen_loss(network, Model(network), CPU)


def test_the_zoo_is_as_wide_as_it_says() -> None:
    assert {network.task for network in ZOO} == set(TASKS)
    assert {"GRU", "LSTM", "RNN"} < {network.layer for network in ZOO}
    assert len({network.name for network in ZOO}) == len(ZOO)
    assert min(steps for network in ZOO for steps, _ in network.sizes) >= 8192


def test_public_weights_are_looked_for_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError, match=r"silero_vad\.jit"):
        public.weights_file(tmp_path / "none.jit")
    monkeypatch.setattr(public, "find_spec", lambda name: None)
    assert public.weights_file(None) is None
    x = public.talk(5, 2, lambda pieces: pieces[:, : public.UNITS], torch.Generator().manual_seed(0))
    assert x.shape == (5, 2, public.UNITS)


# ---- whole runs -----------------------------------------------------------------------------------------------------


def test_a_whole_run_by_both_sides_has_the_same_losses(tmp_path: Path) -> None:
    run = Run(Network("flip-flop", "GRU", 8, 7, 90, 2, rate=1e-2), 2)
    row = whole_runs.measure(run, "cpu", 60.0)
    assert row["updates"] == 7
    assert row["early_difference"] < 1e-4
    assert row["timeloom_loss"] == pytest.approx(row["torch_loss"], rel=1e-4)
    assert row["timeloom"]["updates"] == row["timeloom"]["told"] == list(range(1, 8))
    assert all(before < after for before, after in pairwise(row["timeloom"]["seconds"]))
    assert run.name in table.line(RUN_COLUMNS, row)
    facts = {"device": "a machine", "torch": "2", "rows": [row, {"name": "x", "case": "x", "error": "none"}]}
    (tmp_path / "gpu-runs.json").write_text(json.dumps(facts))
    drawn = draw(tmp_path)
    assert [path.name for path in drawn] == ["gpu-runs-flip-flop-gru-8-t90-b2.png"]
    assert drawn[0].stat().st_size > 10_000
    assert draw(tmp_path / "nothing") == []


def test_blocks_carry_the_state_and_hold_all_steps() -> None:
    torch.manual_seed(0)
    network = Network("flip-flop", "LSTM", 5, 1, 100, 2)
    model = Model(network, torch_layer("LSTM", 3, 5))
    batch = TASKS["flip-flop"].draw(100, 2, torch.Generator().manual_seed(0))
    assert [len(x) for x, _ in blocks(batch, 30)] == [25] * 4
    whole = whole_runs.backward(model, batch, None)
    assert whole_runs.backward(model, batch, 30) == pytest.approx(float(whole), rel=1e-5)
    assert whole_runs.backward(model, Batch(*batch[:2], torch.zeros(100, 2, dtype=torch.bool)), 30) > 0


def test_sides_are_compared_over_the_updates_that_both_made() -> None:
    theirs = Curve(seconds=[2.0, 4.0, 6.0], losses=[1.0, 0.5, 0.4])
    ours = Curve(seconds=[1.5, 2.0, 2.5, 3.0], losses=[1.0, 0.5, 0.3, 0.1])
    row = compared(theirs, ours, 1)
    assert (row["updates"], row["ratio"], row["target"]) == (3, 6.0 / 2.5, 0.4)
    assert row["same_loss_ratio"] == 6.0 / 2.5
    assert row["early_difference"] == pytest.approx(0.25)
    assert row["late_ratio"] == pytest.approx(4.0)
    assert row["torch_late_gain"] == pytest.approx(1 - 0.4 / 0.5)
    assert row["timeloom_late_gain"] == pytest.approx(1 - 0.3 / 0.5)


def test_a_side_without_time_stops_early() -> None:
    run = Run(Network("flip-flop", "GRU", 8, 50, 60, 2), 2)
    model = Model(run.network, tl.GRU(3, 8))
    pool = [TASKS["flip-flop"].draw(60, 2, torch.Generator().manual_seed(0))]
    assert len(whole_runs.train(model, run, pool, 0.0).losses) == 1
