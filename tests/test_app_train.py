"""Training runs: they learn, they stop, they go on exactly where they were, and no file is ever half-written."""

from __future__ import annotations

import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch import Tensor

from timeloom.app import cli, files
from timeloom.app.data import Batch, load, split
from timeloom.app.errors import InputError
from timeloom.app.train import checkpoint, comparison
from timeloom.app.train.checkpoint import BEST, LAST, Checkpoint, Progress
from timeloom.app.train.config import OptimConfig, TrainConfig
from timeloom.app.train.metrics_file import Metrics, read
from timeloom.app.train.share import Share
from timeloom.app.train.summary import Summary

SMALL = ["--data", "turning:length=128,train=16,valid=8,test=8", "--hidden", "8", "--compare", "0"]
SOURCE = str(Path(__file__).parents[1] / "src")


def train(folder: Path, *more: str) -> int:
    return cli.run("train", [*SMALL, "--out", str(folder), *more, "--debug"])


def tensors(path: Path) -> dict[str, Tensor]:
    loaded = checkpoint.load(path)
    return {**loaded.weights, **{f"optimizer.{k}": v for k, v in loaded.optimizer.items()}}


def without_clock(folder: Path) -> list[dict[str, object]]:
    timed = ("seconds", "data_seconds", "elapsed")
    return [{k: v for k, v in row.items() if k not in timed} for row in read(folder / "metrics.jsonl")]


def assert_same_run(one: Path, other: Path) -> None:
    for name in (LAST, BEST):
        a, b = tensors(one / name), tensors(other / name)
        assert a.keys() == b.keys()
        assert all(torch.equal(a[key], b[key]) for key in a)
    assert without_clock(one) == without_clock(other)


