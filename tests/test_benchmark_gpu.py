"""The GPU benchmark as far as no GPU is needed: its lists, floors, tables, files, processes and commands."""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import timeloom
from benchmarks import gpu_compile, gpu_scan, gpu_training, layers, measure, trained
from benchmarks.cases import LONG_MEMORY, TRAINED, Case
from benchmarks.gpu import __main__ as program
from benchmarks.gpu import clock, compare, contenders, floor, layouts, lists, pieces, race, table, warm, worker
from benchmarks.gpu.loop import LoopGRU
from benchmarks.gpu.pieces import Job, Piece
from benchmarks.gpu.record import Record, load
from benchmarks.gpu.run import DEVICE_LOST, attempt, run
from benchmarks.layers import Problem, TrainingStep, build
from benchmarks.measure import Solve, Timing, exact_results, relative_errors, time_in_turns
from timeloom.app import cli
from timeloom.app.cli import bench

FACTS = {"device": "a GPU", "torch": "2", "date": "today", "command": "python -m benchmarks.gpu"}
SHOT = Solve("shooting[none]", 4, 36, 1, 8, 30, 2, False, "auto: many chunks")


# Lists of cases


def test_regimes_end_with_the_networks_that_need_not_contract() -> None:
    names = [case.regime.name for case in lists.regimes()]
    assert set(names) == {"bias+4", "bias+6", "trained", "weights×2", "weights×4"}
    assert set(names[-12:]) == {"weights×2", "weights×4"}
    many = {(case.regime.name, case.hidden) for case in lists.regimes() if case.batch == 16}
    assert many == {("bias+4", 32), ("bias+4", 128), ("bias+6", 32), ("bias+6", 128)}


def test_the_grid_is_all_points_and_says_why_some_are_left_out() -> None:
    kept, left_out = lists.grid()
    assert len(kept) + len(left_out) == 6 * 4 * 5
    assert all(4 * case.length * case.batch * case.hidden <= 2**30 for case in kept)
    assert left_out["GRU T=65536 B=64 n=1024 default"] == "trajectory over 1 GiB"
    assert left_out["GRU T=65536 B=512 n=8 default"] == "cuDNN would take over 1.5 s"


@pytest.mark.parametrize(
    ("case", "milliseconds"),
    [
        ((16384, 1, 32), 15.6),
        ((16384, 16, 128), 41.7),
        ((16384, 1, 512), 402),
        ((2048, 64, 512), 88),
        ((4096, 256, 32), 49),
    ],
)
def test_the_estimate_of_cudnn_is_near_what_was_measured(case: tuple[int, int, int], milliseconds: float) -> None:
    assert 0.5 < 1e3 * lists.cudnn_seconds(Case(*case)) / milliseconds < 2


def test_names_of_a_pieces_rows_are_unique() -> None:
    for make in pieces.PIECES.values():
        names = [job.name for job in make().jobs]
        assert names
        assert len(set(names)) == len(names)


# Floors


def test_bytes_moved_count_each_sequence_and_weight_once() -> None:
    sequences, weights = 4 * 10 * 3 * 8, 3 * (8 * 8 + 8 * 8 + 8 + 8)
    assert floor.bytes_moved(Case(10, 3, 8), 4) == 4 * (sequences + 2 * weights)
    assert sum(p.numel() for p in torch.nn.GRU(8, 8).parameters()) == weights
    lstm = floor.bytes_moved(Case(10, 3, 8, "LSTM"), 2)
    assert lstm == 2 * (sequences + 2 * sum(p.numel() for p in torch.nn.LSTM(8, 8).parameters()))


def test_the_floor_is_the_larger_of_bandwidth_and_latency() -> None:
    case, latency = Case(1000, 1, 8), floor.StepLatency(0.5, 0.25)
    assert floor.chain(SHOT) == (36 + 4, 30 + 8 * 2)
    fast = floor.floor_of(case, 4, SHOT, 1e15, latency)
    assert fast.latency_ms == pytest.approx(1e-3 * (40 * 0.5 + 46 * 0.25))
    assert fast.milliseconds == fast.latency_ms
    slow = floor.floor_of(case, 4, SHOT, 1e6, latency)
    assert slow.milliseconds == slow.bandwidth_ms == pytest.approx(1e3 * floor.bytes_moved(case, 4) / 1e6)


