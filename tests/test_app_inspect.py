"""`timeloom inspect` and `timeloom doctor`: what they say is what the solvers did."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import timeloom as tl
import timeloom.inspection.trials
from timeloom.app import cli
from timeloom.app.cli import doctor
from timeloom.app.cli.inspect import residual_charts
from timeloom.app.train.config import ModelConfig
from timeloom.app.train.model import SequenceModel
from timeloom.app.train.timeline import timeline
from timeloom.inspection.trials import SHORTEST
from timeloom.report import SolveReport, of_reports
from timeloom.solvers import Auto

FORWARD, BACKWARD = 0, 1


@pytest.fixture(autouse=True)
def once(monkeypatch: pytest.MonkeyPatch) -> None:
    """How long a pass takes does not matter here; `auto` learns in the first and uses it in the second."""
    monkeypatch.setattr(timeloom.inspection.trials, "REPEATS", 1)


def model_of(bias: float, layers: int = 1, bidirectional: bool = False) -> SequenceModel:
    """A GRU whose update gate's bias says how long it remembers."""
    torch.manual_seed(0)
    config = ModelConfig(hidden=8, layers=layers, bidirectional=bidirectional)
    model = SequenceModel(config, 2, 3, "classification", Auto())
    for layer in model.recurrent_layers():
        for name, parameter in layer.named_parameters():
            if name.startswith("bias_hh"):
                parameter.data[8:16] += bias
    return model


def test_the_stronger_correction_needs_fewer_sweeps_on_a_long_memory(one_thread: None) -> None:
    found = tl.inspect(model_of(bias=4.0), torch.randn(800, 1, 2), None)
    assert found.chunk == 50
    sweeps = {trial.name: trial.sweeps() for trial in found.trials}
    corrections = [f"shooting {name}" for name in ("none", "diag", "secant", "lowrank", "newton")]
    assert list(sweeps) == ["torch", "auto", *corrections, "mgrit"]
    for way in (FORWARD, BACKWARD):
        none, diag, secant, lowrank, newton = (sweeps[name][way] for name in corrections)
        assert none > diag >= secant >= lowrank >= newton
    for trial in found.trials:
        assert trial.difference < 1e-4
    assert found.trials[0].difference == 0


def test_slow_methods_get_the_steps_they_can_do_in_time(one_thread: None) -> None:
    inputs, lengths = torch.randn(200, 2, 2), torch.tensor([200, 150])
    found = tl.inspect(model_of(bias=0.0), inputs, lengths, seconds=1e9)
    slow = {trial.name: trial.stretch for trial in found.trials if trial.stretch is not None}
    assert {"deer", "quasi-deer", "elk", "quasi-elk", "picard", "jacobi"} == set(slow)
    assert set(slow.values()) == {200}  # the whole first series
    assert max(trial.difference for trial in found.trials) < 1e-4
    assert "On the first steps of one series alone" in " ".join(found.words())
    assert any(row[0] == "jacobi, 200 steps" for row in found.rows())
    short = tl.inspect(model_of(bias=0.0), inputs, lengths, seconds=1e-9)
    assert {trial.stretch for trial in short.trials} == {None, SHORTEST}
    with pytest.raises(TypeError, match="a padded tensor of 3 dimensions; got 2 dimensions"):
        tl.inspect(tl.GRU(2, 3), torch.randn(9, 2), seconds=1.0)


def test_the_timeline_draws_chunks_and_their_warm_ups() -> None:
    shooting = SolveReport("shooting[none]", 100, 1, (0.0,), 1e-6, True, False, None, 0.0, warmup=30)
    svg = timeline([("forward", shooting), ("backward", SolveReport.sequential(1000, "short"))], 1000)
    blue, orange = (svg.count(f'rx="2" fill="{colour}"') for colour in ("#0b66b0", "#d9730d"))
    assert (blue, orange) == (10, 9)  # the first chunk starts where it must
    assert "all steps in one chunk" in svg
    many = SolveReport("deer", 1, 3, (0.0,), 1e-6, True, False, None, 0.0)
    assert "1,000 chunks of 1" in timeline([("forward", many)], 1000)


def test_the_memory_is_told_in_words(one_thread: None) -> None:
    short, long = (tl.inspect(model_of(bias), torch.randn(2000, 1, 2), None) for bias in (0.0, 2.0))
    (where, memory), (_, longer) = short.memory[0], long.memory[0]
    assert where == "layer 1"
    assert memory.exponent < longer.exponent < 0
    assert memory.steps is not None
    assert longer.steps is not None
    assert memory.steps < longer.steps
    words = " ".join(short.words())
    assert "auto, layer 1 forward: ran 2,000 steps in parallel over" in words
    assert f"layer 1 forgets: largest Lyapunov exponent {memory.exponent:+.3g} a step" in words
    assert f"after about {memory.steps:,} steps a state no longer depends on where it started" in words
    assert "Fastest on this batch" in words


def test_ragged_batches_and_both_directions_can_be_looked_at(one_thread: None) -> None:
    model = model_of(0.0, layers=2, bidirectional=True)
    found = tl.inspect(model, torch.randn(90, 3, 2), torch.tensor([90, 17, 40]))
    assert [where for where, _ in found.trials[1].reports] == [
        "layer 1", "layer 1 reversed", "layer 2", "layer 2 reversed",
    ]  # fmt: skip
    assert max(trial.difference for trial in found.trials) < 1e-4
    charts = residual_charts(found)
    assert len(charts) == 8
    assert all("<svg" in chart and "newton" in chart for chart in charts)
    assert model.blocks[0].recurrent.solver == Auto()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_same_words_are_said_once() -> None:
    report = SolveReport.sequential(10, "as asked")
    (told,) = of_reports([("layer 1", report), ("layer 2", report)], 10)
    assert told[0] == "layer 1 forward, layer 2 forward"
    assert "ran 10 steps in one chunk" in told[1]


def test_inspect_writes_its_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = "turning:length=640,train=4,valid=2,test=2"
    run = tmp_path / "run"
    options = ["--data", data, "--hidden", "6", "--epochs", "1", "--compare", "0", "--out", str(run), "--debug"]
    assert cli.run("train", options) == 0
    assert cli.run("inspect", [str(run), "--batch", "2", "--debug"]) == 0
    assert "Fastest on this batch" in capsys.readouterr().out
    text = (run / "inspect.html").read_text()
    assert "What auto does, and why" in text
    assert text.count("<svg") == 4
    assert cli.run("inspect", [str(run), "--batch", "0"]) == 1
    assert "--batch must be at least 1" in capsys.readouterr().err


def test_doctor_measures_and_says_that_all_is_well(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "SECONDS", 0.0)
    assert cli.run("doctor", ["--steps", "512", "--debug"]) == 0
    out = capsys.readouterr().out
    assert "CPU kernels" in out
    assert "x faster" in out
    assert "All is well." in out


def test_doctor_tells_when_results_differ(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "SECONDS", 0.0)
    plain = doctor.parallelize

    def broken(layer: torch.nn.Module) -> torch.nn.Module:
        with torch.no_grad():
            layer.weight_hh_l0 *= 1.01  # type: ignore[operator]
        return plain(layer)

    monkeypatch.setattr(doctor, "parallelize", broken)
    assert cli.run("doctor", ["--steps", "512", "--debug"]) == 1
    assert "TOO MUCH" in capsys.readouterr().out
