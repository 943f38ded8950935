"""`python -m benchmarks.host_cost`: what an eager training step of one layer costs the host, T = 16,384, one sequence.

A step returns when the host has launched all of it, and is done when the GPU is; the medians of 200 steps, each begun
on an idle GPU, after 40 in which `auto` learns. Gradients are set to None before it, or added to, or asked of
`autograd.grad`. A linear layer's step, of a few numbers, says what torch itself costs this host just then.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

import timeloom as tl
from benchmarks.zoo.measure import wait

STEPS, LEARNS, TURNS = 16384, 40, 200
LAYERS = (("GRU", 32), ("GRU", 128), ("LSTM", 32))


def main(arguments: list[str] | None = None) -> int:
    options = argparse.ArgumentParser("python -m benchmarks.host_cost", description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--steps", type=int, default=STEPS)
    given = options.parse_args(arguments)
    for cell, units in LAYERS:
        torch.manual_seed(0)
        layer = getattr(tl, cell)(units, units).to(given.device)
        x, pull = (torch.randn(given.steps, 1, units, device=given.device) for _ in range(2))
        x.requires_grad_()
        linear, few = nn.Linear(4, 4).to(given.device), torch.randn(4, 4, device=given.device)
        calls = steps_of(layer, x, pull) | {"a linear layer": partial(_backward, linear, few)}
        for name, call in calls.items():
            returned, done = measure(call)
            print(f"{cell} {units}, {name}: returned after {returned:.3f} ms, done after {done:.3f} ms", flush=True)
    return 0


def steps_of(layer: nn.Module, x: Tensor, pull: Tensor) -> dict[str, Callable[[], object]]:
    """Training steps, by how they handle gradients."""
    parameters = list(layer.parameters())

    def add() -> None:
        layer(x)[0].backward(pull)

    def anew() -> None:
        x.grad = None
        layer.zero_grad(set_to_none=True)
        add()

    return {
        "gradients set to None": anew,
        "gradients added to": add,
        "autograd.grad": lambda: torch.autograd.grad(layer(x)[0], [x, *parameters], pull),
    }


def _backward(linear: nn.Module, x: Tensor) -> None:
    linear(x).sum().backward()


def measure(call: Callable[[], object]) -> tuple[float, float]:
    """Milliseconds until a call has returned, and until all of it is done."""
    for _ in range(LEARNS):
        call()
    found = []
    for _ in range(TURNS):
        wait()
        began = time.perf_counter()
        call()
        returned = time.perf_counter()
        wait()
        found.append((1e3 * (returned - began), 1e3 * (time.perf_counter() - began)))
    return statistics.median(one for one, _ in found), statistics.median(one for _, one in found)


if __name__ == "__main__":
    raise SystemExit(main())