def test_there_is_no_latency_floor_where_torchs_own_layer_ran() -> None:
    ran = replace(SHOT, solver="sequential")
    assert floor.floor_of(Case(1000, 1, 8), 4, ran, 1e12, floor.StepLatency(1, 1)).latency_ms is None


# Tables


def compared(**more: Any) -> dict[str, Any]:
    row = compare.describe(Case(16384, 1, 32, goal=60.0))
    row |= {"cudnn_ms": 15.0, "cudnn_min_ms": 14.0, "timeloom_ms": 3.0, "timeloom_min_ms": 2.5, "sweeps": [1, None]}
    row |= {"graph_ms": 0.2, "graph_min_ms": 0.19, "cudnn_error": 1e-4, "timeloom_error": 3e-4, **more}
    return row | compare.ratios(row)


def test_the_table_marks_what_is_not_as_it_should_be() -> None:
    good, bad = compared(), compared(timeloom_ms=16.0, graph_ms=1.0, fell_back=True, graph_certified=False)
    lines = table.markdown(layouts.COLUMNS, [good, bad])
    assert lines[1].count("|") == lines[0].count("|") == lines[2].count("|")
    assert "| 15 (14) | 3 (2.5) | 5.00× | 0.2 (0.19) | 75.0× | 60 | 1.0e-04 | **3.0e-04** |" in lines[2]
    assert "| 1+? |" in lines[2]
    assert "**0.94×**" in lines[3]
    assert "**15.0×**" in lines[3]
    assert lines[3].endswith("| fell back; graph not certified |")


def test_a_row_that_failed_says_so_behind_its_name() -> None:
    failed = race.begin(contenders.CUDNN, Case(8, 1, 4)) | {"error": "RuntimeError: a | b"}
    line = table.markdown(layouts.CONTENDER_COLUMNS, [failed])[2]
    assert line.startswith("| GRU T=8 B=1 n=4 default | cuDNN | – |")
    assert line.endswith("| failed: RuntimeError: a \\| b |")
    assert (
        table.line(layouts.CONTENDER_COLUMNS, failed) == "GRU T=8 B=1 n=4 default · cuDNN: failed: RuntimeError: a | b"
    )


def test_the_grid_names_its_lowest_points() -> None:
    rows = [compared(case="one", timeloom_ms=16.5), compared(case="two"), {"case": "three", "cudnn_refuses": "no"}]
    assert pieces.lowest(rows)[1::2] == [
        "Lowest ratio: 0.909 (one), of 2 points.",
        "Below 0.95: one 0.909.",
        "cuDNN refuses: three.",
    ]


def test_goals_are_counted_with_the_graph() -> None:
    fast = compared(graph_ms=1.0)
    rows = [compared(), fast | {"graph_certified": True}, fast | {"graph_certified": False}]
    assert pieces.goals_met([*rows, {"case": "failed", "error": "no"}])[-1].startswith(
        "1 of 3 goals met, in a graph or outside; error within twice cuDNN's own in 0 of"
    )


# Files, and runs that are stopped


def a_piece(*jobs: Job) -> Piece:
    return Piece("grid", "A title", "A note.", layouts.GRID_COLUMNS, jobs, left_out={"a large one": "too large"})


def a_job(name: str, measure: Callable[[float], dict[str, Any]] | None = None) -> Job:
    return Job(name, measure or (lambda left: compared(name=name, case=name)))


def a_record(folder: Path, piece: Piece, **facts: str) -> Record:
    return Record(folder, piece.name, {**FACTS, **facts}, [job.name for job in piece.jobs])


def fails(left: float) -> dict[str, Any]:
    raise RuntimeError("first line\nsecond line")


