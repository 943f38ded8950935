"""`python -m benchmarks.cells --device cuda|cpu`: cells of one's own beside `timeloom.GRU` and loops over their steps.

A row is a training step (forward + backward, eager) of a freshly initialised cell. The same module in a Python loop
over its steps is what its authors run; it is timed over fewer steps, and its time taken times as many. Cells that are
named after a package are in its form (`benchmarks/authors_cells.py`), and so are their loops. Errors are the largest
over outputs and all gradients, relative to the tensor's largest value, against the loop in float64, over those fewer
steps, beside the loop's own in the row's dtype.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import timeloom as tl
from benchmarks import authors_cells
from benchmarks.gpu.clock import event_seconds
from benchmarks.results import machine_facts, new_file
from timeloom import cells

RESULTS = Path(__file__).parent / "results"
LOOPED = {"cuda": 256, "cpu": 1024}
"""Steps over which the loops are timed."""
ROUNDS = 9


@dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[int, int], nn.Module]
    steps: int
    batch: int
    units: int
    dtype: torch.dtype = torch.float32


@dataclass
class Row:
    name: str
    steps: int
    batch: int
    units: int
    dtype: str
    milliseconds: float
    fastest: float
    of_gru: float | None
    """Time as a multiple of the GRU's."""
    loop: float | None
    """How many times faster than the loop."""
    error: float | None
    loop_error: float | None
    report: str


CELLS: dict[str, Callable[[int, int], nn.Module]] = {
    "LayerNormGRU": cells.LayerNormGRU,
    "LayerNormLSTM": cells.LayerNormLSTM,
    "SLSTM": cells.SLSTM,
    "SLSTM, 4 heads": lambda inputs, units: cells.SLSTM(inputs, units, heads=4),
    "BlockGRU": cells.BlockGRU,
    "LiGRU": cells.LiGRU,
    "PeepholeLSTM": cells.PeepholeLSTM,
    "CTRNN": cells.CTRNN,
    "CfC": cells.CfC,
    "MinimalGRU": cells.MinimalGRU,
}


def cases(device: str) -> list[Case]:
    steps, batches = (16384, (1, 16)) if device == "cuda" else (4096, (1, 8))
    found = [Case(name, make, steps, batch, 64) for batch in batches for name, make in CELLS.items()]
    if device == "cuda":
        found.append(Case("BlockGRU, 8 blocks", cells.BlockGRU, 512, 16, 512, torch.bfloat16))
    units = {"ncps LTC": 16}  # it computes a number for every pair of units
    return found + [Case(name, make, steps, 1, units.get(name, 64)) for name, make in authors_cells.CELLS.items()]


def loop(cell: nn.Module, x: Tensor) -> Tensor:
    """The first part of all states, step after step."""
    state = cell.initial(x.shape[1])  # type: ignore[operator]
    states = []
    for step in x:
        state = cell(state, step)
        states.append(state[0] if isinstance(state, tuple) else state)
    return torch.stack(states)


def training_step(module: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], None]:
    def step() -> None:
        for parameter in module.parameters():
            parameter.grad = None
        run(x).square().mean().backward()

    return step


def seconds(call: Callable[[], None], device: str) -> float:
    if device == "cuda":
        return event_seconds(call)
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def in_turns(calls: dict[str, Callable[[], None]], device: str) -> dict[str, list[float]]:
    """Milliseconds of each call, taken in turns, after eight calls from which timeloom learns."""
    for call in calls.values():
        for _ in range(8):
            call()
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            found[name].append(1e3 * seconds(call, device))
    return found


def gradients(cell: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    """Outputs and all gradients."""
    given = x.clone().requires_grad_()
    y = run(given)
    pull = torch.linspace(-1, 1, y.numel(), dtype=torch.float64, device=y.device).view_as(y).to(y)
    found = torch.autograd.grad((pull * y).sum(), [given, *cell.parameters()], allow_unused=True)
    return [y.detach(), *[torch.zeros(1, device=y.device) if grad is None else grad for grad in found]]


def apart(found: list[Tensor], truth: list[Tensor]) -> float:
    return max(
        float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1e-12))
        for a, b in zip(found, truth, strict=True)
        if float(b.abs().max()) > 0
    )


def projected(cell: nn.Module, x: Tensor) -> Tensor:
    """What a cell's authors compute for all of time before their loop."""
    outside = getattr(cell, "outside", None)
    return x if outside is None else outside(x)


