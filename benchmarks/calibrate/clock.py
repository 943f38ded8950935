"""Times of calls, and the size from which one of two is faster."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

import timeloom as tl
from timeloom.auto.thresholds import Fewest

INPUTS = 32
LONGEST = 8192


def seconds(run: Callable[[], object], device: str = "cpu", turns: int = 7) -> float:
    """The least time of a call, after two that are not counted: time lost to other programs is not its cost."""
    found = []
    for turn in range(turns + 2):
        _wait(device)
        began = time.perf_counter()
        run()
        _wait(device)
        if turn > 1:
            found.append(time.perf_counter() - began)
    return min(found)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


class Sweeping(tl.solvers.Auto):
    """`auto` that never runs torch's layer."""

    def why_torch(self, *_: object) -> None:
        return None

    def fewest_steps(self, *_: object) -> Fewest:
        return Fewest()


def swept(name: str, hidden: int, inputs: int = INPUTS, **options: object) -> Any:
    """A module of ours that always sweeps."""
    layer = getattr(tl, name)(inputs, hidden, solver=tl.solvers.Auto(), **options)
    layer._solver = Sweeping()
    return layer


def call(layer: nn.Module, x: Tensor | PackedSequence, taped: bool = True) -> None:
    """A training step's forward and backward pass, or a forward pass."""
    with torch.set_grad_enabled(taped):
        output = layer(x)[0]
    if taped:
        output = output.data if isinstance(output, PackedSequence) else output
        output.sum().backward()


def first_gain(sizes: Iterable[int], gains: Callable[[int], bool]) -> int | None:
    """The first of growing sizes that gains along with the next one, since one win may be noise; None if none does."""
    won = None
    for size in sizes:
        if not gains(size):
            won = None
        elif won is not None:
            return won
        else:
            won = size
    return won


def largest_gain(sizes: Sequence[int], gains: Callable[[int], bool]) -> int | str:
    """The size before the first one that, along with the next one, does not gain; 0 if there is none."""
    lost = first_gain(sizes, lambda size: not gains(size))
    return f"over {sizes[-1]}" if lost is None else max((size for size in sizes if size < lost), default=0)


def lengths(least: int, most: int = LONGEST) -> Iterable[int]:
    while least <= most:
        yield least
        least = math.ceil(1.4 * least)


def steps_to_gain(
    name: str,
    taped: bool,
    batch: int,
    hidden: int,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    least: int = 4,
) -> int | None:
    """Steps from which timeloom's sweeps are faster than torch's layer; None if they never are."""
    torch.manual_seed(0)
    theirs = getattr(nn, name)(INPUTS, hidden, device=device, dtype=dtype)
    ours = swept(name, hidden, device=device, dtype=dtype)

    def gains(steps: int) -> bool:
        x = torch.randn(steps, batch, INPUTS, device=device, dtype=dtype)
        own, torchs = (seconds(lambda: call(layer, x, taped), device) for layer in (ours, theirs))  # noqa: B023
        return own < torchs

    return first_gain(lengths(least), gains)


def newton_gains(size: int, device: str = "cpu") -> bool:
    """Whether dense transfers are faster than one chunk in torch operations, for a GRU that forgets slowly."""
    torch.manual_seed(0)
    steps, found = 2048, []
    x = torch.randn(steps, 1, INPUTS, dtype=torch.float64, device=device)
    for solver in (tl.solvers.Shooting(correction="newton"), tl.solvers.Shooting(chunk=steps)):
        layer: Any = tl.GRU(INPUTS, size, solver=solver, dtype=torch.float64, device=device)
        with torch.no_grad():
            layer.bias_ih_l0[size : 2 * size] += 6
        found.append(seconds(lambda: call(layer, x), device, turns=2))  # noqa: B023
    return found[0] < found[1]
