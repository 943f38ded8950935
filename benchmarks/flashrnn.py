"""`python -m benchmarks.flashrnn --device cuda`: FlashRNN's LSTM and sLSTM beside ours, where its package is installed.

A row is a training step (forward + backward, eager) of freshly initialised weights, x's projection and all gradients
included. FlashRNN runs one step after the other, by the backend that is named; ours solves in parallel over time.
Errors are the largest over outputs and all gradients, relative to the tensor's largest value, against its equations
looped in float64 over fewer steps; both sides have the same weights.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import timeloom as tl
from benchmarks.cells import apart, gradients, in_turns, loop, training_step
from benchmarks.results import machine_facts, new_file
from timeloom.cells.step import Step, by_blocks, uniform

FEW = 256
"""Steps over which errors are measured."""


class Gated(Step):
    """FlashRNN's form of both cells: gates i, f, z, o, block-diagonal recurrent weights, one for each head."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width * heads, width * heads)
        self.heads = heads
        self.input = nn.Linear(width * heads, 4 * width * heads)
        self.recurrent = uniform(4, heads, width, width, units=width)

    def gates(self, h: Tensor, x: Tensor) -> list[Tensor]:
        given = self.input(x).chunk(4, -1)
        return [a + by_blocks(weight, h) for a, weight in zip(given, self.recurrent, strict=True)]


