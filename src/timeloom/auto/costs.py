"""A cost model of sweeps, by problem size and kernel: it decides chunks in microseconds, without measuring.

Its numbers were measured on 2 cores of a Xeon and on an H200. `python -m benchmarks.calibrate` measures them anew and
prints them beside the stored ones; `python -m benchmarks.rows` measures CUDA kernels by the rows that run side by side.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch

from timeloom.cells.generic import GenericCell, spread
from timeloom.kernels import FusedCUDASweeper, in_compiled_code, may_be_compiled, sweeper_kind
from timeloom.kernels.cpu.teams import team_of
from timeloom.kernels.cuda.dense import LARGEST
from timeloom.kernels.cuda.fused import ROWS as ROWS_TOGETHER
from timeloom.kernels.cuda.programs import ROWS as TILE_ROWS
from timeloom.kernels.cuda.programs import Variant
from timeloom.kernels.cuda.sweeper import has_kernels, most_single, waves_of
from timeloom.problem import Recurrence

NEWTON_UP_TO = 16
"""Largest state size S for which dense transfers may pay on a CPU: they cost S times as much as a sweep."""
NEWTON_UP_TO_ON_GPU = 64
"""The same on a GPU."""
COMPILED_STEP = 0.5
"""Fixed cost of a step of a compiled sweep, in rows."""
TORCH_STEP, TORCH_STEP_ON_GPU = 60.0, 6000.0
"""Fixed cost of a step in plain torch operations, in microseconds."""
TORCH_ROW = 6e-5, 0.01
"""Microseconds of each row of such a step: factors of the state size squared and of the state size."""
MEETING = 30000.0
"""Cost of synchronisation in a step of threads that share the units of a row, in multiplications."""
WORTH_CUTTING = 0.95
"""Share of a single chunk's time on a CPU that several chunks after a long warm-up, which may turn out too short, must
not exceed."""
WORTH_BESIDE_TORCHS = 0.35
"""The same in plain torch operations, since torch's own layer runs one chunk in that share of the time: a GRU of 16
units, without gradients."""
WORTH_DRIVING = 0.5
"""The same for users' cells on a GPU, where a miss is followed by the driver's sweeps, launch by launch: with a warm-up
about as long as the sequence, a trained network took 52 ms, and one chunk 21."""
MOST_STEPS = 2**40
"""More steps than any sequence has."""


SINGLE_STEP = ((0.12, 0.003), (0.13, 0.0036))
"""Microseconds of a GRU's step of a single row, forward and backward: a constant, and for each unit. This and all
numbers of CUDA kernels below were measured on an H200."""
GATES = {1: 0.65, 3: 1.0, 4: 1.25}
"""Time of a step relative to a GRU's, by the number of products in a step."""
SHARING = 100.0, 1.9
"""Share by which each further row on a multiprocessor lengthens such a step: (units / first) ** second, at most 1."""
CLUSTER_STEP = 0.8, 1.4
"""Microseconds of a GRU's step, forward and backward, if several multiprocessors share a row, whatever its width."""
TILE_STEP = ((0.25, 4.3e-5), (0.4, 8.1e-5))
"""Microseconds of a GRU's step of tiles of rows, one tile on each multiprocessor, forward and backward: a constant, and
a factor of the units squared."""
TILE_STORES = 1.5, 1.18
"""Factor by which such a step is longer if it writes states (forward) or gradients (backward)."""
TILES_SHARING = 64.0
"""Share by which each further tile on a multiprocessor lengthens such a step: units divided by this, at most 1."""

WIDE_STEP, WIDE_ROW = 7.8, (1.5e-5, 2.3e-8)
"""Microseconds of a GRU's step that consists of a launch and a product: a constant, and for each unit of a row, a
constant and a factor of the units."""

