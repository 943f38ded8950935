"""What goes wrong is told in one line that says what to do, `--debug` shows where, and no finished work is lost."""

from __future__ import annotations

import resource
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy
import pytest
import torch
from safetensors.torch import save_file

from timeloom.app import cli
from timeloom.app.errors import InputError
from timeloom.app.files import write_text
from timeloom.app.train import checkpoint
from timeloom.app.train.checkpoint import BEST, LAST
from timeloom.app.train.metrics_file import read

SMALL = ["--data", "turning:length=128,train=16,valid=8,test=8", "--hidden", "8", "--compare", "0"]
Tell = Callable[..., str]


def train(folder: Path, *more: str) -> int:
    return cli.run("train", [*SMALL, "--epochs", "1", "--out", str(folder), *more, "--debug"])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run; tests only look at it."""
    folder = tmp_path_factory.mktemp("wrong") / "run"
    assert train(folder) == 0
    return folder


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Tell:
    """The one line that a command fails with, or one for each problem, without a traceback."""

    def tell(command: str, *arguments: object) -> str:
        capsys.readouterr()
        assert cli.run(command, [str(word) for word in arguments]) == 1
        first, *others = capsys.readouterr().err.splitlines()
        assert first.startswith("error: ")
        assert bool(others) == first.endswith(" problems:")
        assert all(line.startswith("  ") for line in others)
        return "\n".join([first, *others])

    return tell


def test_debug_shows_where(run: Path) -> None:
    with pytest.raises(InputError, match="no such file or folder"):
        cli.run("predict", [str(run), "--data", "nowhere.csv", "--debug"])


@pytest.mark.parametrize("command", ["train", "predict"])
def test_a_missing_file(command: str, told: Tell, run: Path) -> None:
    options = ["--data", "data/nowhere.npy"]
    assert "data/nowhere.npy: no such file or folder" in told(
        command, *([run] if command == "predict" else []), *options
    )


def test_half_a_file(told: Tell, tmp_path: Path) -> None:
    numpy.save(tmp_path / "a.npy", numpy.zeros((500, 4)))
    whole = (tmp_path / "a.npy").read_bytes()
    (tmp_path / "a.npy").write_bytes(whole[: len(whole) // 2])
    assert "a.npy: not a whole .npy file" in told("train", "--data", tmp_path)


def test_bytes_that_are_no_text(told: Tell, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(bytes(range(128, 256)))
    assert "a.csv: not a CSV file in UTF-8" in told("train", "--data", tmp_path)


@pytest.mark.parametrize("values", [numpy.zeros((9, 2), dtype=complex), numpy.array(["a", "b"])])
def test_arrays_that_are_no_numbers(values: numpy.ndarray, told: Tell, tmp_path: Path) -> None:
    numpy.save(tmp_path / "a.npy", values)
    assert f"holds {values.dtype}, expected real numbers" in told("train", "--data", tmp_path)


def labelled(folder: Path, labels: str) -> Path:
    for i in range(8):
        (folder / f"{i}.csv").write_text("1,2,3,4\n5,6,7,8\n")
    (folder / "labels.csv").write_text("file,label\n" + labels)
    return folder


def test_labels_of_files_that_are_not_there(told: Tell, tmp_path: Path) -> None:
    said = told("train", "--data", labelled(tmp_path, "0.csv,a\n9.csv,b\n"))
    assert "labels.csv, line 3: " in said
    assert "9.csv: no such file; correct its name or remove the line" in said


def test_files_without_a_label(told: Tell, tmp_path: Path, run: Path) -> None:
    folder = labelled(tmp_path, "".join(f"{i}.csv,{'ab'[i % 2]}\n" for i in range(7)))
    assert "7.csv has no label; give it one, or move it away" in told("train", "--data", folder)
    assert cli.run("predict", [str(run), "--data", str(folder), "--out", str(tmp_path / "out.csv")]) == 0
    assert len((tmp_path / "out.csv").read_text().splitlines()) == 1 + 8


def test_an_index_of_labels_cut_short(told: Tell, tmp_path: Path) -> None:
    assert "line 3: no label; is the file cut short?" in told("train", "--data", labelled(tmp_path, "0.csv,a\n1.csv"))


def test_an_index_of_labels_without_a_file(told: Tell, tmp_path: Path) -> None:
    folder = labelled(tmp_path, "")
    (folder / "labels.csv").write_text("label,file\na\nb,1.csv\n")
    assert "line 2: no file; is the file cut short?" in told("train", "--data", folder)


def test_labels_that_the_model_does_not_know(told: Tell, tmp_path: Path, run: Path) -> None:
    folder = labelled(tmp_path, "".join(f"{i}.csv,sideways\n" for i in range(8)))
    said = told("evaluate", run, "--data", folder)
    assert "has the label 'sideways', which is none of backwards, forwards" in said


def test_a_label_among_many(told: Tell, tmp_path: Path) -> None:
    """Numbers at every step are taken for classes; not all of them are listed."""
    for name in "abcdef":
        numpy.save(tmp_path / f"{name}.npy", numpy.zeros((50, 1)))
        numpy.save(tmp_path / f"{name}.labels.npy", numpy.random.default_rng(ord(name)).normal(size=50))
    said = told("train", "--data", tmp_path)
    assert "…, the 200 classes trained on" in said
    assert len(said) < 600


@pytest.mark.parametrize("target", ["nan", "inf", "1e+300"])
def test_a_target_that_is_no_number(target: str, told: Tell, tmp_path: Path) -> None:
    folder = labelled(tmp_path, "".join(f"{i}.csv,{i if i != 5 else target}\n" for i in range(8)))
    index = folder / "labels.csv"
    index.write_text(index.read_text().replace("label", "target"))
    said = told("train", "--data", folder)
    assert f"5.csv has the target {target}" in said
    assert said.endswith("give it a number or remove it")


@pytest.mark.parametrize("split", ["test", "valid"])
def test_splits_that_leave_nothing(split: str, told: Tell, tmp_path: Path) -> None:
    folder = labelled(tmp_path, "".join(f"{i}.csv,{'ab'[i % 2]},{split}\n" for i in range(8)))
    index = folder / "labels.csv"
    index.write_text(index.read_text().replace("file,label", "file,label,split"))
    said = told("train", "--data", folder)
    assert "of 8 series none is left to train on" in said
    assert "change their split" in said


def test_a_series_with_a_missing_value(told: Tell, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,y\n1,2\n3,\n")
    assert "a.csv has a missing value at step 1, column 'y'; fill it with --fill, or remove it" in told(
        "train", "--data", tmp_path
    )


def test_an_unknown_solver_or_option_of_one(told: Tell) -> None:
    unknown = told("train", "--solver", "shoting:chunk=8")
    assert "solver must be one of" in unknown
    assert unknown.endswith("got 'shoting'; did you mean 'shooting'?")
    option = told("train", "--solver", "shooting:chunks=8")
    assert "shooting has no option 'chunks'" in option
    assert option.endswith("did you mean 'chunk'?")


def test_data_without_its_option(told: Tell) -> None:
    said = told("train", "my-folder", "--epochs", "2")
    assert said == "error: 'my-folder' stands without an option; data are given by --data my-folder"


def test_an_unknown_preset(told: Tell) -> None:
    said = told("train", "--preset", "eigenworm")
    assert "no preset 'eigenworm'; there are: default, eigenworms" in said
    assert said.endswith("; did you mean 'eigenworms'?")


def test_an_unknown_set(told: Tell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aeon", None)
    assert told("train", "--data", "turnign").endswith("did you mean 'turning'?")


def test_an_unknown_device(told: Tell, tmp_path: Path) -> None:
    assert "--device nowhere" in told("train", *SMALL, "--device", "nowhere", "--out", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_folder_that_holds_a_run(told: Tell, run: Path) -> None:
    before = (run / LAST).read_bytes()
    assert "holds a run already: go on with --resume" in told("train", *SMALL, "--out", run)
    assert (run / LAST).read_bytes() == before


def test_nothing_to_go_on_from(told: Tell, run: Path, tmp_path: Path) -> None:
    assert "no last.safetensors to go on from" in told("train", "--resume", tmp_path)
    assert "remove --lr 1" in told("train", "--resume", run, "--lr", "1")


def test_a_checkpoint_that_is_no_checkpoint(told: Tell, run: Path, tmp_path: Path) -> None:
    assert "no such checkpoint" in told("evaluate", tmp_path / "nothing")
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes((run / LAST).read_bytes()[:1000])
    assert "not a whole safetensors file" in told("evaluate", cut)
    save_file({"weight": torch.zeros(3)}, tmp_path / "other.safetensors")
    assert "not a checkpoint of this version of timeloom" in told(
        "predict", tmp_path / "other.safetensors", "--data", run
    )


def test_data_of_another_model(told: Tell, run: Path, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("1,2,3\n")
    assert "has 3 channels, the model was trained on 4" in told("predict", run, "--data", tmp_path)


def test_a_training_that_diverges(told: Tell, tmp_path: Path) -> None:
    said = told("train", *SMALL, "--lr", "1e30", "--clip", "0", "--cell", "rnn", "--out", tmp_path / "bad")
    assert "the training diverged. Lower --lr" in said
    assert "and start it again" in said  # there is no checkpoint to speak of


@pytest.mark.parametrize("every", ["1", "50"])
def test_weights_that_diverged_are_not_kept(every: str, told: Tell, tmp_path: Path) -> None:
    """The only step of an epoch has a finite loss and spoils the weights."""
    bad = tmp_path / "bad"
    options = ["--lr", "inf", "--batch", "100", "--epochs", "1", "--save-every", every]
    assert "the training diverged" in told("train", *SMALL, *options, "--out", bad)
    assert checkpoint.load(bad / LAST).progress.step == 0  # of before the training
    assert not (bad / BEST).exists()
    assert train(bad, "--epochs", "1") == 0  # such a folder may be begun anew


def test_weights_that_diverge_between_epochs_leave_the_last_checkpoint(told: Tell, tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    steps = ["--batch", "8", "--save-every", "1", "--schedule", "constant", "--clip", "0", "--weight-decay", "1e25"]
    said = told("train", *SMALL, *steps, "--lr", "1e10", "--warmup", "100000", "--epochs", "4", "--out", bad)
    assert f"are in {bad / LAST}" in said
    assert all(tensor.isfinite().all() for tensor in checkpoint.load(bad / LAST).weights.values())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("epochs = 3\n", "no setting 'epochs'"),
        ("[optim]\nepoch = 3\n", "no setting 'epoch'; did you mean 'epochs'?"),
        ('[optim]\nepochs = "3"\n', "epochs = '3' must be a whole number"),
        ("[optim]\nbetas = [0.9]\n", "betas = [0.9] must be a list of 2 numbers"),
        ('[model]\ncell = "grru"\n', "cell = 'grru' must be one of gru"),
        ("seed = -1\n", "--seed must be at least 0"),
        ("seed = ", "not a whole TOML file"),
        ("model = 3\n", "[model] must be a table"),
    ],
)
def test_a_configuration_that_is_none(text: str, said: str, told: Tell, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(text)
    assert said in told("train", "--config", tmp_path / "run.toml")
    assert "no such file" in told("train", "--config", tmp_path / "none.toml")


def test_garbage_at_the_end_of_the_metrics(run: Path, tmp_path: Path) -> None:
    """As a power cut may leave it."""
    for path in run.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    before = (tmp_path / "metrics.jsonl").read_bytes()
    (tmp_path / "metrics.jsonl").write_bytes(before + b"\xff\xfe\x00\n")
    assert cli.run("train", ["--resume", str(tmp_path), "--debug"]) == 0
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_a_place_that_cannot_be_written_to(told: Tell, run: Path, tmp_path: Path) -> None:
    assert "is a folder; give the name of a file in it" in told("predict", run, "--data", SMALL[1], "--out", tmp_path)
    assert "does not exist; create it first" in told("inspect", run, "--out", tmp_path / "a" / "b.html")
    with pytest.raises(InputError, match="name a file in a folder that can be written to") as caught:
        write_text(tmp_path / "a" / "b.txt", "")
    assert "make room" not in str(caught.value)
    assert "was there before" not in str(caught.value)


def test_several_processes(told: Tell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    said = told("train", *SMALL, "--time-ranks", "3")
    assert "--time-ranks 3 does not divide the 4 processes: give a divisor of 4" in said
    assert "each takes a GPU of its own; give --device cuda or cpu" in told("train", *SMALL, "--device", "cuda:1")


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """No file can grow beyond some bytes, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def same(one: Path, other: Path) -> bool:
    a, b = (checkpoint.load(path).weights for path in (one, other))
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("size", [10_500, 17_500])
def test_a_full_disk_loses_nothing_and_room_lets_the_run_go_on(size: int, told: Tell, tmp_path: Path) -> None:
    """Full while rows are written; and later, when only the report no longer fits."""
    options = ["--hidden", "8", "--epochs", "9"]
    assert train(tmp_path / "whole", *options) == 0
    run = tmp_path / "run"
    with room_for(size):
        said = told("train", *SMALL, *options, "--out", run)
    assert "cannot write" in said
    assert f"(timeloom train --resume {run})" in said
    step = checkpoint.load(run / LAST).progress.step
    assert step >= 4
    assert tomllib.loads((run / "run.toml").read_text())["optim"]["epochs"] == 9
    assert cli.run("train", ["--resume", str(run), "--debug"]) == 0
    for name in (LAST, BEST):
        assert same(run / name, tmp_path / "whole" / name)
    assert [row["step"] for row in read(run / "metrics.jsonl") if row["kind"] == "step"] == list(range(1, 37))
    assert (run / "report.html").is_file()


