"""`linear_scan` on a GPU beside accelerated-scan, torch's cumsum and a plain sum, in one run.

python -m benchmarks.gpu_scan      # float32; a table and JSON go to benchmarks/results; rivals where they are installed
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import timeloom as tl
from benchmarks.gpu import clock
from benchmarks.gpu.clock import captured, milliseconds
from benchmarks.gpu.compare import first_line
from benchmarks.results import new_file
from timeloom.scan.elements import Structure

RESULTS = Path(__file__).parent / "results" / "gpu-scan.json"
STEPS = [1024, 4096, 16384, 65536, 1 << 20]
LANES = [32, 256, 1024, 4096, 16384]
LARGEST = 1 << 28
"""Numbers in the largest array: 1 GiB of float32."""
RIVALS = {"accelerated_scan.scalar": 1 << 31, "accelerated_scan.warp": 1 << 16}
"""Modules with a function `scan` over (B, C, T), and the most steps that they accept."""
SLOW = {(16384, 32), (16384, 1024)}
"""Sizes at which the scan in torch operations is measured, too."""
MATRICES: list[tuple[Structure, int, int, int]] = [  # steps, batch, n
    ("dense", 16384, 1, 4), ("dense", 16384, 1, 8), ("dense", 65536, 16, 4), ("dense", 65536, 16, 8),
    ("dense", 16384, 1, 16), ("block", 16384, 1, 32), ("block", 65536, 16, 64),
]  # fmt: skip
CHECKED = 32
"""Lanes whose errors are measured, against the scan in float64."""

Scan = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Contender:
    """A scan, and its own layout: lanes innermost, `(T, lanes)`, or time innermost, `(1, lanes, T)`."""

    name: str
    scan: Scan
    time_inside: bool = False
    differentiable: bool = True

    def lay_out(self, x: Tensor) -> Tensor:
        return x.t().contiguous().unsqueeze(0) if self.time_inside else x

    def lay_back(self, x: Tensor) -> Tensor:
        return x.squeeze(0).t() if self.time_inside else x


def rivals() -> tuple[dict[str, Contender], list[str]]:
    """The rivals that can be imported, and why the others cannot."""
    found, absent = {}, []
    for name in RIVALS:
        try:
            module: Any = import_module(name)
        except Exception as error:  # one of them builds CUDA code on import, and may fail in any way
            absent.append(f"{name} is skipped: {first_line(error)}")
        else:
            found[name] = Contender(name, module.scan, time_inside=True)
    return found, absent


def contenders(steps: int, lanes: int, others: dict[str, Contender]) -> Iterator[Contender]:
    yield Contender("timeloom", tl.linear_scan)
    for name, other in others.items():
        if steps <= RIVALS[name]:
            yield other
    if (steps, lanes) in SLOW:
        yield Contender("chunked", lambda a, b: tl.linear_scan(a, b, method="chunked"))
    yield Contender("cumsum", _cumsum, differentiable=False)
    yield Contender("sum", torch.add, differentiable=False)


def _cumsum(a: Tensor, b: Tensor) -> Tensor:
    """A cumsum that moves as many bytes as a scan: 1.5 times as many numbers, read once and written once."""
    return torch.cumsum(a.new_empty(3 * a.numel() // 2), 0)


def time_of(scan: Scan, a: Tensor, b: Tensor, weight: Tensor | None) -> dict[str, float]:
    """Times of forward, of forward from a CUDA graph (without host time), and, given a weight, forward + backward."""
    with torch.no_grad():
        times = {"forward": milliseconds(lambda: scan(a, b)), "graph": milliseconds(captured(lambda: scan(a, b)))}
    if weight is not None:
        a, b = a.detach().requires_grad_(), b.detach().requires_grad_()
        times["both"] = milliseconds(lambda: torch.autograd.grad(scan(a, b), (a, b), weight))
    return times


def solve(scan: Scan, a: Tensor, b: Tensor, weight: Tensor) -> list[Tensor]:
    """States and the gradients of a and b."""
    a, b = a.detach().requires_grad_(), b.detach().requires_grad_()
    h = scan(a, b)
    return [h.detach(), *torch.autograd.grad(h, (a, b), weight)]


def error_of(given: list[Tensor], exact: list[Tensor]) -> float:
    """The largest of states and gradients, each relative to the largest value."""
    return max(float((one - other).abs().max() / other.abs().max()) for one, other in zip(given, exact, strict=True))


def measure(steps: int, lanes: int, others: dict[str, Contender]) -> dict[str, Any]:
    """One row of the table."""
    generator = torch.Generator(clock.DEVICE).manual_seed(0)
    a, b, weight = (torch.randn(steps, lanes, device=clock.DEVICE, generator=generator) for _ in "abw")
    a = (a + 3).sigmoid()
    few = [tensor[:, :CHECKED].double() for tensor in (a, b, weight)]
    exact = solve(lambda a, b: tl.linear_scan(a, b, method="chunked"), *few)
    row: dict[str, Any] = {"T": steps, "lanes": lanes, "bytes": 3 * a.nbytes, "times": {}, "errors": {}}
    for contender in contenders(steps, lanes, others):
        x, y = contender.lay_out(a), contender.lay_out(b)
        if not contender.differentiable:
            row["times"][contender.name] = time_of(contender.scan, x, y, None)
            continue
        z = contender.lay_out(weight)
        row["times"][contender.name] = time_of(contender.scan, x, y, z)
        given = [contender.lay_back(tensor)[:, :CHECKED] for tensor in solve(contender.scan, x, y, z)]
        row["errors"][contender.name] = error_of(given, exact)
    return row


def measure_matrices(structure: Structure, steps: int, batch: int, n: int) -> dict[str, Any]:
    generator = torch.Generator(clock.DEVICE).manual_seed(0)
    state, matrix = ((batch, n), (batch, n, n)) if structure == "dense" else ((batch, 2, n), (batch, 2, 2, n))
    width = n if structure == "dense" else 2
    shapes = (matrix, state, state)
    a, b, weight = (torch.randn(steps, *shape, device=clock.DEVICE, generator=generator) for shape in shapes)
    a /= 2 * width**0.5

    def by(method: Any) -> Scan:
        return lambda a, b: tl.linear_scan(a, b, structure=structure, method=method)

    exact = solve(by("chunked"), a.double(), b.double(), weight.double())
    row: dict[str, Any] = {"structure": structure, "T": steps, "B": batch, "n": n}
    row |= {"bytes": a.nbytes + 2 * b.nbytes, "times": {}, "errors": {}}
    for name, scan in {"timeloom": by("auto"), "chunked": by("chunked")}.items():
        row["times"][name] = time_of(scan, a, b, weight)
        row["errors"][name] = error_of(solve(scan, a, b, weight), exact)
    return row


HEAD = """\
# `linear_scan` on a GPU, float32

