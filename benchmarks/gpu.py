"""Forward + backward on a GPU: cuDNN, timeloom, and timeloom replayed from a CUDA graph, side by side in one run.

python -m benchmarks.gpu                  # the sizes of the headline, default weights
python -m benchmarks.gpu --regimes        # long memory and strong weights
python -m benchmarks.gpu --half           # bfloat16 and float16
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import timeloom
from benchmarks.cases import LONG_MEMORY, STRONG, Case
from benchmarks.layers import LIBRARIES, Problem, TrainingStep, build
from benchmarks.measure import relative_errors

LENGTH = 16384
REPEATS = 9
SLOW = 100.0
"""Milliseconds of a call from which on three repeats are enough."""
RESULTS = Path(__file__).parent / "results"


def milliseconds(call: Callable[[], object]) -> float:
    """Median time of a call, by CUDA events, after three to warm up; a slow one is repeated less often."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    samples: list[float] = []
    while len(samples) < (3 if samples and samples[0] > SLOW else REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in "be")
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        samples.append(begin.elapsed_time(end))
    return statistics.median(samples)


def captured(layer: nn.Module, problem: Problem) -> Callable[[], object]:
    """The same training step as a CUDA graph: one launch for all of its kernels."""
    step = TrainingStep(layer, problem)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def measure(case: Case, dtype: torch.dtype) -> dict[str, object]:
    """One row of the table."""
    drawn = Problem.draw(case)
    last = tuple(part.to("cuda", dtype) for part in drawn.weight_last)
    problem = Problem(drawn.x.to("cuda", dtype), drawn.weight_states.to("cuda", dtype), last)
    theirs, ours = (build(case, library).to("cuda", dtype) for library in LIBRARIES)
    steps = {"cudnn": TrainingStep(theirs, problem), "timeloom": TrainingStep(ours, problem)}
    for _ in range(8):  # timeloom learns from its first calls
        steps["timeloom"]()
    times = {name: milliseconds(step) for name, step in steps.items()}
    truth = build(case, "torch").cuda().double()
    truth.load_state_dict(theirs.state_dict())  # of rounded weights
    exact = TrainingStep(truth, problem.double()).results()
    errors = {name: max(relative_errors(step.results(), exact).values()) for name, step in steps.items()}
    assert isinstance(ours, timeloom.GRU | timeloom.LSTM)
    report = ours.reports[0]
    row: dict[str, object] = {
        "case": case.name + ("" if dtype == torch.float32 else f" {str(dtype).removeprefix('torch.')}"),
        "cudnn_ms": times["cudnn"],
        "timeloom_ms": times["timeloom"],
        "ratio": times["cudnn"] / times["timeloom"],
        "cudnn_error": errors["cudnn"],
        "timeloom_error": errors["timeloom"],
        "chunk": report.chunk,
        "warmup": report.warmup,
        "sweeps": [report.iterations, report.backward.iterations if report.backward else None],
        "fell_back": report.fell_back,
        "reason": report.reason,
        "memory_ratio": peak(steps["timeloom"]) / peak(steps["cudnn"]),
    }
    if report.solver.startswith("shooting") and not report.fell_back:
        try:
            graph = captured(ours, problem)
        except RuntimeError as error:
            row["graph"] = str(error).splitlines()[0]
        else:
            row["graph_ms"] = milliseconds(graph)
            row["graph_ratio"] = times["cudnn"] / float(str(row["graph_ms"]))
    return row