def test_every_row_is_on_disk_before_the_next_is_measured(tmp_path: Path) -> None:
    seen: list[list[str]] = []

    def look(left: float) -> dict[str, Any]:
        content = load(tmp_path / "gpu-grid.json")
        assert content is not None
        seen.append([row["name"] for row in content["rows"]])
        return compared(name="third", case="third")

    piece = a_piece(a_job("first"), a_job("second", fails), a_job("third", look))
    run(piece, a_record(tmp_path, piece), minutes=1)
    assert seen == [["first", "second"]]
    page = (tmp_path / "gpu-grid.md").read_text()
    assert "failed: RuntimeError: first line |" in page
    assert "| third |" in page
    assert "Not measured, too large: a large one." in page
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpu-grid.json", "gpu-grid.md"]


def test_a_run_out_of_time_says_what_it_left_out_and_can_be_resumed(tmp_path: Path) -> None:
    piece = a_piece(a_job("first"), a_job("second", fails), a_job("third"), a_job("fourth"))
    clock = iter([0.0, 1.0, 2.0, 61.0, 62.0])
    record = a_record(tmp_path, piece)
    run(piece, record, minutes=1, clock=lambda: next(clock))
    assert list(record.rows) == ["first", "second"]
    assert record.left_out["third"] == record.left_out["fourth"] == "out of time after 1 minutes"

    again = a_record(tmp_path, piece)
    assert again.resume() == 1  # what failed is measured again
    assert again.missing() == ["second", "third", "fourth"]
    run(piece, again, minutes=1)
    content = load(tmp_path / "gpu-grid.json")
    assert content is not None
    assert [row["name"] for row in content["rows"]] == ["first", "second", "third", "fourth"]
    assert content["left_out"] == {"a large one": "too large"}


def test_rows_of_another_device_are_not_taken_over(tmp_path: Path) -> None:
    piece = a_piece(a_job("first"))
    run(piece, a_record(tmp_path, piece), minutes=1)
    assert a_record(tmp_path, piece, device="another GPU").resume() == 0
    assert a_record(tmp_path / "elsewhere", piece).resume() == 0


def test_a_lost_device_ends_the_run_cleanly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.gpu.run.tidy", lambda: False)
    piece = a_piece(a_job("first"), a_job("second"))
    record = a_record(tmp_path, piece)
    run(piece, record, minutes=1)
    assert (list(record.rows), record.left_out["second"]) == (["first"], DEVICE_LOST)


def test_an_error_is_told_in_one_line() -> None:
    assert attempt(a_job("one", fails), 1.0) == {"name": "one", "case": "one", "error": "RuntimeError: first line"}


# Processes of their own

ANSWERS = 'import sys\nfor line in sys.stdin: print(\'{"name": "one", "broken": true}\', flush=True)'


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("import time; time.sleep(60)", "no answer within 1 s"),
        ("import sys; sys.stdin.readline(); sys.exit(3)", "its process ended with status 3"),
    ],
)
def test_a_contender_that_hangs_or_dies_is_told_and_the_next_one_runs(script: str, told: str) -> None:
    asked = worker.Worker([sys.executable, "-c", script])
    row = asked.measure(contenders.CUDNN, Case(8, 1, 4), 1.0 if "sleep" in script else 60.0)
    assert row["error"] == told
    assert row["name"] == "GRU T=8 B=1 n=4 default · cuDNN"
    asked.process.command = [sys.executable, "-c", ANSWERS]
    assert asked.measure(contenders.CUDNN, Case(8, 1, 4), 60.0) == {"name": "one"}
    assert not asked.process.running  # what was broken is not asked again


def test_a_request_that_fails_is_answered_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "measure", lambda contender, case: fails(0.0))
    request = {"contender": "deer", "case": asdict(Case(8, 1, 4, regime=LONG_MEMORY[0]))}
    row = worker.answer(json.dumps(request))
    assert row["case"] == "GRU T=8 B=1 n=4 bias+4"
    assert (row["error"], row["broken"]) == ("RuntimeError: first line", True)


def test_a_contender_that_gave_no_answer_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []

    def silent(self: worker.Worker, contender: contenders.Contender, case: Case, seconds: float) -> dict[str, Any]:
        asked.append(seconds)
        return race.begin(contender, case) | {"error": "no answer within 90 s"}

    monkeypatch.setattr(worker.Worker, "measure", silent)
    small, _, large, *_ = [job for job in pieces.PIECES["solvers"]().jobs if job.name.endswith("· elk")]
    assert small.measure(5.0)["error"] == "no answer within 90 s"  # the run's time was up, not the contender's
    assert small.measure(500.0)["error"] == "no answer within 90 s"
    assert large.measure(500.0)["error"] == "not tried after no answer on GRU T=16384 B=1 n=8 default"
    assert asked == [5.0, 90.0]


