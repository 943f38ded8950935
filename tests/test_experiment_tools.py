"""What the experiments share: harness, list, page, readers of data sets, and the model of ranks."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import matplotlib
import numpy
import pytest
import torch
from matplotlib.image import imread

from experiments import __main__ as command_line
from experiments import cifar, harness, page, processes
from experiments.__main__ import draw
from experiments.catalogue import EXPERIMENTS, find
from experiments.deer import grid_report
from experiments.mgrit import rank_report
from experiments.readings import all_stored, device
from experiments.readings_deer import pixel_images


def test_all_experiments_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main([]) == 0
    told = capsys.readouterr().out
    assert all(one.name in told for one in EXPERIMENTS)
    scripts = {path for path in (harness.ROOT / "experiments").rglob("*.py") if "def main(" in path.read_text()}
    known = {harness.ROOT / (one.module_name.replace(".", "/") + ".py") for one in EXPERIMENTS}
    workers = {"__main__.py", "page.py", "rank_worker.py", "net_worker.py"}
    assert {path for path in scripts if path.name not in workers} == known


def test_an_unknown_name_is_answered_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command_line.main(["run", "deer.speed"])
    assert "there is no experiment 'deer.speed'; there are mgrit.ranks," in capsys.readouterr().err


def test_one_that_fails_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[list[str]] = []

    def fail(arguments: list[str]) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(find("deer.scan").module(), "main", fail)
    monkeypatch.setattr(find("deer.warm").module(), "main", calls.append)
    assert command_line.main(["run", "deer.scan", "deer.warm", "--fast", "--out", str(tmp_path)]) == 1
    assert calls == [["--fast", "--out", str(tmp_path / "deer.warm")]]
    assert "1 of 2 failed: deer.scan" in capsys.readouterr().err


def test_the_page_is_what_the_stored_results_make_it() -> None:
    assert page.main(check=True) == 0


@pytest.mark.parametrize("stored", all_stored(), ids=lambda path: f"{path.parent.parent.name}-{path.stem}")
def test_stored_tables_and_pictures_are_what_their_results_make_them(stored: Path, tmp_path: Path) -> None:
    draw(stored, tmp_path / "again.md")
    assert (tmp_path / "again.md").read_text() == stored.with_suffix(".md").read_text()
    if matplotlib.__version__ == drawn_with():  # another one draws other pixels
        again, kept = (imread(path) for path in (tmp_path / "again.png", stored.with_suffix(".png")))
        assert again.shape == kept.shape
        assert numpy.array_equal(again, kept)


def drawn_with() -> str:
    """The matplotlib of constraints.txt, by which the stored pictures are drawn."""
    lines = (harness.ROOT / "constraints.txt").read_text().splitlines()
    (version,) = (line.partition("==")[2] for line in lines if line.startswith("matplotlib=="))
    return version


def test_every_stored_table_and_picture_has_its_result() -> None:
    kept = {path for path in (harness.ROOT / "experiments").glob("*/results/*") if path.suffix in (".md", ".png")}
    assert kept == {path.with_suffix(suffix) for path in all_stored() for suffix in (".md", ".png")}


def test_every_stored_table_is_linked_by_its_readme() -> None:
    for table in (harness.ROOT / "experiments").glob("*/results/*.md"):
        assert f"(results/{table.name})" in (table.parents[1] / "README.md").read_text(), table


def test_rows_of_earlier_runs_are_told_from_those_of_the_last(tmp_path: Path) -> None:
    def machine(load: float) -> dict[str, Any]:
        return {"device": "x86_64", "threads": 1, "cores": 2, "load": load, "torch": "2.13"}

    stored = tmp_path / "grid.json"
    assert harness.kept(stored) == {"rows": [], "earlier": []}
    rows = [{"n": 1}, {"n": 2, "error": "MemoryError: not run"}]
    stored.write_text(json.dumps({"rows": rows, "machine": machine(0.2)}))
    again = {**harness.kept(stored), "machine": machine(9.0)}
    assert again["earlier"] == [{"rows": 2, "machine": machine(0.2)}]
    assert "first rows that were measured: 2 on x86_64, 1 thread of 2 cores, load 0.2" in harness.earlier_runs(again)
    again["rows"].append({"n": 3})
    stored.write_text(json.dumps(again))
    assert [one["rows"] for one in harness.kept(stored)["earlier"]] == [2, 1]
    assert harness.kept(stored, errors=False)["rows"] == [{"n": 1}, {"n": 3}]
    assert harness.earlier_runs({"rows": rows}) == ""


def test_a_graph_that_ran_in_order_is_not_shown_as_newtons_method() -> None:
    place = {"T": 1000, "B": 1, "forward_ms": 1.0, "both_ms": 2.0}
    rows = [
        {"way": way, "n": n, **place, "sweeps": sweeps}
        for n, sweeps in ((16, [5, 2]), (64, [1, 1]))
        for way in ("torch", "DEER, captured")
    ]
    assert "DEER, captured" in grid_report.by_place(rows)[16, 1000, 1]
    assert set(grid_report.by_place(rows)[64, 1000, 1]) == {"torch"}
    page_of_it = grid_report.table({"rows": rows, "note": "Here."})
    assert "1 graphs of DEER ran from step to step, and are not shown as DEER." in page_of_it


def test_the_load_that_a_result_met_is_told() -> None:
    machine = {"device": "x86_64", "threads": 1, "cores": 2, "load": 0.9}
    assert device({"machine": machine}) == "one CPU thread"
    assert device({"machine": {**machine, "threads": 2}}) == "2 CPU threads"
    assert device({"machine": {**machine, "load": 8.7}}) == "one CPU thread (load 9 on 2 cores)"
    assert device({"machine": {**machine, "device": "NVIDIA H200", "cores": 16, "load": None}}) == "NVIDIA H200"


def test_losses_are_compared_over_the_steps_that_both_ways_took() -> None:
    ways = {
        "torch": {"losses": [2.0, 1.0], "accuracy_by_epoch": [0.5], "seconds_a_step": 3.0},
        "parallel": {"losses": [2.0, 1.5, 0.1], "accuracy_by_epoch": [1.0], "seconds_a_step": 1.0},
    }
    told = pixel_images({"data": "images", "machine": {"device": "GPU", "threads": 1}, "ways": ways}).short
    assert "50% after 2 steps" in told
    assert "100% after 3 steps (losses of the first 2 apart by 5e-01), a step 3× as fast" in told


def test_stored_results_are_replaced_only_when_told() -> None:
    script = str(harness.ROOT / "experiments" / "deer" / "grid.py")
    parser = harness.command("A script.\n")
    assert harness.folder_of(harness.begin(parser, []), script) == harness.BUILD / "deer.grid"
    assert harness.folder_of(harness.begin(parser, ["--out", "there"]), script) == Path("there")
    assert harness.folder_of(harness.begin(parser, ["--store"]), script) == Path(script).with_name("results")
    with pytest.raises(SystemExit):
        harness.begin(parser, ["--store", "--out", "there"])


def test_what_would_be_ignored_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, arguments, told in (
        ("mgrit.instability", ["--fast", "--store"], "results in small would take the place of measured ones"),
        ("mgrit.ranks", ["--device", "cuda"], "invalid choice: 'cuda'"),
        ("deer_eigenworms", ["--twin", "--seeds", "3"], "--seeds, --twin: only with --data"),
        ("mgrit_hmdb51", ["--split", "9:1"], "--split: only with --data"),
        ("mgrit_hmdb51", ["--shape", "resnet-34", "--data", "there"], "--shape, --clips: only of generated clips"),
        ("mgrit.ranks", ["--rounds", "2", "--resume"], "rounds are of one run"),
        ("bppsa_bitstream", ["--epochs", "2"], "--epochs: only with --protocol paper"),
        ("deer_two_body", ["--pieces", "--grow", "20"], "pieces grow by themselves"),
        ("bppsa_vgg", ["--amount", "1.5"], "a share from 0 to below 1 is needed, got '1.5'"),
    ):
        with pytest.raises(SystemExit):
            find(name).module().main([*arguments, *([] if "--store" in arguments else ["--out", str(tmp_path)])])
        assert told in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def test_files_that_are_no_results_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cut.json").write_text("{")
    (tmp_path / "other.json").write_text("{}")
    for name, told in (("none", "cannot be read: No such file"), ("cut", "is no JSON file"), ("other", "does not say")):
        with pytest.raises(SystemExit):
            command_line.main(["draw", str(tmp_path / f"{name}.json")])
        error = capsys.readouterr().err
        assert told in error
        assert f"{name}.json" in error


def test_experiments_without_a_gpu_part_are_those_that_refuse_one() -> None:
    for one in EXPERIMENTS:
        refuses = "gpu=False" in Path(one.module().__file__ or "").read_text()
        assert refuses == (not one.gpu), one.name


LIMITED = (
    "mgrit.gradient_error",
    "mgrit.instability",
    "mgrit.accuracy",
    "deer.iterations",
    "deer.scan",
    "deer_two_body",
)


@pytest.mark.parametrize("name", LIMITED)
def test_a_time_that_is_over_leaves_a_page_of_what_there_is(name: str, tmp_path: Path) -> None:
    find(name).module().main(["--fast", "--minutes", "1e-12", "--out", str(tmp_path)])
    (path,) = tmp_path.glob("*.json")
    results = json.loads(path.read_text())
    rows = results.get("rows", results.get("sets", {}).get("generated series", {}).get("ways", []))
    assert len(rows) == 0
    assert len(results.get("found", {}).get("losses", [0])) == 1  # orbits: one step tells its time
    assert path.with_suffix(".md").exists()
    assert path.with_suffix(".png").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_and_odd_numbers_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, told in (
        (["--device", "cuda"], "torch sees no GPU"),
        (["--minutes", "0"], "got '0'"),
        (["--threads", "x"], "got 'x'"),
    ):
        with pytest.raises(SystemExit):
            harness.begin(harness.command("A script."), arguments)
        assert told in capsys.readouterr().err


def test_a_row_outlives_its_error(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> dict[str, Any]:
        raise ValueError("not this one\nand more")

    rows = [harness.attempt({"n": 1}, fail), harness.attempt({"n": 2}, lambda: {"ms": 3.0})]
    assert rows == [{"n": 1, "error": "ValueError: not this one"}, {"n": 2, "ms": 3.0}]
    assert harness.good(rows) == rows[1:]
    assert harness.errors(rows, ("n",))[-1] == "- n 1: ValueError: not this one"
    assert harness.errors(rows[1:], ("n",)) == []


def test_results_are_written_without_pictures_where_there_is_no_matplotlib(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def draw(results: dict[str, Any], path: Path) -> None:
        raise ImportError("No module named 'matplotlib'")

    def table(results: dict[str, Any]) -> str:
        return "a page\n"

    harness.write("name", {"losses": [1.0, 2.0]}, tmp_path, table, draw)
    assert json.loads((tmp_path / "name.json").read_text())["losses"] == [1.0, 2.0]
    assert (tmp_path / "name.md").read_text() == "a page\n"
    assert "python -m experiments draw" in capsys.readouterr().out


def test_a_clock_that_is_over_ends_the_turns() -> None:
    clock, calls = harness.Clock(1e-9), []
    taken = harness.in_turns({"a": lambda: calls.append(1) or (1.0,)}, turns=9, clock=clock, warm=2)
    assert clock.over
    assert len(calls) == 3
    assert len(taken["a"]) == 1


def test_processes_that_fail_tell_why() -> None:
    with pytest.raises(RuntimeError, match=r"No module named|Error"):
        processes.torchrun("experiments.no_such_module", 1, [], 120)


def test_the_model_of_ranks_finds_its_constants_and_predicts_the_longest() -> None:
    rows = [
        {"way": "exact multigrid", "ranks": r, "time_ranks": r, "steps": t, "collectives": 14 * (r > 1),
         "exchange_ms": 0.05 * r,
         "both_ms": 3 + 0.02 * t / r + 0.001 * t + 14 * (r > 1) * 0.05 * r}
        for r in (1, 2, 4, 8) for t in (128, 512, 2048)
    ]  # fmt: skip
    said = rank_report.predict(rows, "exact multigrid")
    assert [one["steps"] for one in said if one["held_out"]] == [2048] * 4
    assert all(one["ratio"] == pytest.approx(1, rel=1e-6) for one in said)
    assert rank_report.predict(rows[:3], "exact multigrid") == []


def test_the_model_of_ranks_has_no_negative_constants() -> None:
    features = torch.tensor([[1.0, 1.0], [1.0, 2.0], [1.0, 4.0]], dtype=torch.float64)
    found = rank_report.fitted(features, torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64))  # falls: a slope below 0
    assert found.tolist() == pytest.approx([2.0, 0.0])
    found = rank_report.fitted(features, torch.tensor([1.5, 2.5, 4.5], dtype=torch.float64))
    assert found.tolist() == pytest.approx([0.5, 1.0])


def test_cifar_10_is_read_in_both_formats(tmp_path: Path) -> None:
    generator = numpy.random.default_rng(0)
    images = generator.integers(0, 256, (6, 3072), dtype=numpy.uint8)
    labels = [3, 9, 0, 1, 2, 5]
    binary, pickled = tmp_path / "bin", tmp_path / "py"
    for folder in (binary, pickled):
        folder.mkdir()
    for number in range(2):
        part, own = images[3 * number : 3 * number + 3], labels[3 * number : 3 * number + 3]
        records = b"".join(bytes([label]) + row.tobytes() for label, row in zip(own, part, strict=True))
        (binary / f"data_batch_{number + 1}.bin").write_bytes(records)
        (pickled / f"data_batch_{number + 1}").write_bytes(pickle.dumps({b"data": part, b"labels": own}))
    loaded = [cifar.load(folder) for folder in (binary, pickled)]
    for x, y in loaded:
        assert x.shape == (6, 3, 32, 32)
        assert y.tolist() == labels
    assert torch.equal(loaded[0][0], loaded[1][0])
    first = (images[0, 0] / 255 - cifar.MEAN[0]) / cifar.SPREAD[0]
    assert float(loaded[0][0][0, 0, 0, 0]) == pytest.approx(first, rel=1e-5)
    assert len(cifar.load(binary, most=4)[1]) == 4


def test_files_that_are_not_cifar_10_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has none of test_batch .*; it holds nothing"):
        cifar.load(tmp_path, "test")
    (tmp_path / "test_batch.bin").write_bytes(bytes(100))
    with pytest.raises(ValueError, match=r"test_batch.bin has 100 bytes, and an image of CIFAR-10 3073"):
        cifar.load(tmp_path, "test")
    (tmp_path / "test_batch.bin").unlink()
    (tmp_path / "test_batch").write_bytes(pickle.dumps(print))  # a pickle may call anything
    with pytest.raises(ValueError, match=r"no file of CIFAR-10's pickles \(it names builtins.print\)"):
        cifar.load(tmp_path, "test")


def test_rows_of_other_sizes_are_not_kept(tmp_path: Path) -> None:
    """A small run of `--resume` must not pass a full run's rows off as its own."""
    stored = tmp_path / "ranks.json"
    stored.write_text(
        json.dumps({"machine": harness.facts(), "sizes": {"share": 1}, "rows": [{"way": "a", "ms": 1.0}]})
    )
    assert harness.kept(stored, sizes={"share": 16}) == {"rows": [], "earlier": []}
    assert len(harness.kept(stored, sizes={"share": 1})["rows"]) == 1
    assert harness.kept(tmp_path / "none.json", sizes={"share": 1})["rows"] == []