def test_answers_that_cannot_be_written_leave_the_old_ones(told: Tell, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "answers.csv"
    out.write_text("of before")
    with room_for(500):
        assert "cannot write" in told("predict", run, "--data", SMALL[1], "--out", out)
    assert out.read_text() == "of before"
    assert [path.name for path in tmp_path.iterdir()] == ["answers.csv"]
    assert "does not exist; create it first" in told("predict", run, "--data", SMALL[1], "--out", tmp_path / "a" / "b")


def test_written_files_can_be_read_by_others(run: Path) -> None:
    mask = int(subprocess.run(["sh", "-c", "umask"], capture_output=True, text=True, check=True).stdout, 8)
    assert all(path.stat().st_mode & 0o777 == 0o666 & ~mask for path in run.iterdir())


def numbers(folder: Path, targets: list[float]) -> Path:
    """A folder of series with a number each."""
    folder.mkdir()
    drawn = numpy.random.default_rng(0)
    for index in range(len(targets)):
        numpy.save(folder / f"s{index}.npy", drawn.normal(size=(40, 2)))
    lines = [f"s{index}.npy,{target}" for index, target in enumerate(targets)]
    (folder / "labels.csv").write_text("\n".join(["file,target", *lines]))
    return folder


def test_an_empty_array_is_named_with_all_else(tmp_path: Path, told: Tell) -> None:
    folder = numbers(tmp_path / "data", [1, 2, 3, 4, 5, 6])
    numpy.save(folder / "s2.npy", numpy.zeros((0, 2)))
    numpy.save(folder / "s4.npy", numpy.zeros((3, 2, 2)))
    said = told("train", "--data", folder, "--out", tmp_path / "run")
    assert "s2.npy: is empty; remove it" in said
    assert "s4.npy" in said


def test_targets_that_are_all_the_same_are_refused(tmp_path: Path, told: Tell) -> None:
    said = told("train", "--data", numbers(tmp_path / "data", [5.0] * 12), "--out", tmp_path / "run")
    assert "all training series have the target 5; two are needed" in said


def test_classes_of_numbers_cannot_be_balanced(tmp_path: Path, told: Tell) -> None:
    folder = numbers(tmp_path / "data", list(range(12)))
    said = told("train", "--data", folder, "--class-weights", "balanced", "--out", tmp_path / "run")
    assert "--class-weights balanced is for classes, and this is a regression; leave it out" in said
    assert not (tmp_path / "run").exists()


def test_a_first_loss_that_is_not_finite_is_not_blamed_on_the_learning_rate(tmp_path: Path, told: Tell) -> None:
    folder = numbers(tmp_path / "data", [1e37] * 6 + list(range(6)))
    said = told("train", "--data", folder, "--epochs", 1, "--compare", 0, "--hidden", 4, "--out", tmp_path / "run")
    assert "the loss of step 1 is inf, before anything was learned" in said
    assert "--lr" not in said