def peak(step: Callable[[], object]) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def cases(regimes: bool, half: bool) -> list[tuple[Case, torch.dtype]]:
    widths = (16, 32, 64, 128, 256, 512, 1024)
    chosen = [Case(LENGTH, batch, hidden) for batch in (1, 16) for hidden in widths]
    chosen += [Case(LENGTH, 1, hidden, "LSTM") for hidden in (32, 64, 128, 256)]
    chosen += [
        Case(*sizes) for sizes in ((2048, 64, 64), (2048, 64, 512), (1024, 1, 64), (1024, 1, 256), (4096, 256, 32))
    ]
    if regimes:
        chosen = [Case(LENGTH, 1, hidden, regime=regime) for regime in LONG_MEMORY for hidden in widths[1:]]
        chosen += [Case(LENGTH, 1, hidden, regime=regime) for regime in STRONG for hidden in (32, 256)]
    if half:
        both = [(Case(LENGTH, 1, hidden), torch.bfloat16) for hidden in widths[1:]]
        return both + [(Case(LENGTH, 1, hidden), torch.float16) for hidden in (32, 128, 512)]
    return [(case, torch.float32) for case in chosen]


def describe(row: dict[str, object]) -> str:
    text = (
        f"{row['case']:<34} cuDNN {row['cudnn_ms']:8.2f} ms"
        f"  timeloom {row['timeloom_ms']:8.2f} ms ({row['ratio']:6.1f}x)"
        f"  graph {row.get('graph_ms', float('nan')):7.3f} ms ({row.get('graph_ratio', float('nan')):6.1f}x)"
        f"  error {row['cudnn_error']:.1e} / {row['timeloom_error']:.1e}  memory {row['memory_ratio']:.2f}"
        f"  chunk {row['chunk']} warm-up {row['warmup']} sweeps {row['sweeps']}"
    )
    return text + (f"  {row['graph']}" if "graph" in row else "") + ("  FELL BACK" if row["fell_back"] else "")


TABLE_HEAD = """\
# Forward + backward on a GPU (float32 with tf32 products in both, torch's default, unless half precision is named)

{device}, torch {torch}. Command: `{command}`. Medians of CUDA-event times. The graph column replays the same training
step from a CUDA graph. Errors: largest relative ones of outputs and all gradients against float64. Memory: peak of a
step over cuDNN's. In bold: slower than cuDNN.

| case | cuDNN ms | timeloom ms | ratio | graph ms | ratio | cuDNN error | error | memory | chunk | warm-up | sweeps |
|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|---|
"""


def table(facts: dict[str, Any]) -> str:
    """All rows as Markdown."""
    lines = []
    for row in facts["rows"]:
        graph = f"{row['graph_ms']:.3f} | {row['graph_ratio']:.1f}×" if "graph_ms" in row else "– | –"
        ratio = f"{row['ratio']:.1f}×" if row["ratio"] >= 1 else f"**{row['ratio']:.2f}×**"
        lines.append(
            f"| {row['case']} | {row['cudnn_ms']:.2f} | {row['timeloom_ms']:.2f} | {ratio} | {graph} "
            f"| {row['cudnn_error']:.1e} | {row['timeloom_error']:.1e} | {row['memory_ratio']:.2f} | {row['chunk']} "
            f"| {row['warmup']} | {row['sweeps']} |"
        )
    return TABLE_HEAD.format(**facts) + "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.split("\n")[0])
    parser.add_argument("--regimes", action="store_true", help="long memory and strong weights instead of default ones")
    parser.add_argument("--half", action="store_true", help="half precision instead of float32")
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu.json", help="where the JSON goes")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks.gpu needs a CUDA device; `python -m benchmarks headline` measures the CPU")
    rows: list[dict[str, object]] = []
    for case, dtype in cases(arguments.regimes, arguments.half):
        rows.append(measure(case, dtype))
        print(describe(rows[-1]), flush=True)
        torch.cuda.empty_cache()
    device = torch.cuda.get_device_name()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    command = " ".join(["python -m benchmarks.gpu", *sys.argv[1:]])
    facts = {"device": device, "torch": torch.__version__, "command": command, "rows": rows}
    arguments.out.write_text(json.dumps(facts, indent=1))
    arguments.out.with_suffix(".md").write_text(table(facts))


if __name__ == "__main__":
    main()