SWEEP_START = 3.0, 1.1e-3
"""Microseconds of a launch before its first step, in which weights are read: a constant, and a factor of the units
squared."""
MOST_HELD = 128
"""Units up to which one multiprocessor holds all weights; beyond, several share them."""
BETWEEN_SWEEPS = 4.0, 0.0137
"""Microseconds between two sweeps: a launch, and each chunk in the chain of corrections."""
LEAST_CORRECTED = 8
"""Shortest chunk to correct, in steps."""
LITTLE_MORE = 1.6
"""Factor by which a sweep over longer chunks, which may save sweeps, may take longer than the cheapest sweep."""
DENSE_LINK, MOST_DENSE = 0.6, 2**25
"""Microseconds of a link in a chain of dense transfers; largest number of elements in all transfers together."""


FOUR_ROWS = 2.2
"""Generated kernels: time of a block's step of four rows relative to one row (1.4 forward, 1.9 backward for cells of 64
units), including what more chunks cost besides their steps."""
SHARED_BLOCK = 0.9
"""Share by which each further such block on a multiprocessor lengthens a step (0.45 forward, 0.95 backward)."""


@dataclass(frozen=True)
class StepCost:
    """The cost of one step of a sweep by the number of its rows, in units of the cost of one more row."""

    overhead: float = 0.0
    """Fixed cost of a step."""
    threads: int = 1
    """Workers that share the rows."""
    copies_inputs: bool = False
    """Whether a sweep copies the inputs of its stretches, so that warm-ups longer than a chunk cost memory."""
    work: int = 0
    """Multiplications in a row's step if workers can share its units, else 0."""
    worth: float = WORTH_CUTTING
    """Share of a single chunk's time that several chunks after a long warm-up must not exceed."""
    start: ClassVar[float] = 0.0

    def fills(self, batch: int) -> int:
        """The number of chunks of `batch` sequences that just fills the machine, if there is such a number; else 0."""
        return 0

    def of(self, rows: int, stores: bool = False) -> float:
        """The cost of a step of `rows` rows; `stores`: whether it writes states or gradients, if that matters."""
        together, members = team_of(rows, self.threads, self.work)
        return self.overhead + (together if members == 1 else together / members + MEETING / self.work)


@dataclass(frozen=True)
class RegisterCost:
    """The cost of a step by the CUDA kernels for layers, in microseconds.

    Either blocks run single rows, as many as the multiprocessors hold, or tiles of rows, or each step of a wide layer
    is a launch.
    """

    gates: float
    """Time of a step relative to a GRU's."""
    units: int
    side_by_side: int
    """Number of single rows that run side by side before one more slows all down."""
    tiled: bool
    """Whether there is a kernel for tiles of rows."""
    blocks: int = 1
    """Multiprocessors that share a row."""
    backward: bool = False
    copies_inputs: ClassVar[bool] = False
    worth: ClassVar[float] = 1.0

    @property
    def start(self) -> float:
        """What a launch takes before its first step."""
        return SWEEP_START[0] + SWEEP_START[1] * min(self.units, MOST_HELD) ** 2

    def fills(self, batch: int) -> int:
        """The number of chunks whose rows just run side by side, if several blocks share a row; else 0.

        For such kernels the next power of two below may be only about half of it.
        """
        return self.side_by_side // batch if self.blocks > 1 else 0

    def of(self, rows: int, stores: bool = False) -> float:
        if self.blocks == 1 and rows <= self.side_by_side * waves_of(self.units):
            own, each = SINGLE_STEP[self.backward]
            shared = min(math.pow(self.units / SHARING[0], SHARING[1]), 1.0)
            more = math.ceil(rows / self.side_by_side) - 1
            return (own + each * self.units) * (1 + shared * more) * self.gates
        if self.tiled:
            own, each = TILE_STEP[self.backward]
            more = math.ceil(rows / (TILE_ROWS * self.side_by_side)) - 1
            step = (own + each * self.units**2) * (1 + min(self.units / TILES_SHARING, 1.0) * more)
            return step * self.gates * (TILE_STORES[self.backward] if stores else 1.0)
        if self.blocks > 1 and rows <= self.side_by_side:
            return CLUSTER_STEP[self.backward] * self.gates
        return (WIDE_STEP + (WIDE_ROW[0] + WIDE_ROW[1] * self.units) * self.units * rows) * self.gates


