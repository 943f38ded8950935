"""`python -m benchmarks.calibrate`: measures the constants of `auto` on this machine, beside those that are stored.

Each line is a constant of `timeloom/auto`, where it stands, its stored value, and the same measured here. A constant is
a threshold on one machine and need not be met to the digit: change one where a measured value is far off on machines
that matter, and run the headline benchmark before and after.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import timeloom as tl
from timeloom.auto import costs, cudnn, experience, thresholds
from timeloom.cells import GRUCell
from timeloom.kernels import CPUSweeper, ReferenceSweeper
from timeloom.problem import Recurrence, cut_evenly

HIDDEN, INPUTS = 32, 32
LONGEST = 8192


@dataclass(frozen=True)
class Constant:
    """A stored number and what it is on this machine."""

    name: str
    stored: object
    measured: object


def seconds(run: Callable[[], object], device: str = "cpu", turns: int = 7) -> float:
    """The least time of a call, after two that are not counted: what other programs take away is not its cost."""
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


def steps_to_gain(name: str, taped: bool, batch: int, hidden: int, device: str = "cpu") -> int | None:
    """Steps from which on timeloom's sweeps are faster than torch's layer; None where they never are."""
    torch.manual_seed(0)
    theirs = getattr(nn, name)(INPUTS, hidden, device=device)
    ours = getattr(tl, name)(INPUTS, hidden, device=device, solver=tl.solvers.Auto())
    ours._solver = _Sweeping()
    steps = 4
    while steps <= LONGEST:
        x = torch.randn(steps, batch, INPUTS, device=device)
        if seconds(lambda: _call(ours, x, taped), device) < seconds(lambda: _call(theirs, x, taped), device):  # noqa: B023
            return steps
        steps = math.ceil(steps * 1.4)
    return None


class _Sweeping(tl.solvers.Auto):
    """`auto` that leaves nothing to torch's layer."""

    def why_torch(self, *_: object) -> None:
        return None


def _call(layer: nn.Module, x: Tensor, taped: bool) -> None:
    if not taped:
        with torch.no_grad():
            layer(x)
        return
    layer(x)[0].sum().backward()


def sweep_cost(sweeper: type[ReferenceSweeper], units: int, rows: tuple[int, int]) -> tuple[float, float]:
    """Microseconds of a step by itself and of each row in it, by sweeps of GRUs over few and over many rows."""
    steps, found = 64, []
    for count in rows:
        cell = GRUCell(torch.randn(3 * units, units) / units, torch.zeros(units))
        u = torch.randn(steps, count, 3 * units)
        problem = Recurrence(cell, u, torch.zeros(count, units))
        run, segments = sweeper(problem), cut_evenly(steps, count, steps, False)
        found.append(1e6 * seconds(lambda: run.forward(segments, problem.initial)) / steps)  # noqa: B023
    row = (found[1] - found[0]) / (rows[1] - rows[0])
    return max(found[0] - rows[0] * row, 0.0), row


def forgetting() -> float:
    """How fast fresh networks forget a step, the slowest of several."""
    found = []
    for name in ("GRU", "LSTM", "RNN"):
        layer = getattr(tl, name)(INPUTS, HIDDEN, solver=tl.solvers.Auto())
        layer._solver = _Sweeping()
        x = torch.randn(4096, 1, INPUTS)
        for _ in range(2):
            _call(layer, x, taped=False)
        found += [known.forward.forgetting for known in layer.experiences() if known.forward.forgetting is not None]
    return max(found, default=math.nan)


def on_cpu() -> Iterator[Constant]:
    torch.manual_seed(0)
    yield Constant("auto/experience.ASSUMED_FORGETTING", experience.ASSUMED_FORGETTING, round(forgetting(), 3))
    for name, stored in thresholds.SHORTEST.items():
        both = tuple(steps_to_gain(name, taped, 1, HIDDEN) for taped in (True, False))
        yield Constant(f"auto/thresholds.SHORTEST[{name!r}]", stored, both)
    for units, steps in thresholds.SHORTEST_LSTM[:2]:
        measured = steps_to_gain("LSTM", True, units // 64, 64)
        yield Constant(f"auto/thresholds.SHORTEST_LSTM, {units} units", steps, measured)
    measured = steps_to_gain("LSTM", False, 1, HIDDEN)
    yield Constant("auto/thresholds.SHORTEST_LSTM_FORWARD", thresholds.SHORTEST_LSTM_FORWARD, measured)
    own, row = sweep_cost(CPUSweeper, HIDDEN, (1, 256))
    yield Constant("auto/costs.COMPILED_STEP (rows)", costs.COMPILED_STEP, round(own / row, 2))
    own, row = sweep_cost(ReferenceSweeper, HIDDEN, (1, 2048))
    yield Constant("auto/costs.TORCH_STEP (µs)", costs.TORCH_STEP, round(own, 1))
    yield Constant(f"auto/costs.row_in_torch({HIDDEN}) (µs)", round(costs.row_in_torch(HIDDEN), 2), round(row, 2))


def on_gpu() -> Iterator[Constant]:
    for taped, table in ((True, cudnn.STEP), (False, cudnn.FORWARD_STEP)):
        where = "STEP" if taped else "FORWARD_STEP"
        for units, own, each in table:
            layer, found = nn.GRU(INPUTS, units, device="cuda"), []
            for batch in (1, 32):
                x = torch.randn(4096, batch, INPUTS, device="cuda")
                found.append(1e6 * seconds(lambda: _call(layer, x, taped), "cuda") / 4096)  # noqa: B023
            row = (found[1] - found[0]) / 31
            yield Constant(
                f"auto/cudnn.{where}, {units} units (µs)", (own, each), (round(found[0] - row, 3), round(row, 4))
            )
    for name, taped in (("LEAST_TIME", True), ("LEAST_FORWARD_TIME", False)):
        layer = tl.GRU(INPUTS, HIDDEN, device="cuda")
        layer._solver = _Sweeping()
        x = torch.randn(512, 1, INPUTS, device="cuda")
        ours = 1e6 * seconds(lambda: _call(layer, x, taped), "cuda")  # noqa: B023
        yield Constant(f"auto/cudnn.{name} (µs; beyond our call's)", getattr(cudnn, name), round(ours))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=None, help="threads of torch's; all of them by default")
    options = parser.parse_args()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    for constant in on_cpu():
        print(f"{constant.name}: stored {constant.stored}, here {constant.measured}", flush=True)
    if not torch.cuda.is_available():
        print("no GPU: constants of auto/cudnn.py and of the GPU in auto/costs.py are not measured")
        return
    print(torch.cuda.get_device_name())
    for constant in on_gpu():
        print(f"{constant.name}: stored {constant.stored}, here {constant.measured}", flush=True)


if __name__ == "__main__":
    main()