# Compiling before


def test_cases_of_the_same_kernels_are_run_once() -> None:
    shorter, longer, many = Case(64, 1, 32), Case(4096, 1, 32), Case(4096, 64, 32)
    jobs = [(case, "float32") for case in (longer, shorter, many, replace(many, batch=512))]
    assert warm.representatives(jobs) == [(many, "float32"), (longer, "float32")]
    other = [(longer, "bfloat16"), (replace(longer, cell="LSTM"), "float32"), (replace(longer, hidden=64), "float32")]
    assert len(warm.representatives([*jobs, *other])) == 5


def test_cases_are_shared_among_processes_and_late_ones_are_stopped(tmp_path: Path) -> None:
    script = "import json, os, sys, time; cases = json.load(sys.stdin)\n"
    script += f"open(os.path.join({str(tmp_path)!r}, str(os.getpid())), 'w').write(str(len(cases)))\n"
    jobs = [(Case(64, 1, hidden), "float32") for hidden in (4, 8, 16)]
    told = warm.warm(jobs, 2, 60.0, [sys.executable, "-c", script])
    assert told.startswith("compiled for 3 cases in 2 processes")
    assert "stopped" not in told
    assert sorted(path.read_text() for path in tmp_path.iterdir()) == ["1", "2"]
    told = warm.warm(jobs, 8, 0.1, [sys.executable, "-c", "import time; time.sleep(60)"])
    assert told.endswith("3 of them stopped at the time's end")


def test_a_process_runs_what_it_is_sent(pretended_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def run_once(case: Case, dtype: str) -> None:
        ran.append(f"{case.name} {dtype}")
        fails(0.0)

    requests = [{"case": asdict(Case(8, 1, hidden, regime=LONG_MEMORY[0])), "dtype": "float16"} for hidden in (4, 5)]
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(requests)))
    with monkeypatch.context() as patched:
        patched.setattr(warm, "run_once", run_once)
        warm._main()
    assert ran == ["GRU T=8 B=1 n=4 bias+4 float16", "GRU T=8 B=1 n=5 bias+4 float16"]


def test_both_passes_and_the_forward_pass_alone_are_compiled(
    pretended_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_gradients: list[bool] = []
    forward = timeloom.GRU.forward

    def watched(*given: Any) -> Any:
        with_gradients.append(torch.is_grad_enabled())
        return forward(*given)

    monkeypatch.setattr(timeloom.GRU, "forward", watched)
    warm.run_once(Case(64, 1, 4), "float32")
    assert with_gradients == [True] * clock.LEARNING_CALLS + [False] * clock.LEARNING_CALLS


def test_absent_rivals_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    rival = contenders.Contender("a rival", "none", lambda case: fails(0.0), needs="no_such_module")
    monkeypatch.setattr(contenders, "RIVALS", (rival,))
    piece = pieces.PIECES["rivals"]()
    assert not piece.jobs
    assert piece.left_out["GRU T=16384 B=1 n=16 default · a rival"] == "no no_such_module here"


# Measuring, on a pretended GPU: this CPU with torch.cuda's clocks, streams and graphs replaced


class _Event:
    at = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, end: _Event) -> float:
        return 1e3 * (end.at - self.at)


class _Stream:
    def wait_stream(self, other: _Stream) -> None:
        pass


class _Graph:
    def replay(self) -> None:
        time.sleep(1e-5)


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    parts: dict[str, Any] = {
        "Event": _Event, "Stream": _Stream, "current_stream": _Stream, "CUDAGraph": _Graph,
        "stream": lambda stream: nullcontext(), "graph": lambda graph: nullcontext(), "synchronize": lambda: None,
        "reset_peak_memory_stats": lambda: None, "memory_allocated": lambda: 0, "max_memory_allocated": lambda: 2**20,
        "is_current_stream_capturing": lambda: False,
    }  # fmt: skip
    for name, part in parts.items():
        monkeypatch.setattr(torch.cuda, name, part)
    monkeypatch.setattr(clock, "DEVICE", "cpu")
    monkeypatch.setattr(floor, "COPIED", 2**16)
    monkeypatch.setattr(measure, "ROUNDS", (1, 1))
    monkeypatch.setattr(measure, "TURN", 1e-3)
    for kept in (floor.bandwidth, floor.step_latency, trained.trained_state):
        kept.cache_clear()
    yield
    for kept in (floor.bandwidth, floor.step_latency, trained.trained_state):
        kept.cache_clear()