@dataclass(frozen=True)
class GeneratedCost:
    """The cost of a step by kernels generated from a user's cell, a block for each row, in steps of a lone block."""

    processors: int
    copies_inputs: ClassVar[bool] = False
    worth: ClassVar[float] = WORTH_DRIVING
    start: ClassVar[float] = 0.0

    def fills(self, batch: int) -> int:
        """The number of chunks that just fill the machine, with one row or four rows on every multiprocessor."""
        return (self.processors if batch == 1 else ROWS_TOGETHER * self.processors) // batch

    def of(self, rows: int, stores: bool = False) -> float:
        if rows <= self.processors:
            return 1.0
        return FOUR_ROWS * (1 + SHARED_BLOCK * (math.ceil(rows / ROWS_TOGETHER / self.processors) - 1))


Cost = StepCost | RegisterCost | GeneratedCost


@lru_cache(maxsize=64)
def register_cost(kernel: str, n: int, device: int, backward: bool = False) -> RegisterCost:
    variant = Variant(kernel, n, 0, True, True, 1, False, False)
    gates = GATES[variant.text.products]
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    side_by_side = processors if variant.cluster == 1 else most_single(variant, device)
    return RegisterCost(gates, n, side_by_side, n <= variant.text.most_units, variant.cluster, backward)


def step_cost(problem: Recurrence, backward: bool = False) -> Cost:
    """The cost of a step of this problem, forward or backward if they differ."""
    if in_compiled_code(problem):
        return compiled_cost(sweeper_kind(problem).work(problem))
    size, n = problem.cell.size, problem.cell.parts[0]
    device = problem.u.device
    if FusedCUDASweeper.supports(problem):
        return GeneratedCost(torch.cuda.get_device_properties(device).multi_processor_count)
    if has_kernels(problem):
        return register_cost(str(problem.cell.kernel), n, device.index or 0, backward)
    if device.type != "cpu":
        return StepCost(TORCH_STEP_ON_GPU / row_in_torch(size), copies_inputs=True)
    return cost_beside_torchs(size) if problem.cell.in_cudnn else cost_in_torch(size)


def cost_in_torch(size: int, worth: float = WORTH_CUTTING) -> StepCost:
    """What a step of plain torch operations costs on a CPU."""
    return StepCost(TORCH_STEP / row_in_torch(size), torch.get_num_threads(), copies_inputs=True, worth=worth)


def cost_beside_torchs(size: int) -> StepCost:
    """The same of a layer that torch has, too."""
    return cost_in_torch(size, WORTH_BESIDE_TORCHS)


def compiled_cost(work: int = 0) -> StepCost:
    """The cost of a step of compiled code on a CPU; `work` as in `StepCost`."""
    return StepCost(COMPILED_STEP, torch.get_num_threads(), work=work)


def row_in_torch(size: int) -> float:
    """Microseconds of each row in a step of plain torch operations, by the state size."""
    return TORCH_ROW[0] * size * size + TORCH_ROW[1] * size


def cost_of(steps: int, batch: int, chunk: int, warmup: int, cost: Cost) -> float:
    """The cost of a sweep with a warm-up that writes the states or gradients of its chunks."""
    rows = math.ceil(steps / chunk) * batch
    return cost.start + warmup * cost.of(rows) + chunk * cost.of(rows, stores=True)


def cost_of_sweeps(steps: int, batch: int, chunk: int, sweeps: int, cost: Cost) -> float:
    """The cost of several sweeps of CUDA kernels with corrections between them; only the last writes its results."""
    links = math.ceil(steps / chunk)
    bare, whole = cost.of(links * batch), cost.of(links * batch, stores=True)
    between = BETWEEN_SWEEPS[0] + BETWEEN_SWEEPS[1] * links
    return sweeps * (cost.start + chunk * bare + between) + chunk * (whole - bare)


