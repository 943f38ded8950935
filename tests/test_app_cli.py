"""The command itself: it starts fast, knows its commands, and never shows a traceback unasked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import timeloom_command
from timeloom.app import cli
from timeloom.app.cli import bench
from timeloom.app.cli.output import READER_LEFT

SOURCE = str(Path(__file__).parents[1] / "src")


def python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": SOURCE}, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_help_does_not_wait_for_torch() -> None:
    loaded = "[m for m in ('torch', 'tyro') if m in sys.modules]"
    out = python(f"import sys, timeloom_command as command; command.main(['--help']); print({loaded})")
    assert all(name in out for name in timeloom_command.COMMANDS)
    assert out.endswith("[]\n")


def test_importing_timeloom_needs_torch_alone() -> None:
    libraries = (*cli.LIBRARIES, "matplotlib", "aeon")
    added = f"[m for m in {libraries} if m in set(sys.modules) - before]"
    assert python(f"import sys, torch; before = set(sys.modules); import timeloom; print({added})") == "[]\n"


def test_every_command_has_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    for command in timeloom_command.COMMANDS:
        with pytest.raises(SystemExit) as caught:
            timeloom_command.main([command, "--help"])
        assert caught.value.code == 0
        assert "usage" in capsys.readouterr().out


def test_an_unknown_command_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert timeloom_command.main(["fly"]) == 2
    assert "no command 'fly'; choose one of train" in capsys.readouterr().err
    assert timeloom_command.main(["trian"]) == 2
    assert capsys.readouterr().err.endswith("did you mean 'train'?\n")


def test_unexpected_errors_are_one_line_too_and_debug_shows_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(arguments: list[str]) -> int:
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr(bench, "main", broken)
    assert cli.run("bench", []) == 1
    assert capsys.readouterr().err == "error: RuntimeError: first line (run again with --debug to see where)\n"
    with pytest.raises(RuntimeError, match="second line"):
        cli.run("bench", ["--debug"])


FULL = Path("/dev/full")


@pytest.mark.skipif(not FULL.exists(), reason="this system has no device that is always full")
@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["doctor", "--steps", "64"]])
def test_output_that_cannot_be_written_is_told_in_one_line(words: list[str]) -> None:
    command = [sys.executable, "-m", "timeloom", *words]
    with FULL.open("w") as full:
        found = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert found.returncode == 1
    (line,) = found.stderr.splitlines()
    assert line.startswith("error: cannot write to standard output: No space left on device")
    reader, writer = os.pipe()
    os.close(reader)  # as `| head` that has read enough
    found = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (found.returncode, found.stderr) == (0 if words == ["--help"] else READER_LEFT, "")


def test_a_training_goes_on_without_a_reader(tmp_path: Path) -> None:
    """The reader leaves after the first line, before the first step."""
    command = [sys.executable, "-m", "timeloom", "train", "--data", "turning:length=64,train=8,valid=4,test=4",
               "--epochs", "2", "--compare", "0", "--out", str(tmp_path / "run")]  # fmt: skip
    found = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert found.stdout is not None
    assert found.stdout.readline().startswith("turning")
    found.stdout.close()
    assert found.stderr is not None
    said = found.stderr.read()
    found.stderr.close()
    assert found.wait() == 0
    assert said.count("\n") == 1
    assert "The training goes on without it" in said
    assert (tmp_path / "run" / "report.html").is_file()


def test_a_missing_library_says_what_to_install() -> None:
    assert cli.explain(ModuleNotFoundError("no tyro", name="tyro")) == (
        "this command needs tyro: pip install 'timeloom[app]'"
    )


@pytest.mark.parametrize(
    ("given", "run"),
    [
        ([], ["headline", "--out", "runs/bench"]),
        (["--threads", "1"], ["headline", "--threads", "1", "--out", "runs/bench"]),
        (["grid", "--out", "here"], ["grid", "--out", "here"]),
        (["--threads", "1", "grid"], ["--threads", "1", "grid", "--out", "runs/bench"]),
        (["--memory", "grid"], ["--memory", "grid", "--out", "runs/bench"]),
    ],
)
def test_bench_measures_the_headline_and_leaves_stored_results_alone(given: list[str], run: list[str]) -> None:
    assert bench.with_defaults(given) == run


def test_bench_outside_of_a_checkout_says_where_to_go(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(bench.timeloom, "__file__", str(tmp_path / "a" / "b" / "timeloom" / "__init__.py"))
    assert cli.run("bench", ["headline"]) == 1
    assert "`make bench`" in capsys.readouterr().err