def measure(case: Case, device: str, gru: float | None, looped: bool) -> Row:
    torch.manual_seed(0)
    cell = case.make(case.units, case.units).to(device, case.dtype)
    layer = tl.Layer(cell)
    x = torch.randn(case.steps, case.batch, case.units, device=device, dtype=case.dtype)
    times = in_turns({"own": training_step(cell, lambda x: layer(projected(cell, x))[0], x)}, device)["own"]
    report = str(layer.reports[0])
    ratio = error = loop_error = None
    if looped:
        few = x[: min(LOOPED[device], case.steps)]
        step = training_step(cell, lambda x: loop(cell, projected(cell, x)), few)
        step()
        slow = 1e3 * min(seconds(step, device) for _ in range(2)) * case.steps / len(few)
        ratio = slow / statistics.median(times)
        wide = copy.deepcopy(cell).double()
        truth = gradients(wide, lambda x: loop(wide, projected(wide, x)), few.double())
        error = apart(gradients(cell, lambda x: tl.Layer(cell)(projected(cell, x))[0], few), truth)
        loop_error = apart(gradients(cell, lambda x: loop(cell, projected(cell, x)), few), truth)
    middle = statistics.median(times)
    dtype, of_gru = str(case.dtype).removeprefix("torch."), middle / gru if gru else None
    found = (middle, min(times), of_gru, ratio, error, loop_error, report)
    return Row(case.name, case.steps, case.batch, case.units, dtype, *found)


def measure_gru(steps: int, batch: int, units: int, device: str) -> Row:
    torch.manual_seed(0)
    gru = tl.GRU(units, units).to(device)
    x = torch.randn(steps, batch, units, device=device)
    times = in_turns({"gru": training_step(gru, lambda x: gru(x)[0], x)}, device)["gru"]
    middle = statistics.median(times)
    return Row(
        "timeloom.GRU", steps, batch, units, "float32", middle, min(times), 1.0, None, None, None, str(gru.reports[0])
    )


def document(rows: list[Row], facts: dict[str, Any], device: str) -> str:
    where = facts.get("gpu") or f"{facts['processor']}, {facts['threads']} threads"
    lines = [
        "# Cells of one's own", "",
        f"{where}, torch {facts['torch']}, {facts['date']}. Command: `python -m benchmarks.cells --device {device}`.",
        "",
        " ".join((__doc__ or "").split("\n\n", 1)[1].split()), "",
        "| cell | T | B | n | dtype | ms (fastest) | × GRU's time | × faster than its loop | error | loop's error |",
        "|---|--:|--:|--:|---|--:|--:|--:|--:|--:|",
    ]  # fmt: skip
    for row in rows:
        shown = [f"{row.milliseconds:.2f} ({row.fastest:.2f})"]
        shown += ["–" if value is None else f"{value:.2f}" for value in (row.of_gru,)]
        shown += ["–" if row.loop is None else f"{row.loop:.0f}"]
        shown += ["–" if value is None else f"{value:.1e}" for value in (row.error, row.loop_error)]
        lines.append(f"| {row.name} | {row.steps} | {row.batch} | {row.units} | {row.dtype} | {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cells", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", default="", help="cells whose names have one of these in them, by commas")
    parser.add_argument("--batch", type=int, default=None, help="only cases of so many sequences")
    parser.add_argument("--no-loops", action="store_true", help="leave the loops out, which take most of the time")
    parser.add_argument("--out", type=new_file, default=None, help="where to write JSON; the table goes beside it")
    given = parser.parse_args(arguments)
    facts = machine_facts() | {"timeloom": tl.__version__}
    if given.device == "cuda":
        facts["gpu"] = torch.cuda.get_device_name()
    rows: list[Row] = []
    grus: dict[tuple[int, int, int], float] = {}
    for case in cases(given.device):
        if not any(name in case.name for name in given.only.split(",")) or given.batch not in (None, case.batch):
            continue
        size = (case.steps, case.batch, case.units)
        if size not in grus and case.dtype == torch.float32:
            rows.append(measure_gru(*size, given.device))
            grus[size] = rows[-1].milliseconds
        looped = not given.no_loops and (case.batch == 1 or case.dtype != torch.float32)
        rows.append(measure(case, given.device, grus.get(size), looped))
        print(json.dumps(asdict(rows[-1])), flush=True)
        if given.out is not None:  # after every row: a run that is stopped keeps its rows
            given.out.parent.mkdir(parents=True, exist_ok=True)
            given.out.write_text(json.dumps({"facts": facts, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")
            given.out.with_suffix(".md").write_text(document(rows, facts, given.device))
    print(document(rows, facts, given.device))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