def test_a_comparison_has_every_number(pretended_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "step_latency", lambda cell, hidden: floor.StepLatency(1.0, 1.0))
    row = compare.measure(Case(2048, 1, 8))
    for side in ("cudnn", "timeloom", "graph", "cudnn_forward", "timeloom_forward", "graph_forward"):
        assert 0 < row[f"{side}_min_ms"] <= row[f"{side}_ms"]
    assert row["ratio"] == row["cudnn_ms"] / row["timeloom_ms"]
    assert row["graph_ratio"] == row["cudnn_ms"] / row["graph_ms"]
    assert 0 < row["timeloom_error"] <= 2 * row["cudnn_error"]
    assert row["sweeps"] == [1, 1]
    assert row["floor_ms"] == max(row["bandwidth_floor_ms"], row["latency_floor_ms"])
    assert row["over_floor"] == row["graph_ms"] / row["floor_ms"]
    assert (row["graph_certified"], row["fell_back"], row["memory_ratio"]) == (True, False, 1.0)
    json.dumps(row)
    assert table.NONE not in table.markdown(layouts.COLUMNS, [row])[2]


def test_what_cudnn_refuses_is_measured_without_it(pretended_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.GRU, "forward", lambda *_: fails(0.0))
    row = compare.measure(Case(2048, 1, 8), depth=compare.Depth(forward=False, graph=False, memory=False))
    assert row["cudnn_refuses"] == row["truth_fails"] == "RuntimeError: first line"
    assert "ratio" not in row
    assert "timeloom_ms" in row
    assert "cuDNN refuses" in table.markdown(layouts.GRID_COLUMNS, [row])[2]


def test_a_graph_that_cannot_be_captured_is_told(pretended_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: fails(0.0))
    row = compare.measure(Case(2048, 1, 8), depth=compare.Depth(forward=False, memory=False, truth=False))
    assert row["graph_fails"] == "RuntimeError: first line"
    assert "graph_ms" not in row
    assert row["latency_floor_ms"] is None  # measured in graphs, too
    raced = race.measure(contenders.TIMELOOM, Case(64, 1, 8))
    assert (raced["graph_fails"], raced["broken"]) == ("RuntimeError: first line", True)


def test_the_time_of_a_step_is_the_slope_over_two_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(floor, "_lone_chunk", lambda case: (1.0 + 0.002 * case.length, 3.0 + 0.005 * case.length))
    latency = floor.step_latency.__wrapped__("GRU", 8)
    assert latency is not None
    assert (latency.forward, latency.backward) == (pytest.approx(2.0), pytest.approx(3.0))
    monkeypatch.setattr(floor, "_lone_chunk", lambda case: (1.0, 1.0))  # a clock too coarse to tell
    assert floor.step_latency.__wrapped__("GRU", 8) is None


def test_lone_chunks_run_all_steps_in_one(pretended_gpu: None) -> None:
    forward, both = floor._lone_chunk(Case(64, 1, 8))
    assert forward > 0
    assert both > 0
    assert floor.bandwidth() > 0


@pytest.mark.parametrize(
    "name", ["cuDNN", "timeloom", "sequential", "shooting", "mgrit", "deer", "quasi-deer", "jacobi"]
)
def test_contenders_agree_with_float64(pretended_gpu: None, name: str) -> None:
    row = race.measure(contenders.CONTENDERS[name], Case(48, 2, 5))
    assert row["error_to_float64"] < 5e-6
    assert ("graph_ms" in row) == contenders.CONTENDERS[name].in_a_graph
    json.dumps(row)


