"""What is not stored yet: told, made where a machine can, gone on with, and kept."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from experiments import __main__ as command_line
from experiments import missing, wanted
from experiments.catalogue import find
from experiments.claims import CLAIMS
from experiments.readings import all_stored
from experiments.wanted import WANTED, Wanted

pytestmark = pytest.mark.usefixtures("one_thread")


def test_every_result_that_is_wanted_has_its_experiment() -> None:
    assert len({one.result for one in WANTED}) == len(WANTED)
    for one in WANTED:
        folder, _, name = one.result.partition("/")
        assert find(one.experiment).name.partition(".")[0] == folder
        assert find(one.experiment).gpu or one.device == "cpu"
        assert name.removesuffix("_paper").endswith("_cuda") == (one.device == "cuda")


def test_a_claim_reads_what_is_stored_or_wanted() -> None:
    """But for runs on real data that are like a wanted one, and for results that take another's place."""
    known = {one.result for one in WANTED} | {f"{path.parts[-3]}/{path.stem}" for path in all_stored()}
    for claim in CLAIMS:
        assert claim.results[-1] in known or claim.results[0] in known, claim.says
        find(claim.command.split()[0].removesuffix(".run"))


def test_what_is_missing_is_listed_with_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["missing", "--device", "cuda"]) == 0
    told = capsys.readouterr().out
    for one in WANTED:
        absent = one.device == "cuda" and bool(one.missing())
        assert (f"{one.result}: " in told) == absent
        assert not absent or f"python -m experiments run {one.experiment} {shlex.join(one.command)}" in told


def test_what_stored_results_lack_is_told() -> None:
    grid = {"rows": [{"way": "torch", "n": 1, "T": 1000, "B": 1}]}
    assert wanted._speed_grid(grid) == "519 of 520 cases"
    assert wanted._processes(16)({"rows": [{"ranks": 2}]}) == "no more than 2 processes"
    assert wanted._processes(16)({"rows": [{"ranks": 16}]}) == ""
    found: dict[str, Any] = {"sizes": {"orbits": [4, 1, 1], "batch": 2}, "found": {"losses": [1.0]}}
    assert wanted._orbits(found) == "1 training steps, too few to learn from"
    found["found"]["losses"] *= 2
    assert wanted._orbits(found) == "not the paper's orbits"
    found["sizes"]["drawn"] = "as in the paper"
    found["found"]["validation"] = {"error": 0.44, "standing_still": 0.49}
    assert wanted._orbits(found) == "not learned: errors of 0.44, standing still 0.49"
    found["found"]["validation"]["error"] = 0.2
    assert wanted._orbits(found) == ""


def test_runs_that_a_time_limit_ended_are_not_taken_for_whole_ones() -> None:
    rows = [{"way": "levels=1", "ranks": 16}, {"way": "all levels", "ranks": 4}]
    assert wanted._every_way(16)({"rows": rows}) == "processes of all levels: no more than 4"
    assert wanted._every_way(4)({"rows": rows}) == ""
    assert wanted._all_lengths({"lengths": {"259": {}}}) == "its forward pass is not in order"
    assert wanted._all_lengths({"forward": "in order", "lengths": {"259": {}}}) == "1 of 3 lengths"
    assert wanted._all_lengths({"forward": "in order", "lengths": {"259": {}, "517": {}, "1034": {}}}) == ""
    row = {"problem": "network, n=4", "dtype": "float64"}
    assert wanted._all_problems({"rows": [row, row]}) == "1 of 6 problems"
    rounds = {"rows": [{"way": "GRU, serial", "ranks": 1, "steps": 16384, "rounds_ms": [1.0, 2.0]}]}
    assert wanted._ranks(16384, rounds=3)(rounds) == "rows of 2 of 3 rounds"
    assert wanted._ranks(16384, rounds=2)(rounds) == "20 of 21 cases"
    training: dict[str, Any] = {"steps": 2000, "ways": {"torch": {"steps": 2000}, "scan": {"steps": 1500}}}
    assert wanted._every_epoch({"training": training}) == "of 2,000 training steps scan 1,500"
    training["ways"]["scan"]["steps"] = 2000
    assert wanted._every_epoch({"training": training}) == ""
    assert wanted._dated({"machine": {}})
    assert not wanted._dated({"machine": {"day": "2026-11-19"}})


