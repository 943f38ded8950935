"""Runs by their folders and settings: run.toml, resuming for longer, folds, metrics, streams, exports, comparisons."""

from __future__ import annotations

import io
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch

import timeloom as tl
from timeloom.app import cli, interrupt, machine
from timeloom.app.cli.stream import answer
from timeloom.app.data import load, split
from timeloom.app.errors import InputError
from timeloom.app.files import finite
from timeloom.app.train import checkpoint
from timeloom.app.train.checkpoint import BEST, LAST
from timeloom.app.train.config import OptimConfig, TrainConfig
from timeloom.app.train.defaults import fitted
from timeloom.app.train.folds import finished
from timeloom.app.train.inference import restore
from timeloom.app.train.metrics_file import read
from timeloom.app.train.objective import Score, balancing, loss_of
from timeloom.app.train.run_folder import claimed
from timeloom.app.train.streaming import Stream
from timeloom.app.train.trainer import Trainer

SMALL = ["--data", "turning:length=128,train=16,valid=8,test=8", "--hidden", "8", "--compare", "0"]
SOURCE = str(Path(__file__).parents[1] / "src")


def train(folder: Path, *more: str) -> int:
    return cli.run("train", [*SMALL, "--out", str(folder), *more, "--debug"])


def weights(folder: Path, name: str = LAST) -> dict[str, torch.Tensor]:
    return checkpoint.load(folder / name).weights


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    assert train(folder, "--epochs", "2", "--layers", "2", "--residual", "--norm") == 0
    return folder


def series(folder: Path, kind: str, header: str = "a,b", count: int = 12) -> Path:
    """Series whose column `a` tells what is asked."""
    folder.mkdir()
    generator = numpy.random.default_rng(0)
    index = ["file,label"]
    for i in range(count):
        values = generator.normal(size=(15 + i % 4, 2)) + numpy.array([2.0 * (i % 2), 0])
        rows = [f"{a:.6f},{b:.6f}" for a, b in values]
        if kind == "tracking":
            rows = [
                f"{row},{3 * a + 10:.6f},{int(step % 3 > 0)}"
                for step, (row, (a, _)) in enumerate(zip(rows, values, strict=True))
            ]
        else:
            index.append(f"{i}.csv,{'uv'[i % 2]}")
        columns = f"{header},target,mask" if kind == "tracking" else header
        (folder / f"{i}.csv").write_text("\n".join([columns, *rows]) + "\n")
    if kind != "tracking":
        (folder / "labels.csv").write_text("\n".join(index))
    return folder


def test_a_run_is_repeated_from_its_settings(run: Path, tmp_path: Path) -> None:
    settings = tomllib.loads((run / "run.toml").read_text())
    assert settings["model"]["layers"] == 2
    assert cli.run("train", ["--config", str(run / "run.toml"), "--out", str(tmp_path / "b"), "--debug"]) == 0
    one, other = weights(run), weights(tmp_path / "b")
    assert all(torch.equal(one[name], other[name]) for name in one)
    options = ["--config", str(run / "run.toml"), "--epochs", "1", "--out", str(tmp_path / "c"), "--debug"]
    assert cli.run("train", options) == 0
    assert checkpoint.load(tmp_path / "c" / LAST).config.optim.epochs == 1
    assert cli.run("train", ["--config", str(run / "run.toml"), "--preset", "hmdb6"]) == 1


def test_a_run_goes_on_for_longer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    assert train(folder, "--epochs", "2", "--schedule", "constant") == 0
    assert cli.run("train", ["--resume", str(folder), "--epochs", "4", "--debug"]) == 0
    assert train(tmp_path / "whole", "--epochs", "4", "--schedule", "constant") == 0
    one, other = weights(folder), weights(tmp_path / "whole")
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert [row["step"] for row in read(folder / "metrics.jsonl") if row["kind"] == "step"] == list(range(1, 17))
    assert tomllib.loads((folder / "run.toml").read_text())["optim"]["epochs"] == 4
    capsys.readouterr()
    assert cli.run("train", ["--resume", str(folder), "--epochs", "3"]) == 1
    assert "was to have 4 already" in capsys.readouterr().err
    assert cli.run("train", ["--resume", str(folder), "--epochs", "many"]) == 1
    assert "--epochs must be a whole number" in capsys.readouterr().err