def test_the_loop_is_torchs_gru() -> None:
    case = Case(7, 2, 5)
    loop, problem = LoopGRU(5), Problem.draw(case)
    loop.load_state_dict(build(case, "torch").state_dict())
    found = TrainingStep(loop.double(), problem.to(torch.float64)).results()
    assert max(relative_errors(found, exact_results(case, problem)).values()) < 1e-13


@pytest.mark.parametrize("case", [Case(37, 3, 5), Case(1, 1, 4), Case(150, 2, 6, regime=LONG_MEMORY[0])], ids=str)
@pytest.mark.parametrize("method", ["deer", "scan"])
def test_jax_agrees_with_float64(pretended_gpu: None, case: Case, method: str) -> None:
    pytest.importorskip("jax", reason="a rival, not a dependency")
    from benchmarks.gpu.jax_runner import JaxRunner

    runner = JaxRunner(case, method, 1e-6)
    runner.forward()
    assert max(relative_errors(runner.results(), exact_results(case, Problem.draw(case))).values()) < 5e-6
    assert ("sweeps" in runner.facts()) == (method == "deer")


def test_deer_stops_where_only_rounding_is_left(pretended_gpu: None) -> None:
    pytest.importorskip("jax", reason="a rival, not a dependency")
    from benchmarks.gpu.jax_runner import JaxRunner

    case = Case(300, 2, 8)
    runner = JaxRunner(case, "deer", 1e-8)  # which float32 never meets
    assert max(relative_errors(runner.results(), exact_results(case, Problem.draw(case))).values()) < 5e-6
    assert runner.facts()["sweeps"][0] < 12


# What is shared with the CPU's benchmark


@pytest.mark.parametrize("script", [gpu_scan, gpu_compile, gpu_training])
def test_a_folder_in_place_of_a_file_is_told_before_anything_is_measured(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["", "--out", str(tmp_path)])
    with pytest.raises(SystemExit):
        script.main()
    assert "is a folder; give a file such as" in capsys.readouterr().err


def test_turns_are_taken_by_the_clock_that_is_given() -> None:
    calls: list[str] = []

    def clock(call: Callable[[], object]) -> float:
        call()
        return 0.2 if calls[-1] == "slow" else 0.05

    sides = {"slow": lambda: calls.append("slow"), "fast": lambda: calls.append("fast")}
    timings = time_in_turns(sides, clock, budget=0.1)
    assert timings == {"slow": Timing(200.0, 200.0, 3), "fast": Timing(50.0, 50.0, 6)}


