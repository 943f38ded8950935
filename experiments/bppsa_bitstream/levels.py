"""The backward pass of a GRU by scans of several numbers of levels: `python -m experiments.bppsa_bitstream.levels`.

Loss on every step, float32, one thread. Beside them the chunked adjoint that `adjoint="same"` runs, and torch.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch import Tensor

import timeloom as tl
from timeloom.solvers import Shooting, Solver

RESULTS = Path(__file__).with_name("results")
STEPS, SIZES, TURNS = 16384, (4, 8, 16), 7
LEVELS: dict[str, int | None] = {"default": None, "1": 1, "2": 2, "4": 4, "8": 8, "all": 30}
SOLVERS: dict[str, Solver | str] = {"torch": "sequential", "chunked adjoint": Shooting()}
SOLVERS |= {f"scan, {name}": Shooting(adjoint="scan", adjoint_levels=count) for name, count in LEVELS.items()}


def backward(gru: tl.GRU, x: Tensor) -> float:
    """Milliseconds of one backward pass."""
    loss = gru(x)[0].square().mean()
    began = time.perf_counter()
    loss.backward()
    return 1e3 * (time.perf_counter() - began)


def main() -> None:
    torch.set_num_threads(1)
    lines = [f"| n | {' | '.join(SOLVERS)} |", "| --- " * (len(SOLVERS) + 1) + "|"]
    for n in SIZES:
        torch.manual_seed(0)
        x = torch.randn(STEPS, 1, 4)
        layers = {name: tl.GRU(4, n, solver=solver) for name, solver in SOLVERS.items()}
        for gru in layers.values():
            gru.load_state_dict(layers["torch"].state_dict())
        best = {name: backward(gru, x) for name, gru in layers.items()}
        for _ in range(TURNS):  # in turns, so that all meet the same load
            for name, gru in layers.items():
                best[name] = min(best[name], backward(gru, x))
        lines.append(f"| {n} | {' | '.join(f'{ms:.3g} ms' for ms in best.values())} |")
        print(lines[-1], flush=True)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "levels.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