{device}, torch {torch}, Triton {triton}. Command: `{command}`. Milliseconds, medians of CUDA-event times: called from
Python / replayed from a CUDA graph, which leaves the host's time out. GB/s: what must be moved at least (forward: a and
b read, h written; three arrays) over the replayed time. accelerated-scan gets its own layout, time innermost,
`(1, lanes, T)`, and no h0; timeloom's is `(T, lanes)`. cumsum is torch's, flat, over as many bytes; sum is `a + b`, the
same three arrays. Errors: largest relative one of h, da and db in {checked} lanes, against float64.
{notes}
## Diagonal

"""


def table(facts: dict[str, Any]) -> str:
    """All rows as Markdown."""
    rows, matrices = facts["rows"], facts["matrices"]
    notes = "".join(f"\n{note}\n" for note in facts["notes"])
    names = [name for name in ("timeloom", *RIVALS, "chunked") if any(name in row["times"] for row in rows)]
    head = ["T", "lanes", *names, "cumsum", "sum", "GB/s", "sum's", *(f"{name}, + backward" for name in names)]
    lines = _head([*head, *(f"{name}, error" for name in names)])
    for row in rows:
        cells = [row["T"], row["lanes"], *(_forward(row, name) for name in (*names, "cumsum", "sum"))]
        cells += [_rate(row, "timeloom"), _rate(row, "sum"), *(_both(row, name) for name in names)]
        cells += [_error(row, name) for name in names]
        lines.append(_line(cells))
    lines += ["", "## Matrices", ""]
    lines += _head(
        [
            "elements",
            "T, B, n",
            "timeloom",
            "chunked",
            "GB/s",
            "+ backward",
            "chunked, + backward",
            "error",
            "chunked's",
        ]
    )
    for row in matrices:
        cells = [row["structure"], f"{row['T']}, {row['B']}, {row['n']}", _forward(row, "timeloom")]
        cells += [_forward(row, "chunked"), _rate(row, "timeloom"), _both(row, "timeloom"), _both(row, "chunked")]
        lines.append(_line([*cells, _error(row, "timeloom"), _error(row, "chunked")]))
    return HEAD.format(**facts | {"notes": notes, "checked": CHECKED}) + "\n".join(lines) + "\n"


def _head(names: list[str]) -> list[str]:
    return [_line(names), "|" + "--:|" * len(names)]


def _line(cells: list[Any]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def _forward(row: dict[str, Any], name: str) -> str:
    times = row["times"].get(name)
    return "–" if times is None else f"{times['forward']:.3f} / {times['graph']:.3f}"


def _both(row: dict[str, Any], name: str) -> str:
    times = row["times"].get(name)
    return "–" if times is None else f"{times['both']:.3f}"


def _rate(row: dict[str, Any], name: str) -> str:
    return f"{row['bytes'] / row['times'][name]['graph'] / 1e6:.0f}"


def _error(row: dict[str, Any], name: str) -> str:
    error = row["errors"].get(name)
    return "–" if error is None else f"{error:.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_scan", description=__doc__.split("\n")[0])
    where = "file of the JSON; the table goes beside it (default: gpu-scan.json in benchmarks/results)"
    parser.add_argument("--out", type=new_file, default=RESULTS, help=where)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks.gpu_scan needs a CUDA device; `python -m experiments.deer.scan` measures the CPU")
    others, notes = rivals()
    triton: Any = import_module("triton")
    facts: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "command": " ".join(["python -m benchmarks.gpu_scan", *sys.argv[1:]]),
        "notes": notes,
        "rows": [],
        "matrices": [],
    }
    diagonal = [(steps, lanes) for steps in STEPS for lanes in LANES if steps * lanes <= LARGEST]
    jobs: list[tuple[str, object, Callable[[], dict[str, Any]]]]
    jobs = [("rows", size, partial(measure, *size, others)) for size in diagonal]
    jobs += [("matrices", case, partial(measure_matrices, *case)) for case in MATRICES]
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    for kind, what, job in jobs:
        try:
            facts[kind].append(job())
            print(json.dumps(facts[kind][-1]), flush=True)
            torch.cuda.empty_cache()
        except Exception as error:  # torch's or Triton's; the others are worth having
            traceback.print_exc()
            notes.append(f"{what} fails: {first_line(error)}")
        arguments.out.write_text(json.dumps(facts, indent=1))
        arguments.out.with_suffix(".md").write_text(table(facts))
    print(*notes, sep="\n")


if __name__ == "__main__":
    main()