def test_a_run_out_of_patience_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    assert train(folder, "--epochs", "9", "--patience", "2", "--lr", "1e-12") == 0  # nothing gets better
    summary = json.loads((folder / "summary.json").read_text())
    rows = [row for row in read(folder / "metrics.jsonl") if row["kind"] == "validation"]
    assert [row["epoch"] for row in rows] == [1, 2, 3]
    assert summary["best_epoch"] == max(row["epoch"] for row in rows if row["best"]) == 3  # as printed, from 1 on
    said = "Stopped after epoch 3 of at most 9: for 2 epochs the validation accuracy was no better than before"
    again = f"timeloom train --resume {folder} --patience 4"
    told = capsys.readouterr().out
    assert "weights of epoch 3" in told
    for words in (said, "the best epoch was 3, the latest of those as good", again):
        assert words in told
        assert words in (folder / "report.html").read_text()
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert cli.run("train", ["--resume", str(folder), "--debug"]) == 0
    told = capsys.readouterr().out
    assert f"{folder} has ended. {said}" in told
    assert again in told
    assert before == {path.name: path.read_bytes() for path in folder.iterdir()}
    assert cli.run("train", ["--resume", str(folder), "--patience", "0", "--debug"]) == 0
    assert (
        f"All its epochs (9) were run. To train on: timeloom train --resume {folder} --epochs 18"
        in capsys.readouterr().out
    )
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == 36
    assert len(summary["command"].splitlines()) == 2  # that of the beginning, and that which went on


def test_the_speedup_of_a_resumed_run_says_which_steps_it_is_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    assert train(folder, "--epochs", "2", "--compare", "2") == 0
    assert "2 steps (2, 8 of 8) were repeated by torch's own layers" in capsys.readouterr().out
    assert cli.run("train", ["--resume", str(folder), "--epochs", "3", "--debug"]) == 0
    before = "3 steps (2, 8, 12 of 12; 2 of them before the run was resumed after step 8) were repeated"
    assert before in capsys.readouterr().out
    assert all("others" in row for row in read(folder / "metrics.jsonl") if row["kind"] == "torch")


def test_two_trainings_do_not_share_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with claimed(tmp_path / "run"):
        assert cli.run("train", [*SMALL, "--epochs", "1", "--out", str(tmp_path / "run")]) == 1
    assert "another training is writing to" in capsys.readouterr().err
    assert train(tmp_path / "run", "--epochs", "1") == 0