@lru_cache(maxsize=256)
def cheapest(steps: int, batch: int, warmup: int, cost: Cost) -> tuple[int, int]:
    """The chunk and warm-up that take the least time, `(steps, 0)` for one chunk.

    No warm-up is longer than a chunk if that would cost memory.
    """
    best, best_cost = (steps, 0), cost_of(steps, batch, steps, 0, cost)
    counts = {2**power for power in range(1, MOST_STEPS.bit_length())} | {cost.fills(batch)}
    for chunks in sorted(count for count in counts if 2 <= count <= steps // 4):
        chunk = math.ceil(steps / chunks)
        total = cost_of(steps, batch, chunk, warmup, cost)
        if total < best_cost and not (cost.copies_inputs and warmup > chunk):
            best, best_cost = (chunk, warmup), total
    return best


@lru_cache(maxsize=256)
def chunk_to_correct(steps: int, batch: int, cost: Cost) -> int:
    """The longest chunk whose sweeps take little more time than the cheapest ones: longer chunks need no more sweeps.

    All of the steps if there is no such chunk.
    """
    counts = {2**power for power in range(1, MOST_STEPS.bit_length())} | {cost.fills(batch)}
    chunks = {math.ceil(steps / count) for count in counts if 2 <= count <= steps // LEAST_CORRECTED}
    takes = {chunk: cost_of_sweeps(steps, batch, chunk, 1, cost) for chunk in sorted(chunks)}
    most = LITTLE_MORE * min(takes.values(), default=math.inf)
    return max((chunk for chunk, time in takes.items() if time <= most), default=steps)


@lru_cache(maxsize=256)
def longest_warmup(steps: int, batch: int, most: float, cost: Cost) -> int:
    """The longest warm-up with which several chunks take no more time than `most`; 0 if there is none."""

    def takes_more(warmup: int) -> bool:
        chunk, entered = cheapest(steps, batch, warmup, cost)
        return chunk >= steps or cost_of(steps, batch, chunk, entered, cost) > most

    return max(bisect_left(range(1, steps), True, key=takes_more), 0)


@lru_cache(maxsize=256)
def cheapest_dense(steps: int, batch: int, size: int, cost: Cost) -> tuple[int, float]:
    """The chunk for which dense transfers of a state of this size take the least time, and that time.

    The time is infinite if the kernels have no dense transfers.
    """
    best, best_cost = steps, math.inf
    if not isinstance(cost, RegisterCost) or size > LARGEST:
        return best, best_cost
    for chunks in (2**power for power in range(2, 9)):
        chunk, rows = math.ceil(steps / chunks), chunks * batch
        if chunks > steps // 4 or rows * size * size > MOST_DENSE:
            break
        total = chunk * (cost.of(rows * size) + 2 * cost.of(rows)) + 2 * chunks * DENSE_LINK
        if total < best_cost:
            best, best_cost = chunk, total
    return best, best_cost


@lru_cache(maxsize=256)
def fewest_to_cut(batch: int, warmup: int, cost: Cost) -> int | None:
    """The number of steps from which several chunks take less time than one; None if they never do."""
    if not _is_cut(MOST_STEPS, batch, warmup, cost):
        return None
    return bisect_left(range(MOST_STEPS), True, key=lambda steps: _is_cut(steps, batch, warmup, cost))


def _is_cut(steps: int, batch: int, warmup: int, cost: Cost) -> bool:
    return cheapest(steps, batch, warmup, cost)[0] < steps


def decay_is_cheap(problem: Recurrence) -> bool:
    """Whether a step's decay costs no more than the step; False if it must be read off a user's dense Jacobian."""
    cell = problem.cell
    if not isinstance(cell, GenericCell):
        return True
    rows = spread(problem.steps * problem.batch, problem.u.device)  # spread over all of time: the structure may change
    return cell.is_diagonal(problem.initial[rows % max(problem.batch, 1)], problem.u.flatten(0, 1)[rows])


def newton_up_to(problem: Recurrence) -> int:
    """Largest state size for which dense transfers may pay; 0 with compiled sweeps, which run all of time faster."""
    if may_be_compiled(problem) or FusedCUDASweeper.supports(problem) or problem.rounded is not problem.initial:
        return 0
    return NEWTON_UP_TO if problem.u.device.type == "cpu" else NEWTON_UP_TO_ON_GPU