@contextmanager
def killed_at_the_end(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process that gets no chance to finish what it is at."""
    environment = {**os.environ, "PYTHONPATH": SOURCE}
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_killed_run_goes_on_to_the_same_weights(tmp_path: Path) -> None:
    """Killed twice, wherever it happens to be, even while a checkpoint is written."""
    options = ["--epochs", "15", "--layers", "2", "--dropout", "0.1", "--save-every", "3", "--schedule", "linear"]
    assert train(tmp_path / "whole", *options) == 0
    killed = tmp_path / "killed"
    arguments = [*SMALL, *options, "--out", str(killed)]
    steps = []
    for least in (8, 24):
        command = [sys.executable, "-m", "timeloom", "train", *arguments]
        with killed_at_the_end(command) as process:
            deadline = time.monotonic() + 60
            while len(read(killed / "metrics.jsonl")) < least and process.poll() is None:
                assert time.monotonic() < deadline
                time.sleep(0.001)
        steps.append(checkpoint.load(killed / LAST).progress.step)
        arguments = ["--resume", str(killed)]
    assert 0 < steps[0] < steps[1] < 60
    assert cli.run("train", [*arguments, "--debug"]) == 0
    assert checkpoint.load(killed / LAST).progress.step == 60
    assert_same_run(tmp_path / "whole", killed)


def test_an_interrupted_run_saves_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from timeloom.app.train.trainer import Trainer

    assert train(tmp_path / "whole", "--epochs", "3") == 0
    plain = Trainer._one_step

    def with_ctrl_c(self: Trainer) -> None:
        if self.progress.step == 5:
            os.kill(os.getpid(), signal.SIGINT)
        plain(self)

    monkeypatch.setattr(Trainer, "_one_step", with_ctrl_c)
    assert train(tmp_path / "stopped", "--epochs", "3") == 130
    monkeypatch.undo()
    assert checkpoint.load(tmp_path / "stopped" / LAST).progress.step == 6
    assert cli.run("train", ["--resume", str(tmp_path / "stopped"), "--debug"]) == 0
    assert_same_run(tmp_path / "whole", tmp_path / "stopped")


WRITER = """
import sys, torch
from pathlib import Path
from timeloom.app.train.checkpoint import Checkpoint, Progress, save
from timeloom.app.train.config import OptimConfig, TrainConfig
number = 0
while True:
    weights = {str(i): torch.full((100_000,), float(number)) for i in range(4)}
    save(Path(sys.argv[1]), Checkpoint(TrainConfig(), "classification", ("a", "b"), 1, Progress(step=number), weights))
    number += 1
"""


def test_a_checkpoint_is_whole_at_every_moment(tmp_path: Path) -> None:
    """One process writes without a pause and is killed; another reads all the while."""
    path = tmp_path / LAST
    command = [sys.executable, "-c", WRITER, str(path)]
    seen = set()
    with killed_at_the_end(command):
        deadline = time.monotonic() + 60
        while len(seen) < 20 and time.monotonic() < deadline:
            if path.exists():
                loaded = checkpoint.load(path)
                assert all((tensor == loaded.progress.step).all() for tensor in loaded.weights.values())
                seen.add(loaded.progress.step)
    assert len(seen) == 20
    assert checkpoint.load(path).progress.step >= max(seen)


def test_no_room_for_a_file_leaves_the_last_checkpoint_whole(tmp_path: Path) -> None:
    about = (TrainConfig(), "classification", ("a", "b"), 1)
    checkpoint.save(tmp_path / LAST, Checkpoint(*about, Progress(step=1), {"w": torch.ones(3)}))
    larger = Checkpoint(*about, Progress(step=2), {"w": torch.ones(100_000)})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(InputError, match=r"cannot write .*last\.safetensors: .*large.* make room"):
            checkpoint.save(tmp_path / LAST, larger)
        with pytest.raises(InputError, match=r"cannot write .*a\.txt: .*large"):
            files.write_text(tmp_path / "a.txt", "a" * 30_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert checkpoint.load(tmp_path / LAST).progress.step == 1
    assert [path.name for path in tmp_path.iterdir()] == [LAST]


def test_metrics_drop_what_will_be_made_again_and_a_line_cut_short(tmp_path: Path) -> None:
    rows = [{"kind": "step", "step": step} for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"kind": "st')
    metrics = Metrics(tmp_path, up_to=2)
    metrics.add(kind="step", step=3, loss=0.5)
    metrics.close()
    assert [row["step"] for row in read(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    assert read(tmp_path / "metrics.jsonl")[-1]["loss"] == 0.5


def test_the_parallel_run_learns_what_the_sequential_one_does(tmp_path: Path) -> None:
    data = "turning:length=256,train=48,valid=16,test=32"
    options = ["--data", data, "--hidden", "16", "--epochs", "6", "--lr", "0.01"]
    results = {}
    for solver in ("auto", "sequential", "shooting:chunk=64,correction=diag"):
        folder = tmp_path / solver[:6]
        compare = ["--compare", "2"]
        assert cli.run("train", [*options, *compare, "--out", str(folder), "--solver", solver, "--debug"]) == 0
        results[solver] = json.loads((folder / "summary.json").read_text())
    by_sequential = results["sequential"]
    assert by_sequential["test_quality"] >= 0.9
    assert by_sequential["speedup"] is None  # torch beside torch
    for solver in ("auto", "shooting:chunk=64,correction=diag"):
        assert results[solver]["test_quality"] == by_sequential["test_quality"]
        assert results[solver]["test_loss"] == pytest.approx(by_sequential["test_loss"], rel=1e-2)
        assert results[solver]["loss_difference"] < 1e-5
        assert results[solver]["compared_steps"] == 2


def test_torch_is_not_begun_where_it_would_take_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "MOST_SECONDS", 0.0)
    assert train(tmp_path / "run", "--epochs", "2", "--compare", "5") == 0
    assert not [row for row in read(tmp_path / "run" / "metrics.jsonl") if row["kind"] == "torch"]
    summary = Summary(**json.loads((tmp_path / "run" / "summary.json").read_text()))
    assert summary.torch_expected is not None
    assert summary.torch_expected > 0
    assert "were not timed: one step of theirs would take about" in summary.time_words()


@pytest.mark.parametrize(("power", "longest"), [(1.0, 16.0), (2.0, 256.0), (3.0, 256.0), (0.5, 16.0)])
def test_torchs_time_is_foreseen_from_its_first_steps(power: float, longest: float) -> None:
    """Packed sequences cost torch their length squared on a CPU: 16 times the steps, 256 times the time."""
    steps = 16 * comparison.FIRST_STEPS
    share = Share(Batch(torch.zeros(steps, 2, 1), torch.tensor([steps, 5]), torch.zeros(2)), None, 2)
    seen = []

    def seconds(part: Share, threads: int) -> float:
        assert part.batch is not None
        assert part.batch.lengths is not None
        assert part.batch.lengths.tolist() == [len(part.batch.inputs), 5]
        seen.append(len(part.batch.inputs))
        return (len(part.batch.inputs) / comparison.FIRST_STEPS) ** power * (1.0 if threads == 1 else 3.0)

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        threads, expected = comparison.choose(share, seconds)
    finally:
        torch.set_num_threads(before)
    assert threads == 1  # with which it is faster here
    assert max(seen) == 2 * comparison.FIRST_STEPS
    grown = 2**power * 8 ** min(max(power, 1.0), 2.0)
    assert expected == pytest.approx(grown)
    assert longest / 4 <= expected <= 4 * longest


def test_a_busy_moment_does_not_foresee_that_series_of_one_length_take_ages() -> None:
    """Without packing torch's time is its steps': were its second try three times as long, it would not be squared."""
    steps = 64 * comparison.FIRST_STEPS
    share = Share(Batch(torch.zeros(steps, 2, 1), None, torch.zeros(2)), None, 2)
    times = {comparison.FIRST_STEPS: 1.0, 2 * comparison.FIRST_STEPS: 3.0}

    def seconds(part: Share, threads: int) -> float:
        assert part.batch is not None
        return times[len(part.batch.inputs)]

    assert comparison.choose(share, seconds)[1] == pytest.approx(3.0 * 32)


def test_the_speedup_compares_the_same_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The last batch of an epoch is smaller here: torch's time over it must not meet ours over a whole one."""
    assert train(tmp_path / "run", "--epochs", "2", "--compare", "5", "--batch", "5") == 0
    rows = read(tmp_path / "run" / "metrics.jsonl")
    ours = {row["step"]: row["seconds"] for row in rows if row["kind"] == "step"}
    ratios = [row["seconds"] / ours[row["step"]] for row in rows if row["kind"] == "torch"]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert len(ratios) == 5
    assert summary["speedup"] == pytest.approx(statistics.median(ratios))
    assert summary["speedup_range"] == pytest.approx([min(ratios), max(ratios)])
    lines = capsys.readouterr().out.splitlines()
    made = Summary(**summary)
    assert lines[-1] == f"Report: {tmp_path / 'run' / 'report.html'} ({made.pace()})"
    assert any(" on " in line and " cores" in line for line in lines)  # how busy the machine was
    assert replace(made, speedup=12.34).pace() == "12.3x faster a step than torch"
    assert replace(made, speedup=0.912).pace() == "0.91 times the speed of torch"
    assert replace(made, speedup=None).pace() == "torch was not timed"


def test_early_stopping_keeps_the_best_weights(tmp_path: Path) -> None:
    options = ["--epochs", "50", "--lr", "0.3", "--patience", "2", "--metric", "loss"]
    assert train(tmp_path / "run", *options) == 0
    validations = [row for row in read(tmp_path / "run" / "metrics.jsonl") if row["kind"] == "validation"]
    losses = [row["loss"] for row in validations]
    assert len(losses) < 50
    assert losses.index(min(losses)) == len(losses) - 3
    assert checkpoint.load(tmp_path / "run" / BEST).progress.best_loss == min(losses)


def folder_of(kind: str, folder: Path) -> Path:
    """Series of 3 channels and several lengths whose first channel tells a class, a number, or the class of a step."""
    folder.mkdir()
    generator = numpy.random.default_rng(0)
    index = [f"file,{'target' if kind == 'regression' else 'label'}"]
    for i in range(40):
        values = generator.normal(size=(20 + i % 7, 3)).astype("float32")
        if kind == "labelling":
            numpy.save(folder / f"{i}.labels.npy", numpy.where(values[:, 0] > 0, "high", "low"))
        else:
            values[:, 0] += i % 2 * 2.0 if kind == "classification" else 0.2 * i
            index.append(f"{i}.npy,{'ab'[i % 2] if kind == 'classification' else 100 + 10 * i}")
        numpy.save(folder / f"{i}.npy", values)
    if kind != "labelling":
        (folder / "labels.csv").write_text("\n".join(index))
    return folder


@pytest.mark.parametrize(("kind", "header"), [
    ("classification", "series,label,p(a),p(b)"),
    ("regression", "series,value"),
    ("labelling", "series,step,label,p(high),p(low)"),
])  # fmt: skip
def test_a_folder_trains_evaluates_and_predicts(
    kind: str, header: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, run, out = folder_of(kind, tmp_path / "data"), str(tmp_path / "run"), tmp_path / "answers.csv"
    options = ["--hidden", "8", "--epochs", "20", "--lr", "0.02", "--compare", "1", "--cell", "gru"]
    assert cli.run("train", ["--data", str(data), "--out", run, *options, "--debug"]) == 0
    summary = json.loads((Path(run) / "summary.json").read_text())
    assert summary["test_quality"] > 0.85
    capsys.readouterr()
    assert cli.run("evaluate", [run, "--json", "--debug"]) == 0
    measured = json.loads(capsys.readouterr().out)
    assert measured["quality"] == pytest.approx(summary["test_quality"])
    assert measured["loss"] == pytest.approx(summary["test_loss"], rel=1e-4)
    assert measured["difference"] < 1e-5
    assert measured["same"] == 1.0
    assert cli.run("predict", [run, "--data", str(data), "--out", str(out), "--debug"]) == 0
    lines = out.read_text().splitlines()
    assert lines[0] == header
    expected = sum(20 + i % 7 for i in range(40)) if kind == "labelling" else 40
    assert len(lines) == 1 + expected
    if kind == "regression":
        answers = [float(line.rpartition(",")[2]) for line in lines[1:]]
        assert 80 < min(answers) < max(answers) < 520


@pytest.mark.parametrize("precision", ["float64", "bf16"])
def test_other_precisions_train(precision: str, tmp_path: Path) -> None:
    assert train(tmp_path / "run", "--epochs", "1", "--precision", precision, "--compare", "1") == 0
    weights = checkpoint.load(tmp_path / "run").weights
    expected = torch.float64 if precision == "float64" else torch.float32
    assert weights["blocks.0.recurrent.weight_hh_l0"].dtype == expected
    assert cli.run("evaluate", [str(tmp_path / "run"), "--debug"]) == 0


@pytest.mark.parametrize("cell", ["implicit-gru", "lstm", "rnn"])
def test_every_cell_trains_and_answers(cell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, solver = tmp_path / "run", "shooting:chunk=16"
    assert train(run, "--epochs", "1", "--compare", "1", "--cell", cell, "--solver", solver) == 0
    beside = "step by step" if cell == "implicit-gru" else "torch"
    assert capsys.readouterr().out.splitlines()[-1].endswith(f" {beside})")
    assert json.loads((run / "summary.json").read_text())["loss_difference"] < 1e-5
    assert cli.run("evaluate", [str(run), "--json", "--debug"]) == 0
    assert json.loads(capsys.readouterr().out)["difference"] < 1e-5


def test_predict_answers_its_first_batch_without_timeloom_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path / "run", "--epochs", "1") == 0
    arguments = [str(tmp_path / "run"), "--data", SMALL[1], "--out", str(tmp_path / "a.csv"), "--batch", "5"]
    capsys.readouterr()
    assert cli.run("predict", [*arguments, "--debug"]) == 0
    out = capsys.readouterr().out
    assert "32 series in" in out
    assert "The first 5 of them both ways:\nwithout timeloom (torch, " in out
    assert "100.0% of them agree" in out
    assert cli.run("predict", [*arguments, "--no-compare", "--debug"]) == 0
    assert "without timeloom" not in capsys.readouterr().out


def test_answers_without_timeloom_are_given_a_minute(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many series it answers the first ones, of series that are too long none; all are measured nevertheless."""
    run = str(tmp_path / "run")
    assert train(tmp_path / "run", "--epochs", "1") == 0
    clock = iter(float(i) for i in range(10**6))  # every answer takes a second
    monkeypatch.setattr("timeloom.app.train.inference.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    for most, compared in ((0.5, 0), (2.5, 4), (60.0, 8)):
        monkeypatch.setattr("timeloom.app.train.agreement.MOST_SECONDS", most)
        capsys.readouterr()
        assert cli.run("evaluate", [run, "--batch", "2", "--json", "--debug"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["series"], found["compared"], found["expected"]) == (8, compared, 4.0)
        assert (found["difference"] is None) == (compared == 0)
    monkeypatch.setattr("timeloom.app.train.agreement.MOST_SECONDS", 0.5)
    assert cli.run("evaluate", [run, "--batch", "2", "--debug"]) == 0
    assert "the same without timeloom (torch) was left out: it would take about 4 seconds" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # TensorBoard's own
def test_tensorboard_reads_the_rows_of_metrics_across_a_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from timeloom.app.train.trainer import Trainer

    plain = Trainer._one_step

    def stopping(self: Trainer) -> None:
        plain(self)
        if self.progress.step == 6:
            raise RuntimeError("pulled the plug")

    monkeypatch.setattr(Trainer, "_one_step", stopping)
    run = tmp_path / "run"
    with pytest.raises(RuntimeError, match="pulled"):
        train(run, "--epochs", "3", "--compare", "1", "--tensorboard")
    monkeypatch.undo()
    assert cli.run("train", ["--resume", str(run), "--debug"]) == 0  # from the end of the first epoch, step 4
    board = EventAccumulator(str(run))
    board.Reload()
    rows = read(run / "metrics.jsonl")
    for kind, names in (("step", ("loss", "sweeps", "lr")), ("validation", ("quality",)), ("torch", ("seconds",))):
        for name in names:
            shown = {event.step: event.value for event in board.Scalars(f"{kind}/{name}")}
            assert shown == {row["step"]: pytest.approx(row[name]) for row in rows if row["kind"] == kind}


def test_tensorboard_that_is_missing_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert cli.run("train", [*SMALL, "--tensorboard", "--out", str(tmp_path / "run")]) == 1
    assert "pip install 'timeloom[tensorboard]'" in capsys.readouterr().err
    assert train(tmp_path / "run", "--epochs", "1") == 0  # a start that failed does not stand in the way


@pytest.mark.parametrize("clip", [0.0, 1e-3])
def test_gradients_are_clipped_to_the_norm_asked_for(clip: float, tmp_path: Path) -> None:
    from timeloom.app.train.trainer import Trainer

    config = replace(TrainConfig(), data=SMALL[1], optim=OptimConfig(clip=clip))
    splits = split(load(config.data), 0.2, 0.2, 0)
    trainer = Trainer(config, splits, tmp_path, None, lambda row: None)
    trainer._one_step()
    norm = torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None]).norm().item()
    if clip:
        assert norm == pytest.approx(clip, rel=1e-3)
    else:
        assert norm > 1e-2
    trainer.metrics.close()


def test_weights_load_into_torchs_own_layer(tmp_path: Path) -> None:
    assert train(tmp_path / "run", "--epochs", "1") == 0
    weights = checkpoint.load(tmp_path / "run").weights
    layer = torch.nn.GRU(4, 8)
    prefix = "blocks.0.recurrent."
    layer.load_state_dict({k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)})
