"""Constants of a CPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import timeloom as tl
from benchmarks.calibrate.clock import (
    INPUTS,
    call,
    first_gain,
    largest_gain,
    newton_gains,
    seconds,
    steps_to_gain,
    swept,
)
from benchmarks.calibrate.constants import measures
from timeloom.auto import thresholds
from timeloom.auto.costs import compiled_cost
from timeloom.cells import GRUCell, LSTMCell
from timeloom.kernels import CPUSweeper, ReferenceSweeper
from timeloom.kernels.cpu import launch
from timeloom.kernels.cpu import layer as whole_layers
from timeloom.kernels.cpu.teams import Team
from timeloom.problem import Recurrence, cut_evenly
from timeloom.scan import chunked, reference
from timeloom.scan.elements import Structure
from timeloom.solve import beside_torch

HIDDEN = 32
WIDE = 192
"""Units of a layer that is too wide to be swept in one call."""
FEW = 3
"""Turns of calls that take long."""


@contextmanager
def alone() -> Iterator[None]:
    """Context in which torch's LSTM is not tried in place of our sweeps."""
    with patch.object(beside_torch, "is_rival", return_value=False):
        yield


@measures("auto/experience.ASSUMED_FORGETTING", what="the slowest of fresh networks, a step")
def forgetting() -> float:
    torch.manual_seed(0)
    found = []
    for name in ("GRU", "LSTM", "RNN"):
        layer, x = swept(name, HIDDEN), torch.randn(4096, 1, INPUTS)
        with alone():
            for _ in range(2):
                call(layer, x, taped=False)
        found += [known.forward.forgetting for known in layer.experiences() if known.forward.forgetting is not None]
    return round(max(found, default=math.nan), 3)


@measures("auto/thresholds.SHORTEST", what="steps, with gradients and without, of one sequence")
def shortest() -> object:
    return {
        name: tuple(steps_to_gain(name, taped, 1, HIDDEN) for taped in (True, False)) for name in thresholds.SHORTEST
    }