def test_missing_results_are_made_gone_on_with_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In small on this machine: one that resumes, one that needs more cores, one without time, and no second time."""

    def lacks(results: dict[str, Any]) -> str:
        return "" if len(results["rows"]) > 1 else "rows"

    kept = tmp_path / "kept"
    (kept / "deer" / "results").mkdir(parents=True)
    monkeypatch.setattr(Wanted, "stored_at", property(lambda one: kept / "deer" / "results" / f"{one.result[5:]}.json"))
    grid = Wanted("deer/grid_cpu", "deer.grid", ("--resume", "--ways", "torch", "shooting"), 1, "cpu", lacks=lacks)
    pieces = (
        grid,
        Wanted("deer/warm", "deer.warm", (), 1, "cpu", cores=10**6),
        Wanted("deer/scan", "deer.scan", (), 10**6, "cpu"),
    )
    monkeypatch.setattr(missing, "WANTED", pieces)
    row = {"way": "torch", "n": 2, "T": 40, "B": 2, "forward_ms": 1.0, "both_ms": 2.0}
    machine = {"device": "x86_64", "threads": 1, "torch": "2.13"}
    grid.stored_at.write_text(json.dumps({"machine": machine, "rows": [row]}))
    out = tmp_path / "out"
    assert command_line.main(["missing", "--run", "--fast", "--minutes", "5", "--out", str(out)]) == 0
    told = capsys.readouterr().out
    assert "== deer/grid_cpu: rows" in told
    assert "== deer/warm: needs 1000000 cores, left out" in told
    assert "== deer/scan: its 1e+06 minutes are not left, left out" in told
    gone_on = json.loads((out / "deer.grid" / "grid_cpu.json").read_text())
    rows = gone_on["rows"]
    assert rows[0] == row  # stored before, not measured again
    assert gone_on["earlier"] == [{"rows": 1, "machine": machine}]
    assert len(rows) == 2 * 2 * 2
    assert [one.result for one, _ in missing.absent(None, out)] == ["deer/warm", "deer/scan"]
    monkeypatch.setattr(missing, "FOLDER", kept)
    assert command_line.main(["store", str(out)]) == 0
    assert json.loads(grid.stored_at.read_text())["rows"] == rows
    assert grid.stored_at.with_suffix(".png").exists()
    assert "deer/grid_cpu" not in {one.result for one, _ in missing.absent()}
    made = json.loads(grid.stored_at.read_text())
    cut = {**made, "rows": rows[:3]}
    del cut["made_by"]
    (out / "deer.grid" / "grid_cpu.json").write_text(json.dumps(cut))  # killed before its end
    (out / "deer.grid" / "grid_cuda.json").write_text(json.dumps(cut))
    capsys.readouterr()
    assert command_line.main(["store", str(out)]) == 0
    assert "left out: " + str(out / "deer.grid" / "grid_cuda.json") in capsys.readouterr().out
    assert json.loads(grid.stored_at.read_text()) == {**cut, "made_by": made["made_by"]}
    with pytest.raises(SystemExit):
        command_line.main(["store", str(tmp_path / "nothing")])
    assert "holds no results" in capsys.readouterr().err


NAMED = (
    "bppsa_bitstream/bitstream_cuda_paper",
    "bppsa_bitstream/grid_gru_cuda",
    "bppsa_irmas/generated_paper_features_batch_64_cuda",
    "bppsa_vgg/generated_norm_cuda",
)


@pytest.mark.parametrize("result", NAMED)
def test_options_of_wanted_results_make_files_of_their_names(result: str, tmp_path: Path) -> None:
    """In small, on a CPU."""
    (one,) = (one for one in WANTED if one.result == result)
    find(one.experiment).module().main([*one.arguments, "--fast", "--out", str(tmp_path)])
    name = result.partition("/")[2].replace("_cuda", "")
    assert {path.name for path in tmp_path.glob("*.json")} <= {f"{name}.json", f"{name}_cpu.json"}
