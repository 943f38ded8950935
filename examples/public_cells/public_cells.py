"""torchrecurrent's cells on its adding task: the authors' loop over steps against `timeloom.unroll`, cell by cell.

A row is a training step (forward and backward) of one cell, the same weights and data both ways: the seconds of each,
those of the first call, in which kernels are made for the cell (they are kept on disk), how far apart loss and
gradients are, and what the solver did. Cells that no such loop can run are named.

    python examples/public_cells/public_cells.py --out public_cells
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

import timeloom as tl


class StandIn(nn.Module):
    """A minimal gated unit, called as torchrecurrent's cells are: `cell(x, state)`."""

    def __init__(self, inputs: int, units: int) -> None:
        super().__init__()
        self.input, self.recurrent = nn.Linear(inputs, 2 * units), nn.Linear(units, 2 * units)

    def forward(self, x: Tensor, h: Tensor | None = None) -> Tensor:
        h = x.new_zeros(len(x), self.recurrent.in_features) if h is None else h
        gate, value = (self.input(x) + self.recurrent(h)).chunk(2, -1)
        return torch.lerp(h, torch.tanh(value), torch.sigmoid(gate))


def cells() -> dict[str, Any]:
    try:
        import torchrecurrent
    except ImportError:
        print("torchrecurrent is not installed (pip install torchrecurrent): a stand-in runs")
        return {"StandIn": StandIn}
    return {name: getattr(torchrecurrent, name) for name in dir(torchrecurrent) if name.endswith("Cell")}


def adding(steps: int, batch: int) -> tuple[Tensor, Tensor]:
    """Numbers and two marks `(T, B, 2)`, and the sum of the marked ones `(B,)`."""
    numbers, marks = torch.rand(steps, batch), torch.zeros(steps, batch)
    half = max(1, steps // 2)
    for low, high in ((0, half), (half, steps)):
        marks[torch.randint(low, max(high, low + 1), (batch,)).clamp(max=steps - 1), torch.arange(batch)] = 1
    return torch.stack([numbers, marks], -1), (numbers * marks).sum(0)


def run(
    cell: nn.Module, head: nn.Module, xs: Tensor, target: Tensor, parallel: bool
) -> tuple[Tensor, list[float], str]:
    """The loss and its gradient, the seconds of each of four steps, and what the solver says."""
    seconds, told = [], ""
    for _ in range(4):
        begin = perf_counter()
        first = cell(xs[0])
        state = tuple(torch.zeros_like(p) for p in first) if isinstance(first, tuple) else torch.zeros_like(first)
        if parallel:
            states, report = tl.unroll(cell.step, state, xs)
            state, told = (states[0][-1] if isinstance(states, tuple) else states[-1]), str(report).splitlines()[0]
        else:
            for x in xs:
                state = cell(x, state)
            state = state[0] if isinstance(state, tuple) else state
        loss = (head(state).squeeze(-1) - target).square().mean()
        cell.zero_grad()
        loss.backward()
        loss.item()  # waits for the device
        seconds.append(perf_counter() - begin)
    grads = [p.grad.flatten() for p in cell.parameters() if p.grad is not None]
    return torch.cat([loss.detach().view(1), *grads]), seconds, told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--units", type=int, default=32)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="folder for results.json and the picture")
    options = parser.parse_args()
    rows = []
    print("| cell | authors' loop, s | unroll, s | times | first call, s | off by | what was done |")
    print("|---|--:|--:|--:|--:|--:|---|")
    for name, kind in cells().items():
        torch.manual_seed(0)
        xs, target = (part.to(options.device) for part in adding(options.length, options.batch))
        try:
            cell, head = kind(2, options.units).to(options.device), nn.Linear(options.units, 1).to(options.device)
            cell.step = lambda state, x, cell=cell: cell(x, state)
            theirs, loops, _ = run(cell, head, xs, target, parallel=False)
            ours, calls, told = run(cell, head, xs, target, parallel=True)
        except Exception as error:  # a cell with other demands: say which
            print(f"| {name} | – | – | – | – | – | not run: {str(error).splitlines()[0]} |", flush=True)
            continue
        size, off = float(theirs.double().norm()), float((ours.double() - theirs.double()).norm())
        off, note = off / size, ", gradients explode" if size > 1e9 else ""  # chaotic: rounding alone decides
        slow, fast, first = min(loops), min(calls), calls[0]
        rows.append({"cell": name, "loop": slow, "unroll": fast, "first": first, "off": off, "told": told})
        timed = f"{slow:.2f} | {fast:.3f} | {slow / fast:.1f} | {first:.1f}"
        print(f"| {name} | {timed} | {off:.0e}{note} | {told} |", flush=True)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "results.json").write_text(json.dumps(rows, indent=1))
        import matplotlib.pyplot as plt

        rows.sort(key=lambda row: row["loop"] / row["unroll"])
        figure, axis = plt.subplots(figsize=(7, 0.2 * len(rows) + 1))
        axis.barh([row["cell"] for row in rows], [row["loop"] / row["unroll"] for row in rows])
        axis.axvline(1, color="black", linewidth=1)
        axis.set(xlabel="times faster than the authors' loop", xscale="log")
        figure.tight_layout()
        figure.savefig(options.out / "public_cells.png", dpi=110)


if __name__ == "__main__":
    main()
