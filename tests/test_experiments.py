"""Every experiment on the papers runs, in small, and says what its data are."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure

from benchmarks import pipeline
from experiments.__main__ import draw
from experiments.bppsa_bitstream import run as bitstream
from experiments.bppsa_vgg import ranks as vgg_ranks
from experiments.catalogue import EXPERIMENTS, find
from experiments.deer_two_body import run as two_body
from experiments.deer_two_body.hamiltonian import Hamiltonian, orbits
from experiments.mgrit import rank_report
from experiments.mgrit_hmdb51 import standin

ROOT = Path(__file__).parents[1]
FOLDERS = sorted({one.name for one in EXPERIMENTS if "." not in one.name})

pytestmark = pytest.mark.usefixtures("one_thread")

Check = Callable[[dict[str, Any], str], None]


def clips(results: dict[str, Any], page: str) -> None:
    assert results["data"].startswith("generated stand-in for")
    assert "generated stand-in" in page
    ways = results["ways"]
    assert len(ways) == 5
    assert ways["GRU, torch"]["losses"] == pytest.approx(ways["GRU, timeloom"]["losses"], rel=1e-4)
    exact, serial = ways["implicit GRU, exact multigrid"], ways["implicit GRU, in order"]
    assert exact["losses"] == pytest.approx(serial["losses"], rel=1e-3)
    assert exact["accuracy"] == exact["accuracy_in_order"] == serial["accuracy"]
    assert all(len(way["test_accuracy"]) == results["setting"]["epochs"] for way in ways.values())


def processes(results: dict[str, Any], page: str) -> None:
    rows = results["rows"]
    assert not [row for row in rows if "error" in row]
    two = [row for row in rows if row["ranks"] == 2]
    published = "multigrid as published"
    exact = {"exact multigrid", "exact multigrid, long memory"}
    assert {row["way"] for row in two} == exact | {published, f"{published}, more levels"}
    assert {row["time_ranks"] for row in two} == {1, 2}
    pure = [row for row in two if row["time_ranks"] == 2]
    assert all(row["collectives"] > 0 for row in pure)
    assert max(row["states_off"] for row in pure) < 1e-5
    assert max(row["gradients_off"] for row in pure) < 1e-4
    assert set(rank_report.shared_with_data(rows)) == {(1, 2), (2, 1)}
    assert {"GRU, serial", "implicit GRU, serial"} <= {row["way"] for row in rows}
    assert "The paper: up to 6.5×" in page


def nets(results: dict[str, Any], page: str) -> None:
    rows = {(row["way"], row["ranks"]): row for row in results["rows"]}
    assert set(rows) == {("multigrid as published", 1), ("multigrid as published", 2), ("GRU, serial", 1)}
    assert rows["GRU, serial", 1]["features_ms"] == rows["multigrid as published", 1]["features_ms"]


def worms(results: dict[str, Any], page: str) -> None:
    assert results["data"].startswith("generated stand-in for EigenWorms")
    runs = results["runs"]
    assert runs["parallel"]["loss_difference"] < 1e-4
    assert runs["parallel, short"]["losses"] == pytest.approx(runs["torch, short"]["losses"], rel=1e-4)


def two_bodies(results: dict[str, Any], page: str) -> None:
    found = results["found"]
    assert found["losses"][-1] < found["losses"][0]
    assert len(found["compared"]) == 2
    assert max(one["gradient_difference"] for one in found["compared"]) < 1e-10
    assert len(found["validation"]["by_time"]) == len(found["validation"]["times"])
    assert torch.get_default_dtype() == torch.float32


def bit_streams(results: dict[str, Any], page: str) -> None:
    assert max(one["difference"] for found in results["backward"].values() for one in found.values()) < 1e-5
    ways = results["training"]["ways"]
    for name in ("default", "scan"):
        assert ways[name]["losses"] == pytest.approx(ways["torch"]["losses"], rel=1e-4)


def speedups(results: dict[str, Any], page: str) -> None:
    rows = results["rows"]
    assert not [row for row in rows if "error" in row]
    assert {(row["steps"], row["batch"]) for row in rows} == {(40, 2), (40, 3), (90, 2), (90, 3)}
    assert max(row["gradient_error"] for row in rows) < 1e-5
    assert {row["backward_by"].split(",")[0] for row in rows if "levels" in row["way"]} == {"blelloch scan"}
    assert "108×" in page
    assert "2.75×" in page


def vgg(results: dict[str, Any], page: str) -> None:
    assert results["largest_difference"] < 1e-4
    assert results["losses"]["scan"] == pytest.approx(results["losses"]["autograd"], rel=1e-4)
    assert results["levels"][0]["critical_flops"] == results["levels"][0]["total_flops"]
    assert results["levels"][-1]["critical_steps"] < results["levels"][0]["critical_steps"]
    assert results["serial_sparse_flops"] < results["serial_dense_flops"]
    assert all(0 <= row["zeros"] < 1 for row in results["jacobians"])
    assert "generated stand-in for CIFAR-10" in page


def workers(results: dict[str, Any], page: str) -> None:
    assert not [row for row in results["rows"] if "error" in row]
    assert {(row["way"], row["ranks"]) for row in results["rows"]} == {
        ("levels=1", 2),
        ("levels=2", 2),
        ("all levels", 2),
    }
    products = results["rows"][-1]["products"]
    one, two = (vgg_ranks.modelled(products, count) for count in (1, 2))
    assert one == pytest.approx(sum(cost for _, _, cost in products))
    assert two < one


def coarse_steps(results: dict[str, Any], page: str) -> None:
    last = {(row["step"], row["factor"]): row["residuals"][-1] for row in results["rows"]}
    assert last["explicit", 8] > 10 * last["implicit", 8]
    assert last["explicit", 8] > 10 * last["frozen", 8]


def grid(results: dict[str, Any], page: str) -> None:
    rows = results["rows"]
    assert not [row for row in rows if "error" in row]
    assert len(rows) == 2 * 2 * 7
    compared = [row for row in rows if row["way"] != "loop"]
    assert max(row["output_error"] for row in compared) < 1e-5
    assert max(row["gradient_error"] for row in compared) < 1e-4
    assert "3 orders of magnitude" in page


def tolerances(results: dict[str, Any], page: str) -> None:
    rows = {(row["solver"], row["power"]): row for row in results["rows"]}
    for solver in ("DEER", "quasi-DEER", "shooting"):
        rough, fine = rows[solver, 1], rows[solver, 12]
        assert fine["sweeps"][0] > rough["sweeps"][0]
        assert max(fine["output_error"], fine["gradient_error"]) < 1e-11
        assert rough["output_error"] > 1e-6
        assert not fine["fell_back"]


def images(results: dict[str, Any], page: str) -> None:
    ways = results["ways"]
    for name in ("parallel", "DEER"):
        assert ways[name]["losses"] == pytest.approx(ways["torch"]["losses"], rel=1e-3)
    assert "90.25 %" in page


def warm(results: dict[str, Any], page: str) -> None:
    rows = {(row["solver"], row["warm"]): row for row in results["rows"]}
    for solver in ("DEER", "quasi-DEER", "shooting"):
        cold, guessed = rows[solver, False], rows[solver, True]
        assert guessed["losses"] == pytest.approx(cold["losses"], rel=1e-3)
        assert guessed["sweeps"][0] == cold["sweeps"][0]
        assert guessed["sweeps"][-1] <= cold["sweeps"][-1]


def odes(results: dict[str, Any], page: str) -> None:
    assert len(results["rows"]) == 3 * 2 * 5
    assert all(row["error"] < 1e-3 for row in results["rows"])


CHECKS: dict[str, Check] = {
    "mgrit_hmdb51.nets": nets,
    "mgrit_hmdb51": clips, "mgrit_har": clips, "mgrit.ranks": processes, "deer_eigenworms": worms, "ode": odes,
    "deer_two_body": two_bodies, "bppsa_bitstream": bit_streams, "bppsa_bitstream.grid": speedups,
    "bppsa_vgg": vgg, "bppsa_vgg.ranks": workers, "mgrit.instability": coarse_steps,
    "deer.grid": grid, "deer_cifar": images, "deer.tolerance": tolerances, "deer.warm": warm,
}  # fmt: skip


@pytest.mark.parametrize("name", [one.name for one in EXPERIMENTS if one.name != "bppsa_irmas"])  # test_irmas.py has it
def test_each_experiment_runs_in_small(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as plain:
        plain.setattr(Figure, "savefig", lambda _, path, **__: Path(path).touch())  # one picture is drawn below
        find(name).module().main(["--fast", "--out", str(tmp_path)])
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".md", ".png"}
    (path,) = tmp_path.glob("*.json")
    results, page = json.loads(path.read_text()), path.with_suffix(".md").read_text()
    assert "| --" in page
    if name in CHECKS:
        CHECKS[name](results, page)
    path.with_suffix(".png").unlink()
    draw(path)  # what is stored is enough to make the page and the picture once more
    assert path.with_suffix(".md").read_text() == page
    assert path.with_suffix(".png").stat().st_size > 1000


def test_streams_by_the_papers_protocol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bitstream, "MOST_KEPT", 5)
    find("bppsa_bitstream").module().main(["--fast", "--protocol", "paper", "--epochs", "3", "--out", str(tmp_path)])
    about = json.loads((tmp_path / "bitstream_paper.json").read_text())["training"]
    assert {key: about[key] for key in ("rate", "clip", "epochs", "sequences", "steps")} == {
        "rate": 1e-5, "clip": None, "epochs": 3, "sequences": 64, "steps": 12}  # fmt: skip
    for one in about["ways"].values():
        assert (one["steps"], one["every"], len(one["losses"]), len(one["elapsed"])) == (12, 3, 4, 4)
        assert one["losses"][0] == pytest.approx(sum(one["first_losses"][:3]) / 3, abs=1e-5)
        assert one["first_losses"] == pytest.approx(about["ways"]["torch"]["first_losses"], rel=1e-4)
    assert "3 epochs of 64 streams" in (tmp_path / "bitstream_paper.md").read_text()


def test_rounds_of_all_rows_and_their_medians(tmp_path: Path) -> None:
    given = ["--fast", "--rounds", "2", "--ranks", "1", "--steps", "128"]
    find("mgrit.ranks").module().main([*given, "--out", str(tmp_path)])
    results = json.loads((tmp_path / "ranks_rounds.json").read_text())
    rows = results["rows"]
    assert not [row for row in rows if "error" in row]
    assert len({(row["way"], row.get("time_ranks")) for row in rows}) == len(rows)
    assert all(len(row["rounds_ms"]) == 2 for row in rows)
    assert all(row["both_ms"] == pytest.approx(sum(row["rounds_ms"]) / 2, abs=1e-3) for row in rows)
    assert "of 2 rounds of all rows the median" in (tmp_path / "ranks_rounds.md").read_text()


def test_problems_that_are_there_are_not_solved_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = find("ode").module()
    monkeypatch.setattr(module, "PROBLEMS", {"two bodies, n=8": module.PROBLEMS["two bodies, n=8"]})
    module.main(["--fast", "--out", str(tmp_path)])
    path = tmp_path / "ode.json"
    whole = json.loads(path.read_text())
    kept = [row for row in whole["rows"] if (row["problem"], row["dtype"]) != ("two bodies, n=8", "float32")]
    path.write_text(json.dumps({**whole, "rows": kept}))
    module.main(["--fast", "--resume", "--out", str(tmp_path)])
    rows = json.loads(path.read_text())["rows"]
    assert rows[: len(kept)] == kept
    assert {(row["problem"], row["dtype"]) for row in rows[len(kept) :]} == {("two bodies, n=8", "float32")}
    assert len(rows) == len(whole["rows"])
    page = path.with_suffix(".md").read_text()
    assert f"Of earlier runs are the first rows that were measured: {len(kept)} on" in page


def test_clips_given_as_files_by_the_papers_shares_and_over_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The video experiment end to end: clips in folders, 9:1, features and time shared by two processes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    standin.write_clips(tmp_path / "set", 10, 32, ("leave", "blink"))
    net = standin.write_net(tmp_path / "net", 20, width=8)
    given = ["--data", str(tmp_path / "set" / "clips"), "--classes", "leave+blink", "--net", str(net), "--split", "9:1"]
    find("mgrit_hmdb51").module().main([*given, "--fast", "--ranks", "2", "--out", str(tmp_path / "out")])
    results = json.loads((tmp_path / "out" / "clips_leave_blink_net_9_1.json").read_text())
    assert results["data"] == "clips, leave+blink, net, 9:1 split"
    shares = {key: results["setting"][key] for key in ("train", "valid", "test", "frames", "epochs")}
    assert shares == {"train": 16, "valid": 2, "test": 2, "frames": 32, "epochs": 2}
    alone, together = (results["ways"][f"implicit GRU, multigrid as published{more}"] for more in ("", ", 2 processes"))
    assert together["losses"] == pytest.approx(alone["losses"], rel=1e-4)
    assert together["accuracy"] == alone["accuracy"]


def test_a_random_net_of_a_given_shape(tmp_path: Path) -> None:
    from transformers import ResNetForImageClassification

    shape = {"layer_type": "bottleneck", "depths": [2, 3], "hidden_sizes": [16, 32]}
    net = ResNetForImageClassification.from_pretrained(standin.write_net(tmp_path, 12, shape=shape)).eval()
    assert [len(stage.layers) for stage in net.resnet.encoder.stages] == shape["depths"]
    with torch.no_grad():
        made = net(torch.rand(4, 3, 64, 64)).logits
    assert made.shape == (4, 12)
    assert 0.1 < made.std().item() < 100  # however deep it is


@pytest.mark.parametrize(("protocol", "trained_on", "tested_on"), [("given", 32, 40), ("paper", 56, 12)])
def test_worms_are_shared_out_as_their_protocol_says(
    protocol: str, trained_on: int, tested_on: int, tmp_path: Path
) -> None:
    for part in ("TRAIN", "TEST"):
        lines = [f"{i % 7},{i % 5},1:{i % 3},0,{i}:{'ab'[i % 2]}" for i in range(40)]
        head = ["@problemName Few", "@timeStamps false", "@univariate false", "@classLabel true a b", "@data"]
        (tmp_path / f"Few_{part}.ts").write_text("\n".join([*head, *lines]) + "\n")
    given = ["--data", str(tmp_path / "Few_TRAIN.ts"), "--protocol", protocol, "--seeds", "1", "--fast"]
    find("deer_eigenworms").module().main([*given, "--out", str(tmp_path / "out")])
    results = json.loads((tmp_path / "out" / f"few{'_paper' * (protocol == 'paper')}.json").read_text())
    assert results["data"] == "Few: 80 series of 3 steps, 2 channels, 2 classes"
    assert results["protocol"]["name"] == protocol
    run = results["runs"]["parallel, seed 0"]
    assert (run["steps"], run["test_series"]) == (trained_on // 4, tested_on)


def test_orbits_of_the_papers_kind_grow_from_epoch_to_epoch(tmp_path: Path) -> None:
    given = ["--fast", "--size", "paper", "--steps", "240", "--grow", "60", "--epochs", "5"]
    find("deer_two_body").module().main([*given, "--out", str(tmp_path)])
    results = json.loads((tmp_path / "two_body_paper.json").read_text())
    sizes, found = results["sizes"], results["found"]
    assert (sizes["activation"], sizes["kinetic"], sizes["layers"]) == ("softplus", "learned", 6)
    assert [one["steps"] for one in found["compared"]] == [200, 200]  # fewer than an orbit's: the loop is scaled
    assert max(one["gradient_difference"] for one in found["compared"]) < 1e-10
    assert found["losses"][0] < found["losses"][-1]  # a short piece of an orbit at first
    assert len(found["cold_newton_steps"]) == 1
    first = orbits(1000, torch.Generator().manual_seed(0), "as in the paper")
    radius, speed = first[:, :2].norm(dim=1), first[:, 4:6].norm(dim=1)
    assert float(radius.min()) == pytest.approx(0.5, abs=0.01)
    assert float(radius.max()) == pytest.approx(1.5, abs=0.01)
    share = speed / (0.5 / radius.sqrt())
    assert float(share.min()) == pytest.approx(0.7, abs=0.01)
    assert float(share.max()) == pytest.approx(1.0, abs=0.01)


def test_pieces_of_orbits_begin_anywhere_and_grow(tmp_path: Path) -> None:
    given = ["--fast", "--size", "paper", "--steps", "400", "--pieces", "--epochs", "6", "--rate", "0.003"]
    find("deer_two_body").module().main([*given, "--out", str(tmp_path)])
    results = json.loads((tmp_path / "two_body_paper.json").read_text())
    assert len(results["found"]["losses"]) == 6
    assert results["found"]["newton_steps"] == []  # no piece is known from the epoch before
    assert "growing pieces of the orbits that begin anywhere" in (tmp_path / "two_body_paper.md").read_text()
    assert [two_body.piece_of(share, 400) for share in (0.0, 0.5, 1.0)] == [21, 41, 81]
    truth = torch.arange(10.0)[:, None, None] + torch.tensor([0.0, 100.0])[:, None].expand(2, 8)
    first, target = two_body.pieces(truth, 4, torch.Generator().manual_seed(3))
    assert torch.equal(target[0], first)
    assert torch.equal(target - first, torch.arange(4.0)[:, None, None].expand(4, 2, 8))
    assert len(set((first[:, 0] % 100).tolist())) == 2  # each from a point of its own
    network = Hamiltonian(64, 6, "softplus", "learned")
    network.keep_scale()
    spread = network.energy(torch.randn(500, 8, generator=torch.Generator().manual_seed(0))).std()
    assert 0.1 < spread.item() < 10


def test_a_pruned_network_with_norms(tmp_path: Path) -> None:
    find("bppsa_vgg").module().main(["--fast", "--norm", "--out", str(tmp_path)])
    results = json.loads((tmp_path / "generated_norm.json").read_text())
    assert results["largest_difference"] < 1e-4
    assert any("BatchNorm2d" in row["layer"] for row in results["jacobians"])


@pytest.mark.parametrize("name", FOLDERS)
def test_each_paper_has_its_page(name: str) -> None:
    text = (ROOT / "experiments" / name / "README.md").read_text()
    for part in (f"python -m experiments.{name}.run", "--fast", "## The paper", "## Ours", "## What differs"):
        assert part in text, part
    for word in text.split("](")[1:]:
        assert (ROOT / "experiments" / name / word.partition(")")[0].partition("#")[0]).exists() or "://" in word
    assert f"[{name}]({name}/README.md)" in (ROOT / "experiments" / "README.md").read_text()


def test_wrong_data_end_an_experiment_with_a_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = str(tmp_path / "missing.ts")
    told = {"mgrit_hmdb51": "no such", "deer_eigenworms": "no such", "mgrit_har": "no such", "bppsa_vgg": "is not a "
                                                                                                          "folder",
            "deer_cifar": "is not a folder"}  # fmt: skip
    for name, words in told.items():
        with pytest.raises(SystemExit):
            importlib.import_module(f"experiments.{name}.run").main(["--data", missing])
        error = capsys.readouterr().err
        assert "missing.ts" in error
        assert words in error


def test_the_wait_for_data_is_measured(tmp_path: Path) -> None:
    pipeline.main(["--small", "--out", str(tmp_path)])
    results = json.loads((tmp_path / "pipeline.json").read_text())
    for ways in results["cases"].values():
        assert all(0 <= way["share"] < 1 for way in ways.values())
    assert "| clips |" in (tmp_path / "pipeline.md").read_text()