@measures("auto/thresholds.SHORTEST_LSTM", what="steps by the units of all sequences")
def shortest_lstm() -> object:
    with alone():
        return tuple(
            (units, steps_to_gain("LSTM", True, max(units // 64, 1), 64 if units else HIDDEN, least=16))
            for units, _ in thresholds.SHORTEST_LSTM
        )


@measures("auto/thresholds.SHORTEST_LSTM_FORWARD", what="steps of one sequence")
def shortest_lstm_forward() -> object:
    with alone():
        return steps_to_gain("LSTM", False, 1, HIDDEN, least=16)


@measures("auto/thresholds.SHORTEST_IN_TORCH", what="steps of a GRU in float64, of one sequence")
def shortest_in_torch() -> object:
    return steps_to_gain("GRU", True, 1, HIDDEN, dtype=torch.float64, least=128)


@measures("auto/thresholds.SHORTEST_LSTM_IN_TORCH", what="steps of one sequence in float64")
def shortest_lstm_in_torch() -> object:
    return steps_to_gain("LSTM", False, 1, HIDDEN, dtype=torch.float64, least=1024)


@measures("auto/thresholds.FULL", what="of 64 sequences of at most 300 steps and 16 units, in twentieths")
def full() -> object:
    with alone():
        return {name: tuple(_least_full(name, taped) for taped in (True, False)) for name in thresholds.FULL}


@measures("auto/thresholds.WIDE", what="units with 64 sequences of 100 steps from which 55 % of real steps do not gain")
def wide() -> object:
    batch = thresholds.WIDE[1]
    gains = partial(_gains_packed, "GRU", False, steps=100, batch=batch)
    units = first_gain((64, 128, 192, 256, 384), lambda units: not gains(units, inputs=units)(11))
    return None if units is None else (units, batch)


@measures("auto/thresholds.FULL_WIDE", what="of that many units and sequences of 100 steps, in twentieths")
def full_wide() -> object:
    units, batch = thresholds.WIDE
    return _least(_gains_packed("GRU", False, units, 100, batch, inputs=units))


def _least_full(name: str, taped: bool) -> float | None:
    """The smallest share of real steps, of those tried, from which ours gain."""
    return _least(_gains_packed(name, taped, 16, 1100 if name == "LSTM" else 300, 64))


def _least(gains: Callable[[int], bool]) -> float | None:
    least = first_gain((1, 2, 3, 5, 8, 10, 13, 16), gains)
    return None if least is None else least / 20


def _gains_packed(
    name: str, taped: bool, hidden: int, steps: int, batch: int, inputs: int = INPUTS
) -> Callable[[int], bool]:
    """Whether ours are faster than torch's if so many twentieths of all steps are real."""
    own, torchs = swept(name, hidden, inputs=inputs), getattr(nn, name)(inputs, hidden)

    def gains(twentieths: int) -> bool:
        lengths = torch.full((batch,), max(steps * twentieths // 20, 1))
        lengths[0] = steps
        packed = pack_padded_sequence(torch.randn(steps, batch, inputs), lengths, enforce_sorted=False)
        ours, theirs = (seconds(lambda: call(layer, packed, taped), turns=FEW) for layer in (own, torchs))  # noqa: B023
        return ours < theirs

    return gains


@measures(
    "auto/thresholds.LSTM_BATCH",
    what=f"sequences of 1,024 steps and {WIDE} units from which torch's is faster; None: never",
)
def lstm_batch() -> object:
    return first_gain((1, 2, 4, 8, 16, 32), lambda batch: not _wide_gains(WIDE, batch))


@measures("auto/thresholds.LSTM_HIDDEN", what="units beyond which torch's is faster on one sequence of 1,024 steps")
def lstm_hidden() -> object:
    return largest_gain((160, 192, 256, 320, 384, 512), lambda units: _wide_gains(units, 1))


def _wide_gains(units: int, batch: int) -> bool:
    torch.manual_seed(0)
    x = torch.randn(1024, batch, INPUTS)
    with alone():
        own, torchs = (
            seconds(lambda: call(layer, x), turns=FEW)  # noqa: B023
            for layer in (swept("LSTM", units), nn.LSTM(INPUTS, units))
        )
    return own < torchs


def sweep_cost(sweeper: type[ReferenceSweeper], units: int, rows: tuple[int, int], steps: int) -> tuple[float, float]:
    """Microseconds of a step by itself, and of each row per thread in it, from sweeps over few and many rows."""
    threads, found = torch.get_num_threads(), []
    for count in (rows[0] * threads, rows[1] * threads):
        cell = GRUCell(torch.randn(3 * units, units) / units, torch.zeros(units))
        problem = Recurrence(cell, torch.randn(steps, count, 3 * units), torch.zeros(count, units))
        run, segments = sweeper(problem), cut_evenly(steps, count, steps, False)
        found.append(1e6 * seconds(lambda: run.forward(segments, problem.initial)) / steps)  # noqa: B023
    row = (found[1] - found[0]) / (rows[1] - rows[0])
    return max(found[0] - rows[0] * row, 0.0), row


@measures("auto/costs.COMPILED_STEP", what="rows, of GRUs of 32, 64 and 128 units")
def compiled_step() -> object:
    found = [sweep_cost(CPUSweeper, units, (1, 32), 1024) for units in (32, 64, 128)]
    return tuple(round(own / row, 2) for own, row in found)


def _teamed(units: int, rows: int, team: Team) -> float:
    """Seconds of a GRU's sweep over `rows` rows, shared by such teams of threads."""
    torch.manual_seed(0)
    cell = GRUCell(torch.randn(3 * units, units) / units, torch.zeros(units))
    problem = Recurrence(cell, torch.randn(1024, rows, 3 * units), torch.zeros(rows, units))
    run, segments = CPUSweeper(problem), cut_evenly(1024, rows, 1024, False)
    with patch.object(launch, "team_of", return_value=team):
        return seconds(lambda: run.forward(segments, problem.initial))


@measures("auto/costs.MEETING", what="multiplications, of GRUs of 96, 128 and 192 units and two threads")
def meeting() -> object:
    found = []
    for units in (96, 128, 192):
        one, two = (_teamed(units, 1, Team(1, members)) for members in (1, 2))
        found.append(round((two / one - 0.5) * 3 * units * units, -3))
    return tuple(found)


@measures(
    "kernels/cpu/teams.WORTH_SHARING", what="multiplications of each of two threads from which they gain, of a GRU"
)
def worth_sharing() -> object:
    units = first_gain((48, 64, 80, 96, 112, 128), lambda n: _teamed(n, 1, Team(1, 2)) < _teamed(n, 1, Team(1, 1)))
    return None if units is None else 3 * units * units // 2


@measures("kernels/cpu/teams.CACHED", what="weights of a GRU from which two threads gain by sharing two rows")
def cached() -> object:
    units = first_gain((128, 192, 256, 320, 384), lambda n: _teamed(n, 2, Team(2, 2)) < _teamed(n, 2, Team(1, 1)))
    return None if units is None else 3 * units * units


@measures("auto/costs.TORCH_STEP", what="µs, of a GRU forward; other cells take more operations")
def torch_step() -> object:
    return round(sweep_cost(ReferenceSweeper, HIDDEN, (1, 1024), 64)[0], 1)


@measures("auto/costs.TORCH_ROW", what="µs, from GRUs of 32 and 128 units")
def torch_row() -> object:
    (small, one), (large, other) = (
        (units, sweep_cost(ReferenceSweeper, units, (1, 512), 32)[1]) for units in (32, 128)
    )
    squared = (other / large - one / small) / (large - small)
    return float(f"{squared:.1g}"), float(f"{one / small - squared * small:.1g}")


@measures("auto/costs.WORTH_BESIDE_TORCHS", what="of GRUs of 16 and 64 units in float64, without gradients")
def worth_beside_torchs() -> object:
    found, x = [], torch.randn(512, 1, INPUTS, dtype=torch.float64)
    for units in (16, 64):
        own = tl.GRU(INPUTS, units, solver=tl.solvers.Shooting(chunk=512, warmup=0), dtype=torch.float64)
        torchs = nn.GRU(INPUTS, units, dtype=torch.float64)
        theirs, ours = (seconds(lambda: call(layer, x, taped=False)) for layer in (torchs, own))  # noqa: B023
        found.append(round(theirs / ours, 2))
    return tuple(found)


@measures("auto/costs.NEWTON_UP_TO", what="units of a GRU with update-gate bias +6, T=2,048, in float64")
def newton_up_to() -> object:
    return largest_gain((4, 8, 16, 32, 64), newton_gains)


@measures("auto/beginnings.COST", what="seconds, of a GRU of 32 units that forgets at once, B=2, T=8,192")
def cost_of_beginning() -> object:
    solver, lengths = tl.solvers.Shooting(chunk=512, warmup=1), torch.tensor([8192, 8184])
    layer: Any = tl.GRU(INPUTS, HIDDEN, solver=solver)
    x = torch.randn(8192, 2, INPUTS)
    with torch.no_grad():
        layer.weight_hh_l0.zero_()
        layer.bias_ih_l0[HIDDEN : 2 * HIDDEN] -= 30
    store = tl.WarmStarts(every=3, always=True)  # chunks start between known states, and keep their warm-up

    def begun() -> None:
        with store.batch([0, 1]):
            layer(x, lengths=lengths)

    with torch.no_grad():
        usual = seconds(lambda: layer(x, lengths=lengths))
        return float(f"{max(seconds(begun) - usual, 0):.1g}")


@measures("solve/beside_torch.SIDE_BY_SIDE", what="of LSTMs of 32, 64 and 128 units")
def side_by_side() -> object:
    return tuple(_gain_of_rows(units) for units in (32, 64, 128))


def _gain_of_rows(units: int) -> float:
    """How much less time two rows per thread take, compared with one, than the cost model predicts."""
    threads, steps, found = torch.get_num_threads(), 1024, []
    for rows in (threads, 2 * threads):
        cell = LSTMCell(torch.randn(4 * units, units) / units)
        problem = Recurrence(cell, torch.randn(steps, rows, 4 * units), torch.zeros(rows, 2 * units))
        run, segments = CPUSweeper(problem), cut_evenly(steps, rows, steps, False)
        found.append(seconds(lambda: run.forward(segments, problem.initial)))  # noqa: B023
    expected = compiled_cost()
    return round(found[0] / found[1] * expected.of(2 * threads) / expected.of(threads), 2)


@measures("kernels/cpu/layer.MOST_UNITS", what="of 64 to 256 units of a GRU, B=4, T=512; with gradients, without")
def most_units() -> object:
    return tuple(_widest((64, 96, 128, 160, 192, 256), lambda width: (INPUTS, width), taped) for taped in (True, False))


@measures("kernels/cpu/layer.MOST_INPUTS", what="of 128 to 512 inputs of a GRU of 64 units, B=4, T=512; the same")
def most_inputs() -> object:
    return tuple(_widest((128, 192, 256, 384, 512), lambda width: (width, 64), taped) for taped in (True, False))


def _widest(widths: tuple[int, ...], sizes: Callable[[int], tuple[int, int]], taped: bool) -> object:
    """The width up to which a layer in one call is faster than sweeps over projected inputs."""

    def gains(width: int) -> bool:
        inputs, units = sizes(width)
        torch.manual_seed(0)
        x, found = torch.randn(512, 4, inputs), []
        for most in (1 << 20, 0):
            layer = tl.GRU(inputs, units, solver=tl.solvers.Shooting(chunk=512))
            with patch.multiple(whole_layers, MOST_UNITS=most, MOST_INPUTS=most):
                found.append(seconds(lambda: call(layer, x, taped)))  # noqa: B023
        return found[0] < found[1]

    return largest_gain(widths, gains)


@measures("scan/chunked.SHORTEST", what="steps, of 8 × 16 numbers")
def shortest_scan() -> object:
    return {structure: _steps_to_chunk(structure) for structure in chunked.SHORTEST}


def _steps_to_chunk(structure: Structure) -> int:
    """Steps up to which the plain loop is faster."""
    state, element = {"diagonal": ((16,), (16,)), "dense": ((16,), (16, 16)), "block": ((2, 8), (2, 2, 8))}[structure]

    def gains(steps: int) -> bool:
        a, b, h0 = 0.1 * torch.randn(steps, 8, *element), torch.randn(steps, 8, *state), torch.zeros(8, *state)
        with patch.dict(chunked.SHORTEST, {structure: steps - 1}):
            cut = seconds(lambda: chunked.scan(a, b, h0, structure))
        return cut < seconds(lambda: reference.scan(a, b, h0, structure))

    sizes = (8, 16, 32, 64, 128, 256, 512)
    won = first_gain(sizes, gains)
    return max((steps for steps in sizes if won is None or steps < won), default=0)
