"""What sweeps cost, by the size of a problem and what runs them: decides chunks in microseconds, without measuring.

Its numbers were measured on 2 cores of a Xeon and on an H200; `python -m benchmarks.calibrate` measures them anew,
beside the stored ones, and `python -m benchmarks.rows` those of CUDA kernels by the rows that are walked side by side.
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
"""Largest state for which dense transfers may pay on a CPU: they cost a factor of S over a sweep."""
NEWTON_UP_TO_ON_GPU = 64
"""The same on a GPU."""
COMPILED_STEP = 0.5
"""Cost of a compiled sweep's step by itself, in rows."""
TORCH_STEP, TORCH_STEP_ON_GPU = 60.0, 6000.0
"""Microseconds of a step by itself, in plain torch operations."""
TORCH_ROW = 6e-5, 0.01
"""Microseconds of a row more in such a step: times the size of the state squared, and times the size."""
MEETING = 30000.0
"""What threads that share the units of a row lose by it in a step, in multiplications: they wait for each other."""
WORTH_CUTTING = 0.95
"""Share of the time of one chunk on a CPU that several must not exceed behind a long warm-up, which may turn out too
short."""
WORTH_BESIDE_TORCHS = 0.35
"""The same in plain torch operations, where torch's own layer runs one chunk in so much less time: a GRU of 16 units,
without gradients."""
WORTH_DRIVING = 0.5
"""The same of users' cells on a GPU, where the driver's sweeps follow a miss, launch by launch: a warm-up about as long
as a sequence took a trained network 52 ms, and one chunk 21."""
MOST_STEPS = 2**40
"""No sequence is longer."""


SINGLE_STEP = ((0.12, 0.003), (0.13, 0.0036))
"""Microseconds of a step of a GRU's row by itself, forward and backward: at least, and for each unit. These and all of
CUDA kernels below are of an H200."""
GATES = {1: 0.65, 3: 1.0, 4: 1.25}
"""The same of other cells, by the products of a step, beside a GRU's."""
SHARING = 100.0, 1.9
"""What one more such row on a multiprocessor adds to a step, as a share of it: units, in so many, to this power."""
CLUSTER_STEP = 0.8, 1.4
"""The same where several multiprocessors share a row, of any width."""
TILE_STEP = ((0.25, 4.3e-5), (0.4, 8.1e-5))
"""The same of tiles of rows, one on each multiprocessor: at least, and times the units squared."""
TILE_STORES = 1.5, 1.18
"""How much longer that is where states or gradients are written."""
TILES_SHARING = 64.0
"""What one more tile on a multiprocessor adds, as a share: units, in so many, and no more than all."""

WIDE_STEP, WIDE_ROW = 7.8, (1.5e-5, 2.3e-8)
"""The same of a step that is a launch and a product: at least, and for each unit of a row, by itself and times the
units."""

BETWEEN_SWEEPS = 5.0, 0.075
"""Microseconds of a sweep beside its steps: a launch, and for each chunk in the chain of corrections."""
LEAST_CORRECTED = 8
"""Shortest chunks to correct."""
LITTLE_MORE = 1.6
"""Time of a sweep over longer chunks, beside the cheapest one's, that may save sweeps."""
DENSE_LINK, MOST_DENSE = 0.6, 2**25
"""Microseconds of a link in a chain of dense transfers; and numbers of all transfers together, at most."""


FOUR_ROWS = 2.2
"""Where kernels are generated: time of a block's step of four rows, beside that of one row (1.4 forward, 1.9 backward
for cells of 64 units), and what more chunks cost beside their steps."""
SHARED_BLOCK = 0.9
"""What one more such block on a multiprocessor adds to a step, beside a lone one's (0.45 forward, 0.95 backward)."""


@dataclass(frozen=True)
class StepCost:
    """What one step of a sweep costs for so many rows, in units of what a row more costs."""

    overhead: float = 0.0
    """Cost of the step by itself."""
    threads: int = 1
    """Workers that share the rows."""
    copies_inputs: bool = False
    """Whether a sweep copies the inputs of its stretches, so that warm-ups longer than a chunk cost memory."""
    work: int = 0
    """Multiplications of a row's step, where workers can share its units."""
    worth: float = WORTH_CUTTING
    """Share of one chunk's time that several chunks must not exceed behind a long warm-up."""

    def fills(self, batch: int) -> int:
        """Chunks of so many sequences that fill the machine, where there is such a number; 0 where there is none."""
        return 0

    def of(self, rows: int, stores: bool = False) -> float:
        """`stores`: whether states or gradients are written, where that tells."""
        together, members = team_of(rows, self.threads, self.work)
        return self.overhead + (together if members == 1 else together / members + MEETING / self.work)