class FlashLSTM(Gated):
    parts = 2

    def forward(self, state: tuple[Tensor, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        h, c = state
        i, f, z, o = self.gates(h, x)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(z)
        return torch.sigmoid(o) * torch.tanh(c), c


class FlashSLSTM(Gated):
    """With a normaliser of at least one, unlike `tl.cells.SLSTM`."""

    parts = 4

    def initial(self, batch: int) -> tuple[Tensor, ...]:
        zero = self.recurrent.new_zeros(batch, self.hidden_size)
        return zero, zero, zero, zero - 1e4  # so that the first step's stabiliser is the input gate's

    def forward(self, state: tuple[Tensor, ...], x: Tensor) -> tuple[Tensor, ...]:
        h, c, n, m = state
        i, f, z, o = self.gates(h, x)
        kept = F.logsigmoid(f) + m
        m = torch.maximum(kept, i)
        i, f = torch.exp(i - m), torch.exp(kept - m)
        c, n = f * c + i * torch.tanh(z), torch.clamp(f * n + i, min=1.0)
        return torch.sigmoid(o) * c / n, c, n, m


CELLS: dict[str, type[Gated]] = {"lstm": FlashLSTM, "slstm": FlashSLSTM}


def theirs(cell: Gated, function: str, backend: str, x: Tensor) -> Tensor:
    """h at every step `(T, B, n)` by FlashRNN, with the weights of `cell`."""
    flashrnn = import_module("flashrnn").flashrnn
    heads, width = cell.heads, cell.hidden_size // cell.heads
    given = cell.input(x.transpose(0, 1)).unflatten(-1, (4, heads, width))
    bias = given.new_zeros(4, heads, width)  # the projection adds it
    dtype = str(x.dtype).removeprefix("torch.")
    states, _ = flashrnn(given, cell.recurrent.transpose(-1, -2), bias, function=function, backend=backend, dtype=dtype)
    found: Tensor = states[0].flatten(-2).transpose(0, 1)
    return found


def measure(function: str, backend: str, dtype: torch.dtype, sizes: tuple[int, int, int, int], device: str) -> Any:
    steps, batch, heads, width = sizes
    torch.manual_seed(0)
    cell = CELLS[function](width, heads).to(device, dtype)
    layer = tl.Layer(cell)
    x = torch.randn(steps, batch, heads * width, device=device, dtype=dtype)
    few, wide = x[:FEW], copy.deepcopy(cell).double()
    truth = gradients(wide, lambda x: loop(wide, x), few.double())
    row: dict[str, Any] = {
        "cell": function, "backend": backend, "dtype": str(dtype).removeprefix("torch."), "steps": steps,
        "batch": batch, "heads": heads, "width": width,
        "error": apart(gradients(cell, lambda x: layer(x)[0], few), truth),
    }  # fmt: skip
    calls = {"ours": training_step(cell, lambda x: layer(x)[0], x)}
    try:
        row["flashrnn_error"] = apart(gradients(cell, lambda x: theirs(cell, function, backend, x), few), truth)
        calls["flashrnn"] = training_step(cell, lambda x: theirs(cell, function, backend, x), x)
        if function == "lstm" and heads == 1:
            cudnn = nn.LSTM(width, width).to(device, dtype)
            calls["torch"] = training_step(cudnn, lambda x: cudnn(x)[0], x)
        times = in_turns(calls, device)
    except Exception as error:  # a backend that cannot be built or has no such size
        return row | {"failed": f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"}
    row |= {name: statistics.median(found) for name, found in times.items()}
    return row | {"ratio": row["flashrnn"] / row["ours"], "report": str(layer.reports[0])}


def document(rows: list[dict[str, Any]], facts: dict[str, Any], command: str) -> str:
    where = facts.get("gpu") or facts["processor"]
    lines = [
        "# FlashRNN beside ours", "", f"{where}, torch {facts['torch']}, {facts['date']}. Command: `{command}`.", "",
        " ".join((__doc__ or "").split("\n\n", 1)[1].split()), "",
        "| cell | heads × units | T | B | dtype | backend | FlashRNN, ms | cuDNN, ms | ours, ms | ours is | its error | ours |",  # noqa: E501
        "|---|---|--:|--:|---|---|--:|--:|--:|--:|--:|--:|",
    ]  # fmt: skip
    for row in rows:
        head = f"| {row['cell']} | {row['heads']} × {row['width']} | {row['steps']:,} | {row['batch']} | {row['dtype']} | {row['backend']} |"  # noqa: E501
        if "failed" in row:
            lines.append(f"{head} {row['failed']} | | | | | {row['error']:.0e} |")
            continue
        cudnn = f"{row['torch']:.2f}" if "torch" in row else "–"
        lines.append(
            f"{head} {row['flashrnn']:.2f} | {cudnn} | {row['ours']:.2f} | {row['ratio']:.1f}× faster | "
            f"{row['flashrnn_error']:.0e} | {row['error']:.0e} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.flashrnn", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backend", nargs="+", default=["triton_fused"], help="of FlashRNN; vanilla runs on a CPU")
    parser.add_argument("--steps", nargs="+", type=int, default=(1024, 16384))
    parser.add_argument("--batch", nargs="+", type=int, default=(16, 1))
    parser.add_argument("--heads", nargs="+", type=int, default=(1, 4))
    parser.add_argument("--width", type=int, default=64, help="units of a head")
    parser.add_argument("--dtype", nargs="+", choices=("float32", "bfloat16"), default=("float32", "bfloat16"))
    parser.add_argument("--out", type=new_file, default=None, help="where to write JSON; the table goes beside it")
    given = parser.parse_args()
    facts = machine_facts() | {"timeloom": tl.__version__}
    if given.device == "cuda":
        facts["gpu"] = torch.cuda.get_device_name()
    rows: list[dict[str, Any]] = []
    cases = [
        (function, backend, getattr(torch, dtype), (steps, batch, heads, given.width))
        for backend in given.backend for dtype in given.dtype for steps in given.steps for batch in given.batch
        for function in CELLS for heads in given.heads
    ]  # fmt: skip
    for case in cases:
        rows.append(measure(*case, given.device))
        print(json.dumps(rows[-1]), flush=True)
        if given.out is not None:
            write(given.out, rows, facts, f"python -m benchmarks.flashrnn --device {given.device}")
    return 0


def write(out: Path, rows: list[dict[str, Any]], facts: dict[str, Any], command: str) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"facts": facts, "rows": rows}, indent=1) + "\n")
    out.with_suffix(".md").write_text(document(rows, facts, command))


if __name__ == "__main__":
    raise SystemExit(main())
