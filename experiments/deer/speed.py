r"""Time of a GRU by torch, DEER and shooting side by side: `python -m experiments.deer.speed`.

    python -m experiments.deer.speed --hidden 8 16 --steps 16384 --batch 1 --threads 2
    python -m experiments.deer.speed --device cuda --hidden 1 2 4 8 16 32 64 --steps 1000 10000 100000 1000000 \
        --batch 16

Forward alone and forward + backward in float32, the fastest of several turns, with the error of the outputs and of the
weights' gradient against torch in float64 (up to 32,768 steps: beyond, cuDNN refuses, and torch's layer runs in windows
with its state carried on). DEER is left out where its Jacobians are more than 4 GiB.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import timeloom as tl

RESULTS = Path(__file__).with_name("results")
SOLVERS = {"torch": "sequential", "DEER": "deer", "shooting": "shooting"}
INPUTS, TURNS, ENOUGH = 4, 5, 3.0
"""Input width; most turns, and seconds after which no further turn of a case begins."""
WINDOW = 32768
"""Steps that cuDNN takes at once."""
MOST_JACOBIANS = 2**30
"""Entries of all Jacobians beyond which DEER is not measured."""


def step(layer: nn.RNNBase, x: Tensor, backward: bool) -> tuple[float, Tensor]:
    """Seconds of one pass, and the outputs."""
    layer.zero_grad()
    began = _now(x)
    with torch.set_grad_enabled(backward):
        y = outputs(layer, x)
        if backward:
            y.square().mean().backward()
    return _now(x) - began, y.detach()


def outputs(layer: nn.RNNBase, x: Tensor) -> Tensor:
    if x.device.type == "cpu" or len(x) <= WINDOW or getattr(layer, "solver", "sequential") != "sequential":
        return layer(x)[0]
    parts, state = [], None
    for window in x.split(WINDOW):
        part, state = layer(window, state)
        parts.append(part)
    return torch.cat(parts)


def _now(x: Tensor) -> float:
    if x.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def case(hidden: int, steps: int, batch: int, device: str) -> list[str]:
    """Rows of the table for one size."""
    torch.manual_seed(0)
    x, state = torch.randn(steps, batch, INPUTS), nn.GRU(INPUTS, hidden).state_dict()
    truth, exact = None, nn.GRU(INPUTS, hidden, device=device, dtype=torch.float64)
    exact.load_state_dict(state)
    if device == "cpu" or steps <= WINDOW:
        _, truth = step(exact, x.to(device, torch.float64), True)
    layers = {}
    for name, solver in SOLVERS.items():
        if name == "DEER" and steps * batch * hidden**2 > MOST_JACOBIANS:
            continue
        layers[name] = tl.GRU(INPUTS, hidden, device=device, solver=solver)
        layers[name].load_state_dict(state)
    x = x.to(device)
    times: dict[str, list[list[float]]] = {name: [[], []] for name in layers}
    errors: dict[str, str] = {}
    end = time.perf_counter() + ENOUGH
    for turn in range(TURNS + 1):
        for name, layer in layers.items():
            for backward in (False, True):
                seconds, y = step(layer, x, backward)
                if turn or name == "torch":  # the first turn warms up; torch has nothing to warm up on a CPU
                    times[name][backward].append(seconds)
            if truth is not None:
                given, expected = layer.weight_hh_l0.grad, exact.weight_hh_l0.grad
                errors[name] = f"{_difference(y, truth):.0e} | {_difference(given, expected):.0e}"
        if turn and time.perf_counter() > end:
            break
    rows = []
    for name, layer in layers.items():
        forward, both = (1e3 * min(column) for column in times[name])
        ratio = min(times["torch"][1]) / min(times[name][1])
        report = layer.reports[0]
        sweeps = f"{report.iterations} / {report.backward.iterations}" if report.backward else "–"
        rows.append(
            f"| {hidden} | {steps} | {batch} | {name} | {forward:.4g} | {both:.4g} | {ratio:.3g} | {sweeps} | "
            f"{errors.get(name, '– | –')} |"
        )
    return rows


def _difference(given: Tensor, expected: Tensor) -> float:
    return float((given.double() - expected).abs().max() / expected.abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--steps", type=int, nargs="+", default=[16384])
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    lines = [
        "| n | T | B | solver | forward, ms | with backward, ms | over torch | sweeps | error | error of gradient |",
        "| --- " * 10 + "|",
    ]
    for hidden in options.hidden:
        for steps in options.steps:
            for batch in options.batch:
                lines += case(hidden, steps, batch, options.device)
                print("\n".join(lines[-len(SOLVERS) :]), flush=True)
                options.out.mkdir(exist_ok=True)
                (options.out / f"speed-{options.device}.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