@dataclass(frozen=True)
class RegisterCost:
    """The same in microseconds, by the CUDA kernels: rows by themselves, as many as the multiprocessors hold, rows in
    tiles, or a launch a step of wide layers.
    """

    gates: float
    """Time of a step, beside a GRU's."""
    units: int
    side_by_side: int
    """Rows that are walked side by side, each by itself, before one more makes all slower."""
    tiled: bool
    """Whether there is a kernel for tiles of rows."""
    blocks: int = 1
    """Multiprocessors that share a row."""
    backward: bool = False
    copies_inputs: ClassVar[bool] = False
    worth: ClassVar[float] = 1.0

    def fills(self, batch: int) -> int:
        """Chunks of so many sequences whose rows are just walked side by side, where several blocks share each: there
        the next power of two below may be half of it.
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
    """The same by kernels generated from a cell's step, a block for each row, in units of a lone block's step."""

    processors: int
    copies_inputs: ClassVar[bool] = False
    worth: ClassVar[float] = WORTH_DRIVING

    def fills(self, batch: int) -> int:
        """Chunks of so many sequences that just fill the machine, with a row or with four on every multiprocessor."""
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
    """What a step of this problem costs, forward or backward where that differs."""
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
    """What a step of compiled code costs on a CPU; `work` as in `StepCost`."""
    return StepCost(COMPILED_STEP, torch.get_num_threads(), work=work)


def row_in_torch(size: int) -> float:
    """Microseconds of a row more in a step of plain torch operations, by the size of the state."""
    return TORCH_ROW[0] * size * size + TORCH_ROW[1] * size


def cost_of(steps: int, batch: int, chunk: int, warmup: int, cost: Cost) -> float:
    """What a sweep costs that writes what it finds in its chunks."""
    rows = math.ceil(steps / chunk) * batch
    return warmup * cost.of(rows) + chunk * cost.of(rows, stores=True)


def cost_of_sweeps(steps: int, batch: int, chunk: int, sweeps: int, cost: Cost) -> float:
    """What several sweeps of CUDA kernels cost with corrections between them; the last one writes what it finds."""
    links = math.ceil(steps / chunk)
    bare, whole = cost.of(links * batch), cost.of(links * batch, stores=True)
    return sweeps * (chunk * bare + BETWEEN_SWEEPS[0] + BETWEEN_SWEEPS[1] * links) + chunk * (whole - bare)


@lru_cache(maxsize=256)
def cheapest(steps: int, batch: int, warmup: int, cost: Cost) -> tuple[int, int]:
    """Chunk and warm-up that take least time, `(steps, 0)` for one chunk; no warm-up is longer than a chunk where that
    would cost memory.
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
    """The longest chunk whose sweeps take little more time than the cheapest do: longer ones take no more sweeps. All
    of the steps where none takes less than that.
    """
    counts = {2**power for power in range(1, MOST_STEPS.bit_length())} | {cost.fills(batch)}
    chunks = {math.ceil(steps / count) for count in counts if 2 <= count <= steps // LEAST_CORRECTED}
    takes = {chunk: cost_of_sweeps(steps, batch, chunk, 1, cost) for chunk in sorted(chunks)}
    most = LITTLE_MORE * min(takes.values(), default=math.inf)
    return max((chunk for chunk, time in takes.items() if time <= most), default=steps)


@lru_cache(maxsize=256)
def longest_warmup(steps: int, batch: int, most: float, cost: Cost) -> int:
    """The longest warm-up of several chunks that takes no more time than `most`; 0 where none does."""

    def takes_more(warmup: int) -> bool:
        chunk, entered = cheapest(steps, batch, warmup, cost)
        return chunk >= steps or cost_of(steps, batch, chunk, entered, cost) > most

    return max(bisect_left(range(1, steps), True, key=takes_more), 0)


@lru_cache(maxsize=256)
def cheapest_dense(steps: int, batch: int, size: int, cost: Cost) -> tuple[int, float]:
    """Chunk for which dense transfers of a state of so many numbers take least time, and that time: infinite where the
    kernels have none.
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
    """Steps from which on several chunks take less time than one; None where they never do."""
    if not _is_cut(MOST_STEPS, batch, warmup, cost):
        return None
    return bisect_left(range(MOST_STEPS), True, key=lambda steps: _is_cut(steps, batch, warmup, cost))


def _is_cut(steps: int, batch: int, warmup: int, cost: Cost) -> bool:
    return cheapest(steps, batch, warmup, cost)[0] < steps


def decay_is_cheap(problem: Recurrence) -> bool:
    """Whether a step's decay costs no more than the step: not where it must be read off a user's dense Jacobian."""
    cell = problem.cell
    if not isinstance(cell, GenericCell):
        return True
    rows = spread(problem.steps * problem.batch, problem.u.device)  # of all of time: it may be another later on
    return cell.is_diagonal(problem.initial[rows % max(problem.batch, 1)], problem.u.flatten(0, 1)[rows])


def newton_up_to(problem: Recurrence) -> int:
    """Largest state for which dense transfers may pay; none beside compiled sweeps, which run all of time in less."""
    if may_be_compiled(problem) or FusedCUDASweeper.supports(problem) or problem.rounded is not problem.initial:
        return 0
    return NEWTON_UP_TO if problem.u.device.type == "cpu" else NEWTON_UP_TO_ON_GPU