def test_folds_are_trained_and_summed_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, out = series(tmp_path / "data", "classification"), tmp_path / "out"
    options = ["--data", str(data), "--epochs", "2", "--hidden", "4", "--compare", "0", "--out", str(out)]
    options += ["--folds", "3"]
    assert cli.run("train", [*options, "--debug"]) == 0
    summary = json.loads((out / "summary.json").read_text())
    inner = [json.loads((out / f"fold-{i}" / "summary.json").read_text()) for i in (1, 2, 3)]
    assert summary["test_series"] == 12 == sum(one["test_series"] for one in inner)
    assert summary["test_quality"] == pytest.approx(sum(one["test_quality"] for one in inner) / 3)
    assert "over 3 folds" in capsys.readouterr().out
    for other in ([*options[:-1], "2"], options[:-2]):  # other folds, or a run without any
        assert cli.run("train", other) == 1
        assert f"{out} holds folds already" in capsys.readouterr().err
    assert cli.run("train", ["--resume", str(out), "--epochs", "9"]) == 1
    assert f"one fold at a time: --resume {out}/fold-1 --epochs 9" in capsys.readouterr().err
    for name in ("summary.json", "fold-2/summary.json"):
        (out / name).unlink()
    assert cli.run("train", ["--resume", str(out), "--debug"]) == 0  # writes what is missing
    assert json.loads((out / "summary.json").read_text())["qualities"] == summary["qualities"]
    assert cli.run("evaluate", [str(out / "fold-2"), "--json", "--debug"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["quality"] == inner[1]["test_quality"]
    for command in ("evaluate", "export"):
        assert cli.run(command, [str(out)]) == 1
        assert f"{out} holds 3 folds, each a run of its own; give one: {out}/fold-1" in capsys.readouterr().err
    assert cli.run("compare", [str(out), str(out / "fold-1")]) == 1
    assert f"timeloom compare {out}/fold-1 {out}/fold-2 {out}/fold-3" in capsys.readouterr().err


def test_folds_that_go_on_keep_their_settings_and_their_sum(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, out = series(tmp_path / "data", "classification"), tmp_path / "out"
    options = ["--data", str(data), "--epochs", "2", "--hidden", "4", "--compare", "0", "--out", str(out)]
    assert cli.run("train", [*options, "--folds", "100"]) == 1
    assert "12 series for --folds 100; give 12 folds or fewer" in capsys.readouterr().err
    assert not out.exists()
    assert cli.run("train", [*options, "--folds", "3", "--debug"]) == 0
    before = weights(out / "fold-3")
    for part in ("fold-2", "fold-3"):  # as if it had been stopped in the first one
        shutil.rmtree(out / part)
    assert cli.run("train", ["--resume", str(out), "--debug"]) == 0
    after = weights(out / "fold-3")
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert cli.run("train", ["--resume", str(out / "fold-1"), "--epochs", "9", "--debug"]) == 0
    inner = [json.loads((out / f"fold-{i}" / "summary.json").read_text()) for i in (1, 2, 3)]
    assert json.loads((out / "summary.json").read_text())["qualities"] == [one["test_quality"] for one in inner]
    start = checkpoint.load(out / "fold-1" / LAST)
    start.progress.step += 1  # as if it went on and was stopped
    checkpoint.save(out / "fold-1" / LAST, start)
    assert not finished(out / "fold-1")
    assert finished(out / "fold-2")


def test_folds_of_single_series_are_summed_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of one number there is no R²: all of them together have one."""
    data, out = series(tmp_path / "data", "regression", count=5), tmp_path / "out"
    (data / "labels.csv").write_text("file,target\n" + "".join(f"{i}.csv,{i}\n" for i in range(5)))
    options = ["--data", str(data), "--epochs", "1", "--hidden", "4", "--compare", "0", "--out", str(out)]
    assert cli.run("train", [*options, "--folds", "5", "--debug"]) == 0
    summary = json.loads((out / "summary.json").read_text())
    pairs = [json.loads((out / f"fold-{i}" / "summary.json").read_text())["answers"][0] for i in range(1, 6)]
    errors = sum((true - answer) ** 2 for true, answer in pairs)
    assert summary["qualities"] == [None] * 5
    assert summary["together"] == pytest.approx(1 - errors / 10)
    assert "All answers together: R² " in capsys.readouterr().out


def test_columns_of_other_order_are_answered_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = series(tmp_path / "data", "classification")
    options = ["--data", str(data), "--epochs", "3", "--hidden", "4", "--compare", "0", "--out", str(tmp_path / "run")]
    assert cli.run("train", [*options, "--debug"]) == 0
    assert checkpoint.load(tmp_path / "run").columns == ("a", "b")
    (tmp_path / "new").mkdir()
    lines = (data / "1.csv").read_text().splitlines()[1:]
    (tmp_path / "new" / "1.csv").write_text(
        "\n".join(["b,extra,a", *(f"{r.split(',')[1]},7,{r.split(',')[0]}" for r in lines)])
    )
    answers = []
    for source in (data / "1.csv", tmp_path / "new" / "1.csv"):
        out = tmp_path / "answers.csv"
        assert (
            cli.run(
                "predict", [str(tmp_path / "run"), "--data", str(source), "--out", str(out), "--no-compare", "--debug"]
            )
            == 0
        )
        answers.append(out.read_text())
    assert answers[0] == answers[1]
    (tmp_path / "new" / "1.csv").write_text("b,c\n1,2\n")
    assert cli.run("predict", [str(tmp_path / "run"), "--data", str(tmp_path / "new")]) == 1
    assert "no column 'a'" in capsys.readouterr().err


def test_numbers_of_steps_are_learned_where_they_count(tmp_path: Path) -> None:
    data = series(tmp_path / "data", "tracking", count=24)
    options = ["--data", str(data), "--epochs", "30", "--lr", "0.02", "--compare", "1", "--out", str(tmp_path / "run")]
    options += ["--hidden", "16", "--layers", "1", "--no-bidirectional", "--metric", "mae"]
    assert cli.run("train", [*options, "--debug"]) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["test_quality"] > 0.8
    assert len(summary["answers"]) < sum(15 + i % 4 for i in range(24)) // 3
    assert "Predicted against true" in (tmp_path / "run" / "report.html").read_text()
    out = tmp_path / "answers.csv"
    assert cli.run("predict", [str(tmp_path / "run"), "--data", str(data), "--out", str(out), "--debug"]) == 0
    assert out.read_text().startswith("series,step,value\n0.csv,0,")


def test_losses_leave_out_what_does_not_count() -> None:
    targets = torch.tensor([[1.0, math.nan], [3.0, 5.0]])
    answers = torch.tensor([[[2.0], [100.0]], [[3.0], [7.0]]])
    assert loss_of(answers, targets, "tracking").item() == pytest.approx(5 / 3)
    score = Score("tracking", 0)
    score.add(answers, targets)
    assert (score.count, score.by("mae")) == (3, pytest.approx(-1.0))


def test_balanced_classes_count_alike() -> None:
    targets = [torch.tensor(0)] * 9 + [torch.tensor(1)] * 3 + [torch.tensor(-100)]
    weights = balancing(targets, 2)
    assert weights.tolist() == pytest.approx([12 / 18, 12 / 6])
    logits = torch.zeros(12, 2)
    labels = torch.tensor([0] * 9 + [1] * 3)
    assert loss_of(logits, labels, "classification", weights=weights).item() == pytest.approx(math.log(2))


def test_metrics_of_classes_are_those_of_the_confusion() -> None:
    score = Score("classification", 3)
    score.confusion = torch.tensor([[8, 2, 0], [1, 1, 0], [0, 0, 0]])
    score.count = 12
    assert score.by("accuracy") == pytest.approx(9 / 12)
    assert score.by("balanced-accuracy") == pytest.approx((0.8 + 0.5) / 2)
    assert score.by("macro-f1") == pytest.approx((16 / 19 + 2 / 5) / 2)
    assert score.baseline == pytest.approx(10 / 12)


def test_a_metric_of_another_task_is_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.run("train", [*SMALL, "--metric", "mae", "--out", str(tmp_path / "run")]) == 1
    assert "--metric mae does not measure a classification; give loss, accuracy" in capsys.readouterr().err


def test_defaults_follow_the_data(tmp_path: Path) -> None:
    few = split(load(str(series(tmp_path / "data", "classification"))), 0.2, 0.2, 0)
    chosen = fitted(TrainConfig(), few)
    assert (chosen.optim.batch, chosen.optim.epochs, chosen.model.bidirectional) == (4, 120, True)
    long = replace(few, train=replace(few.train, series=[torch.zeros(100_000, 2)] * len(few.train)))
    chosen = fitted(TrainConfig(), long)
    assert (chosen.optim.epochs, chosen.model.layers, chosen.model.bidirectional) == (50, 1, False)
    short = fitted(replace(TrainConfig(), optim=OptimConfig(epochs=20, batch=2)), few, ("batch", "epochs")).optim
    assert (short.batch, short.epochs, short.warmup, short.patience) == (2, 20, 4, 0)  # 80 steps
    assert fitted(replace(TrainConfig(), preset="hmdb6"), few).model == TrainConfig().model
    assert fitted(TrainConfig(), replace(few, source="turning")) == TrainConfig()


def test_options_come_before_defaults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, run = series(tmp_path / "data", "classification"), tmp_path / "run"
    options = ["--epochs", "1", "--compare", "0", "--no-bidirectional"]
    assert cli.run("train", ["--data", str(data), *options, "--out", str(run), "--debug"]) == 0
    config = checkpoint.load(run / LAST).config
    assert (config.optim.epochs, config.model.bidirectional, config.model.hidden) == (1, False, 64)
    told = " ".join(capsys.readouterr().out.split())
    for words in ("2 test series (--test-fraction 0.2, --valid-fraction 0.2, drawn by --seed 0) of 2 channels",
                  "Model: 2 GRU layers of 64 units in one direction, residual, LayerNorm, dropout 0.1",
                  "Training: AdamW, learning rate 0.003 (cosine), batches of 4, at most 1 epoch, no early stop;",
                  "best validation accuracy is kept", "float32 by --solver auto; no step is repeated",
                  f"All settings, chosen or given: {run / 'run.toml'}"):  # fmt: skip
        assert words in told


def test_a_result_no_better_than_guessing_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path / "run", "--epochs", "1", "--lr", "1e-9") == 0
    assert "no better than always answering the most frequent class" in capsys.readouterr().out
    assert 'class="notice"' in (tmp_path / "run" / "report.html").read_text()


def test_no_file_holds_nan(tmp_path: Path) -> None:
    """All test targets are the same: R² is not defined."""
    folder = tmp_path / "data"
    folder.mkdir()
    index = ["file,target,split"]
    for i in range(10):
        (folder / f"{i}.csv").write_text("1\n2\n3\n")
        index.append(f"{i}.csv,{i if i < 6 else 5},{'train' if i < 6 else 'valid' if i < 8 else 'test'}")
    (folder / "labels.csv").write_text("\n".join(index))
    options = [
        "--data",
        str(folder),
        "--epochs",
        "1",
        "--compare",
        "0",
        "--hidden",
        "4",
        "--out",
        str(tmp_path / "run"),
    ]
    assert cli.run("train", [*options, "--debug"]) == 0
    for name in ("summary.json", "metrics.jsonl"):
        assert "NaN" not in (tmp_path / "run" / name).read_text()
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["test_quality"] is None
    assert finite({"a": [1.0, math.inf], "b": (math.nan, "x")}) == {"a": [1.0, None], "b": [None, "x"]}


def test_a_full_disk_at_the_start_promises_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path, data: bytes) -> None:
        raise InputError(f"cannot write {path}: No space left on device. make room, and run it again")

    monkeypatch.setattr(checkpoint, "write_whole", full)
    assert cli.run("train", [*SMALL, "--epochs", "1", "--out", str(tmp_path / "run")]) == 1
    assert "--resume" not in capsys.readouterr().err
    monkeypatch.undo()
    assert train(tmp_path / "run", "--epochs", "1") == 0


@pytest.mark.parametrize("options", [[], ["--bidirectional"], ["--cell", "lstm", "--pooling", "last", "--mlp"]])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # TorchScript is old
def test_a_sequential_model_can_be_scripted(options: list[str], tmp_path: Path) -> None:
    assert train(tmp_path / "run", "--epochs", "1", "--layers", "2", "--norm", *options) == 0
    model = tl.sequentialize(restore(checkpoint.load(tmp_path / "run"), torch.device("cpu")))
    scripted = torch.jit.script(model)
    x, lengths = torch.randn(30, 3, 4), torch.tensor([30, 7, 12])
    assert torch.allclose(scripted(x), model(x), atol=1e-6)
    assert torch.allclose(scripted(x, lengths), model(x, lengths), atol=1e-6)


@pytest.mark.parametrize(
    "options", [[], ["--cell", "lstm", "--pooling", "last"], ["--cell", "implicit-gru", "--residual", "--norm"]]
)
def test_a_stream_answers_as_the_whole_series(options: list[str], tmp_path: Path) -> None:
    assert train(tmp_path / "run", "--epochs", "1", "--layers", "2", *options) == 0
    loaded = checkpoint.load(tmp_path / "run")
    model = restore(loaded, torch.device("cpu"))
    x = torch.randn(50, 2, 4)
    stream = Stream(model, batch=2)
    found = torch.cat([stream.feed(part) for part in x[:38].split([1, 7, 30])])
    stream.save(tmp_path / "state")
    again = Stream(model, batch=2)
    again.restore(tmp_path / "state")
    found = torch.cat([found, again.feed(x[38:])])
    for steps in (1, 8, 38, 50):
        assert torch.allclose(found[steps - 1], model(x[:steps]), atol=1e-5)
    with pytest.raises(InputError, match=r"expected steps of shape \(t, 2, 4\)"):
        stream.feed(x[:, :1])


def test_rows_are_answered_as_they_come(run: Path) -> None:
    loaded = checkpoint.load(run)
    model = restore(loaded, torch.device("cpu"))
    out = io.StringIO()
    answer(Stream(model), loaded, io.StringIO("a,b,c,d\n1,2,3,4\n5,6,7,8\n"), out)
    header, *lines = out.getvalue().splitlines()
    assert header == "step,label,p(backwards),p(forwards)"
    expected = model(torch.tensor([[[1.0, 2, 3, 4]], [[5, 6, 7, 8]]])).softmax(-1)[0, 0].item()
    assert float(lines[1].split(",")[2]) == pytest.approx(expected, abs=1e-5)
    with pytest.raises(InputError, match="line 2: 3 values, expected 4"):
        answer(Stream(model), loaded, io.StringIO("1,2,3,4\n1,2,3\n"), io.StringIO())
    with pytest.raises(InputError, match=r"line 1: .* got a missing value"):
        answer(Stream(model), loaded, io.StringIO("1,,3,4\n"), io.StringIO())


@pytest.mark.parametrize("mark", [";", "\t"])
def test_a_stream_is_read_as_files_are(run: Path, mark: str) -> None:
    loaded, answers = checkpoint.load(run), []
    for rows in ("a,b,c,d\n1.5,2,3,4\n", mark.join("abcd") + "\n" + mark.join(("1,5", "2", "3", "4")) + "\n"):
        out = io.StringIO()
        answer(Stream(restore(loaded, torch.device("cpu"))), loaded, io.StringIO(rows), out)
        answers.append(out.getvalue())
    assert answers[0] == answers[1]


def test_two_directions_cannot_be_streamed_to(tmp_path: Path) -> None:
    assert train(tmp_path / "run", "--epochs", "1", "--bidirectional") == 0
    with pytest.raises(InputError, match="cannot answer before their end"):
        Stream(restore(checkpoint.load(tmp_path / "run"), torch.device("cpu")))


@pytest.mark.parametrize(
    "options", [["--bidirectional", "--residual", "--norm"], ["--cell", "lstm"], ["--cell", "rnn", "--pooling", "last"]]
)
def test_an_exported_model_answers_as_the_checkpoint(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path / "run", "--epochs", "1", *options) == 0
    assert cli.run("export", [str(tmp_path / "run"), "--debug"]) == 0
    assert "differ from the checkpoint's by at most" in capsys.readouterr().out
    model = restore(checkpoint.load(tmp_path / "run"), torch.device("cpu"))
    program = torch.export.load(tmp_path / "run" / "model.pt2").module()
    x = torch.randn(77, 5, 4)
    assert torch.allclose(program(x), model(x), atol=1e-5)
    about = json.loads((tmp_path / "run" / "model.pt2.json").read_text())
    assert about["classes"] == ["backwards", "forwards"]


def test_onnx_is_checked_or_told_to_be_missing(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "model.onnx"
    try:
        import onnxruntime
        import onnxscript  # noqa: F401
    except ModuleNotFoundError:
        assert cli.run("export", [str(run), "--format", "onnx", "--out", str(out)]) == 1
        assert "pip install 'timeloom[export]'" in capsys.readouterr().err
        return
    assert cli.run("export", [str(run), "--format", "onnx", "--out", str(out), "--debug"]) == 0
    x = torch.randn(33, 2, 4)
    found = onnxruntime.InferenceSession(str(out)).run(None, {"inputs": x.numpy()})[0]
    assert torch.allclose(torch.from_numpy(found), restore(checkpoint.load(run), torch.device("cpu"))(x), atol=1e-5)


def test_runs_are_compared(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path / "other", "--epochs", "1", "--lr", "0.02") == 0
    page = tmp_path / "compare.html"
    assert cli.run("compare", [str(run), str(tmp_path / "other"), "--out", str(page), "--debug"]) == 0
    text = page.read_text()
    assert text.count("<svg") == 6
    assert ">lr<" in text
    assert ">hidden<" not in text  # the same in both
    capsys.readouterr()
    assert cli.run("compare", [str(run)]) == 1
    assert cli.run("compare", [str(run), str(tmp_path)]) == 1
    assert "no summary.json; give the folder of a run that has ended" in capsys.readouterr().err


STUCK = """
import sys, time, threading, ctypes
sys.path.insert(0, sys.argv[1])
from timeloom.app.interrupt import obeyed
def words():
    return "kept"
with obeyed(words):
    print("ready", flush=True)
    ctypes.CDLL(None).sleep(60) if sys.argv[2] == "c" else time.sleep(60)
"""


def test_ctrl_c_is_obeyed_inside_a_long_call() -> None:
    """In one call of a library, of which Python hears nothing."""
    code = (
        "import signal; signal.signal(signal.SIGINT, lambda *a: None)" + STUCK
    )  # as a training, which finishes a step
    code = code.replace("ctypes.CDLL(None).sleep(60)", "[ctypes.CDLL(None).sleep(60) for _ in range(9)]")
    with subprocess.Popen(
        [sys.executable, "-c", code, SOURCE, "c"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"ready\n"
        begin = time.monotonic()
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(timeout=20) == interrupt.STATUS
        assert time.monotonic() - begin >= interrupt.PATIENCE
        assert process.stderr.read() == b"kept\n"


def test_the_command_leaves_at_once_when_stopped() -> None:
    """Without taking down what was loaded, which takes torch seconds."""
    code = f"""
import atexit, sys, types
sys.path.insert(0, {SOURCE!r})
stub = types.ModuleType("timeloom.app.cli")
stub.run = lambda command, words: int(words[0])
sys.modules[stub.__name__] = stub
atexit.register(print, "taken down")
import timeloom_command
sys.exit(timeloom_command.main())
"""
    for status, said in ((interrupt.STATUS, ""), (0, "taken down\n"), (1, "taken down\n")):
        done = subprocess.run([sys.executable, "-c", code, "doctor", str(status)], capture_output=True, text=True)
        assert (done.returncode, done.stdout, done.stderr) == (status, said, "")


def test_how_to_go_on_with_a_fold_names_the_run_of_all() -> None:
    def again(folder: str, folds: int) -> object:
        return Trainer.again.fget(SimpleNamespace(folder=Path(folder), config=replace(TrainConfig(), folds=folds)))

    assert again("runs/a", 0) == "timeloom train --resume runs/a"
    assert again("my runs/a/fold-2", 3) == "timeloom train --resume 'my runs/a'"
    assert again("runs/fold-2", 0) == "timeloom train --resume runs/fold-2"


def test_a_run_that_is_ended_in_a_step_keeps_the_steps_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the other thread does when a step takes too long."""
    assert train(tmp_path / "whole", "--epochs", "2") == 0
    plain, said = Trainer._update, []

    def stuck(self: Trainer, *arguments: object, **named: object) -> torch.Tensor:
        if self.progress.step == 3 and not said:
            said.append(self.last_words())
            raise RuntimeError("ended")
        return plain(self, *arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(Trainer, "_update", stuck)
    with pytest.raises(RuntimeError, match="ended"):
        train(tmp_path / "run", "--epochs", "2")
    monkeypatch.undo()
    assert said[0].startswith("stopped after step 3; go on with: timeloom train --resume")
    assert checkpoint.load(tmp_path / "run" / LAST).progress.step == 3
    assert cli.run("train", ["--resume", str(tmp_path / "run"), "--debug"]) == 0
    for name in (LAST, BEST):
        one, other = weights(tmp_path / "whole", name), weights(tmp_path / "run", name)
        assert all(torch.equal(one[key], other[key]) for key in one)


def test_the_load_of_others_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = {"busy": 100.0, "own": 5.0, "now": 50.0}
    monkeypatch.setattr(machine, "_busy_seconds", lambda: clock["busy"])
    monkeypatch.setattr(machine.time, "process_time", lambda: clock["own"])
    monkeypatch.setattr(machine.time, "monotonic", lambda: clock["now"])
    meter = machine.LoadMeter()
    clock.update(busy=130.0, own=15.0, now=60.0)
    load = meter.read()
    assert load.others == pytest.approx(2.0)
    assert "other programs used 2.0" in load.words()
    assert "nothing else used" in replace(load, others=0.0).words()
    assert "does not tell" in replace(load, others=None).words()