def test_excursions_hold_the_side_of_the_last_one() -> None:
    x = torch.tensor([0.0, 3.0, 0.1, -0.2, -2.6, 1.0])[:, None, None]
    assert trained.excursions(x).flatten().tolist() == [0.5, 1.0, 1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize("cell", ["GRU", "LSTM"])
def test_trained_weights_have_moved_and_are_the_same_on_both_sides(
    pretended_gpu: None, monkeypatch: pytest.MonkeyPatch, cell: Any
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # where a training repeats to the bit
    monkeypatch.setattr(trained, "LENGTH", 24)
    monkeypatch.setattr(trained, "STEPS", 3)
    case = Case(8, 1, 4, cell, TRAINED)
    theirs, ours = (build(case, library).state_dict() for library in layers.LIBRARIES)
    drawn = build(replace(case, regime=layers.Regime("default")), "torch").state_dict()
    for name, value in theirs.items():
        assert torch.equal(value, ours[name])
        assert not torch.equal(value, drawn[name])
    trained.trained_state.cache_clear()
    assert torch.equal(build(case, "torch").state_dict()["weight_hh_l0"], theirs["weight_hh_l0"])


# Commands


def test_pieces_that_do_not_exist_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        program.main(["gird"])
    assert "no piece 'gird'; choose from headline, regimes" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        program.main(["--minutes", "0"])
    assert "expected more than 0, got 0" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        program.main(["--warm", "-1"])
    assert "expected 0 or more, got -1" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_measured(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert program.main(["grid", "--out", str(tmp_path)]) == 1
    assert "python -m benchmarks.gpu grid needs a CUDA device" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_named_pieces_are_run_and_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("benchmarks.gpu.run.tidy", lambda: True)
    monkeypatch.setattr(program, "device_facts", lambda: FACTS)
    monkeypatch.setattr(compare, "measure", lambda case, dtype, depth: compared(name=f"{case.name} {dtype}"))
    monkeypatch.setattr(compare, "describe", lambda case, dtype: {"name": f"{case.name} {dtype}"})
    warmed: list[tuple[int, int, float]] = []
    monkeypatch.setattr(program, "warm", lambda jobs, count, seconds: warmed.append((len(jobs), count, seconds)))
    assert program.main(["headline", "half", "--warm", "3", "--minutes", "5", "--out", str(tmp_path)]) == 0
    sizes = [len(load(tmp_path / name)["rows"]) for name in ("gpu.json", "gpu-half.json")]
    assert warmed == [(size, 3, 120.0) for size in sizes], "each piece's own cases, for the time that is left to it"
    names = {"gpu.json", "gpu.md", "gpu-half.json", "gpu-half.md"}
    assert {path.name for path in tmp_path.iterdir()} == names
    content = load(tmp_path / "gpu-half.json")
    assert content is not None
    assert (len(content["rows"]), content["command"]) == (len(lists.half()), "python -m benchmarks.gpu half")


def test_pictures_are_drawn_from_the_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="pip install 'timeloom[plot]'")
    assert program.main(["plot", "--out", str(tmp_path)]) == 1
    assert "to draw in" in capsys.readouterr().err
    of_pieces = {
        "gpu": [(case, "float32") for case in lists.headline()],
        "gpu-half": lists.half(),
        "gpu-grid": [(case, "float32") for case in lists.grid()[0]],
    }
    for name, cases in of_pieces.items():
        rows = [compared(**compare.describe(case, dtype)) for case, dtype in cases]
        rows.append({"name": "failed", "case": "failed", "error": "no"})
        (tmp_path / f"{name}.json").write_text(json.dumps({**FACTS, "rows": rows}))
    assert program.main(["plot", "--out", str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.glob("*.png")} == {f"{name}.png" for name in of_pieces}
    assert capsys.readouterr().out.count(".png\n") == 3


def test_bench_takes_the_gpus_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(program, "main", lambda *words: given.append(words) or 0)
    assert cli.run("bench", ["--device", "cuda", "grid", "--minutes", "2"]) == 0
    assert cli.run("bench", ["--resume", "--device=cuda", "--minutes", "2"]) == 0
    assert given == [
        (["grid", "--minutes", "2", "--out", "runs/bench"], "timeloom bench --device cuda"),
        (["headline", "--resume", "--minutes", "2", "--out", "runs/bench"], "timeloom bench --device cuda"),
    ]


def test_bench_refuses_a_device_it_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run("bench", ["--device", "tpu"]) == 1
    assert capsys.readouterr().err == "error: --device must be cpu or cuda; got 'tpu'\n"


def test_bench_says_that_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("benchmarks.__main__.main", lambda *words: 0)
    for words, told in (([], 1), (["--threads", "1"], 1), (["grid"], 0), (["--help"], 0)):
        assert cli.run("bench", words) == 0
        assert capsys.readouterr().err.count("timeloom bench --device cuda") == told


@pytest.mark.parametrize("device", bench.DEVICES)
def test_bench_helps_by_its_own_name(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        bench.main(["--help", "--device", device])
    told = capsys.readouterr().out
    assert told.startswith("usage: timeloom bench")
    assert "timeloom bench --device cuda" in told


# Programs of their own: scans and whole trainings


def told_by(program: Any, monkeypatch: pytest.MonkeyPatch, out: Path, *options: str) -> Any:
    """What a program writes down."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda *_, **__: None
    )  # optimizers would ask a driver
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(sys, "argv", ["program", "--out", str(out), *options])
    program.main()
    return json.loads(out.read_text())


def test_scans_are_measured_and_told(pretended_gpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rival = gpu_scan.Contender("rival", lambda a, b: timeloom.linear_scan(a[0].mT, b[0].mT).mT[None], True)
    sizes: dict[str, Any] = {"STEPS": [64], "LANES": [2, 40], "SLOW": {(64, 2)}, "LARGEST": 64 * 40}
    sizes["MATRICES"] = [("dense", 64, 1, 2)]
    for name, value in (
        sizes | {"RIVALS": {"rival": 64}, "rivals": lambda: ({"rival": rival}, ["one is absent"])}
    ).items():
        monkeypatch.setattr(gpu_scan, name, value)
    told = told_by(gpu_scan, monkeypatch, tmp_path / "scan.json")
    assert [(row["T"], row["lanes"]) for row in told["rows"]] == [(64, 2), (64, 40)]
    for row in told["rows"] + told["matrices"]:
        assert all(value > 0 for times in row["times"].values() for value in times.values())
        assert all(0 <= error < 1e-5 for error in row["errors"].values())
    assert [set(row["errors"]) for row in told["rows"]] == [{"timeloom", "rival", "chunked"}, {"timeloom", "rival"}]
    text = (tmp_path / "scan.md").read_text()
    assert "one is absent" in text
    assert "| 64 | 40 |" in text


def test_a_scan_that_fails_costs_its_row_alone(
    pretended_gpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def scan(a: torch.Tensor, b: torch.Tensor, **options: Any) -> torch.Tensor:
        if a.shape[1] == 2:
            raise RuntimeError("no such kernel")
        return plain(a, b, **options)

    plain = timeloom.linear_scan
    monkeypatch.setattr(timeloom, "linear_scan", scan)
    sizes: dict[str, Any] = {"STEPS": [64], "LANES": [2, 40], "SLOW": set(), "MATRICES": []}
    for name, value in (sizes | {"rivals": lambda: ({}, [])}).items():
        monkeypatch.setattr(gpu_scan, name, value)
    told = told_by(gpu_scan, monkeypatch, tmp_path / "scan.json")
    assert [row["lanes"] for row in told["rows"]] == [40]
    assert told["notes"] == ["(64, 2) fails: RuntimeError: no such kernel"]


@pytest.fixture
def short_training(pretended_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"STEPS": 40, "BATCH": 2, "TRAINING_STEPS": 12}.items():
        monkeypatch.setattr(gpu_training, name, value)


def test_trainings_are_compared(short_training: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told = told_by(gpu_training, monkeypatch, tmp_path / "training.json")
    assert len(told["torch_losses"]) == len(told["timeloom_losses"]) == 12
    assert told["largest_difference"] < 1e-5
    assert told["ratio"] == told["torch_seconds"] / told["timeloom_seconds"]


def test_large_sizes_are_measured(short_training: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plain = gpu_training.large
    monkeypatch.setattr(gpu_training, "large", lambda length, batch, hidden: plain(length // 4096, batch, hidden // 8))
    sizes = [
        (one["length"], one["batch"], one["hidden"])
        for one in told_by(gpu_training, monkeypatch, tmp_path / "scale.json", "--scale")["large"]
    ]
    assert sizes == [(256, 1, 8), (4, 64, 64)]


def test_large_sizes_leave_the_training_run_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {"RESULTS": tmp_path, "large": lambda *sizes: {}, "train": lambda ours: ([1.0], 1.0)}.items():
        monkeypatch.setattr(gpu_training, name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    for option, written in (("--scale", "gpu-scale.json"), ("", "gpu-training.json")):
        monkeypatch.setattr(sys, "argv", ["program", *option.split()])
        gpu_training.main()
        assert ("large" in json.loads((tmp_path / written).read_text())) is bool(option)


def test_trainings_to_be_compiled_are_compared(
    short_training: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The two that are not compiled: torch's compiler would look for a GPU that is there."""
    from torch._dynamo import config

    modes = {"cudnn": None, "timeloom": None}
    for name, value in {"MODES": modes, "EAGER_STEPS": 1, "SETTLING_STEPS": 1, "TIMED_STEPS": 2}.items():
        monkeypatch.setattr(gpu_compile, name, value)
    with config.patch(allow_rnn=False):
        told = told_by(gpu_compile, monkeypatch, tmp_path / "compile.json")
    assert all(told[name]["largest_difference"] < 1e-5 for name in modes)
    assert len(told["timeloom"]["reports"]) == 5
    assert told["timeloom"]["certificates_over_tolerance"] is None
