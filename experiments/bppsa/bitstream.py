"""Back-propagation alone through an Elman network over bit streams: `python -m experiments.bppsa.bitstream`.

The task of the BPPSA paper: class c of ten draws its bits with probability 0.05 + 0.1 c, an RNN of 20 tanh units reads
them, and its last state tells the class. Measured is the backward pass by torch, by the chunked adjoint and by scans of
several numbers of levels, and how far their gradients are from torch's.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch import Tensor, nn

import timeloom as tl
from timeloom.solvers import Shooting, Solver

RESULTS = Path(__file__).with_name("results")
HIDDEN, CLASSES, BATCH = 20, 10, 16
LENGTHS = (1000, 3000, 10000, 30000)
SOLVERS: dict[str, Solver | str] = {
    "torch": "sequential",
    "chunked adjoint": Shooting(),
    "scan": Shooting(adjoint="scan"),
    "scan, 2 levels": Shooting(adjoint="scan", adjoint_levels=2),
    "scan, all levels": Shooting(adjoint="scan", adjoint_levels=30),
}


def bits(steps: int) -> tuple[Tensor, Tensor]:
    """Streams `(T, B, 1)` and their classes `(B,)`."""
    generator = torch.Generator().manual_seed(0)
    target = torch.randint(CLASSES, (BATCH,), generator=generator)
    return (torch.rand(steps, BATCH, generator=generator) < 0.05 + 0.1 * target).float().unsqueeze(-1), target


def backward(rnn: nn.RNNBase, head: nn.Linear, x: Tensor, target: Tensor) -> tuple[float, list[Tensor]]:
    """Milliseconds of the fastest of three backward passes, and the gradients."""
    best = float("inf")
    for _ in range(3):
        rnn.zero_grad()
        _, h = rnn(x)
        loss = nn.functional.cross_entropy(head(h[0]), target)
        began = time.perf_counter()
        loss.backward()
        best = min(best, time.perf_counter() - began)
    return 1e3 * best, [p.grad.clone() for p in rnn.parameters()]


def main() -> None:
    lines = [f"| T | {' | '.join(SOLVERS)} | largest difference |", "| --- " * (len(SOLVERS) + 2) + "|"]
    for steps in LENGTHS:
        x, target = bits(steps)
        times, worst, truth = [], 0.0, []
        for solver in SOLVERS.values():
            torch.manual_seed(0)
            rnn, head = tl.RNN(1, HIDDEN, solver=solver), nn.Linear(HIDDEN, CLASSES)
            ms, grads = backward(rnn, head, x, target)
            times.append(ms)
            truth = truth or grads
            scales = [float(g.abs().max()) for g in truth]
            worst = max(worst, *(float((g - t).abs().max()) / s for g, t, s in zip(grads, truth, scales, strict=True)))
        lines.append(f"| {steps} | {' | '.join(f'{ms:.3g} ms' for ms in times)} | {worst:.1e} |")
        print(lines[-1], flush=True)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "bitstream.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
