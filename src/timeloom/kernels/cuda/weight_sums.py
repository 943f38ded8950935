"""Gradients of a layer's weights and biases: outer products of gate gradients, summed over all steps.

For narrow layers one kernel reads gate gradients, inputs and states once, and adds up products of float32's accuracy on
the tensor cores; another adds up its shares of time (weight_sums.cu). For all others, and as their readable twin, every
weight's gradient is a product of its own (products.py).
"""

from __future__ import annotations

import math
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from timeloom.kernels import faults
from timeloom.kernels.cuda import nvrtc, products
from timeloom.kernels.cuda.chain import index_of, on_device
from timeloom.kernels.cuda.driver import Function
from timeloom.kernels.cuda.programs import WeightSumsArgs, architecture, headers, source_of

TOLD_AS = "weight sums"
STEPS, SLOTS, GROUP = 32, 4, 16
"""As in weight_sums.cu: steps that a block multiplies at a time and reads at a time, columns that share a scale."""
ADDED_AT_ONCE, ADDERS = 128, 256
"""Numbers that a block of `add_up` adds up over all shares, and its threads."""
BEGINNING = 2 * STEPS
"""The steps that a block could multiply in the time that it takes to begin and to end."""
MOST_PARTIAL = 1 << 24
"""Most numbers in the sums of all shares."""
LEAST_STEPS = 1 << 10
"""Fewest rows of gate gradients: below, a step far smaller than its neighbours would count for too little."""
NARROW, NARROWER, MANY_STEPS = 256, 128, 1 << 17
"""Columns of states and inputs together up to which one pass is faster than several products; beyond so many rows,
fewer columns. On an H200, GRU, µs in place of those of several products: 32 units, 2^14 rows 12 (31), 2^18 72 (269); 64
units 20 (55), 252 (474); 128 units 61 (117), but 792 (741); 256 units 212 (196). `python -m tests.gpu sums` checks
them."""
PARTIAL_PER_STEP = 1 << 14
"""Numbers in the sums of shares that are written and read in the time that all blocks take for a step."""


class Tile(NamedTuple):
    """The part of a weight's gradient that a block adds up, and how many warps share its rows and columns."""

    gates: int
    values: int
    down: int
    across: int
    at_once: int
    """Blocks that run on a multiprocessor concurrently."""
    cost: int
    """Cycles that a multiprocessor takes for one step of one block: to read it, or to multiply it if that is longer."""

    @property
    def threads(self) -> int:
        return self.gates + self.values

    @property
    def shared_bytes(self) -> int:
        """Two buffers of halves, the magnitudes found in them, and the inverse of their scales."""
        groups = self.threads // GROUP
        return 2 * 2 * STEPS * self.threads * 2 + 2 * (SLOTS + 1) * groups * 4

    @property
    def numbers(self) -> int:
        """What a block writes: its part of the gradient, and sums of gate gradients."""
        return self.gates * self.values + self.gates

    def tiles(self, rows: int, columns: int) -> int:
        return math.ceil(rows / self.gates) * math.ceil(columns / self.values)

    def source(self, aligned: bool) -> str:
        defines = {"GATES": self.gates, "VALUES": self.values, "WARPS_DOWN": self.down, "WARPS_ACROSS": self.across}
        return source_of(defines | {"ALIGNED": int(aligned)}, "weight_sums.cu")


TILES = (Tile(96, 32, 2, 2, 4, 16), Tile(192, 64, 4, 2, 1, 32), Tile(128, 128, 2, 4, 1, 38))
"""All gates of a GRU of 32 or 64 units, and squares for wider layers."""


class WeightSums(NamedTuple):
    """Gradients of a layer's weights, and of its biases if it has any."""

    w_ih: Tensor
    w_hh: Tensor
    b_ih: Tensor | None
    b_hh: Tensor | None


def weight_sums(kernel: str, gate_grads: Tensor, x: Tensor, before: Tensor, biased: bool) -> WeightSums:
    """The gradients for gate gradients `(N, G)`, inputs `(N, D)` and operands of the recurrent product `(N, n)`."""
    if in_one_pass(len(x), x.shape[1] + before.shape[1]) and can_run(gate_grads):
        try:
            return faults.guarded(TOLD_AS, lambda: _by_kernel(kernel, gate_grads, x, before, biased))
        except faults.KernelFault:
            pass
    return _by_products(kernel, gate_grads, x, before, biased)


def in_one_pass(steps: int, columns: int) -> bool:
    """Whether one pass is the fastest for so many rows, and columns of inputs and states together."""
    return steps >= LEAST_STEPS and columns <= (NARROW if steps <= MANY_STEPS else NARROWER)


def input_gates(kernel: str, gate_grads: Tensor) -> Tensor:
    """The gradients of projected inputs: a GRU's fourth gate gradient is of the recurrent product alone."""
    return gate_grads[:, : 3 * gate_grads.shape[1] // 4] if kernel == "gru" else gate_grads


def recurrent_gates(kernel: str, by_gate: Tensor) -> Tensor:
    """The rows that belong to `w_hh`: a GRU's third gate gradient is of its inputs alone."""
    if kernel != "gru":
        return by_gate
    n = len(by_gate) // 4
    return torch.cat([by_gate[: 2 * n], by_gate[3 * n :]])


@cache
def foresee(kernel: str, units: int, inputs: int, device: torch.device) -> None:
    """Compile the kernels for a layer in the background, if they run on this device."""
    if device.type == "cuda" and units + inputs <= NARROW:
        source = _tile(_rows(kernel, units), inputs, units).source(aligned=units % 4 == inputs % 4 == 0)
        nvrtc.compile_ahead(source, architecture(index_of(device)), headers())


def _by_products(kernel: str, gate_grads: Tensor, x: Tensor, before: Tensor, biased: bool) -> WeightSums:
    n, grads, of_h = before.shape[1], products.Rows(gate_grads), products.Rows(before)
    total, d_u = grads.sum() if biased else None, input_gates(kernel, gate_grads)
    w_hh = gate_grads.new_empty(d_u.shape[1], n)
    if kernel == "gru":
        products.sum_outer(grads, of_h, 0, 2 * n, out=w_hh[: 2 * n])
        products.sum_outer(grads, of_h, 3 * n, 4 * n, out=w_hh[2 * n :])
    else:
        products.sum_outer(grads, of_h, 0, len(w_hh), out=w_hh)
    w_ih = products.sum_outer(grads, products.Rows(x), 0, d_u.shape[1])
    if total is None:
        return WeightSums(w_ih, w_hh, None, None)
    b_hh = recurrent_gates(kernel, total)
    return WeightSums(w_ih, w_hh, total[: len(w_ih)], b_hh.clone() if b_hh is total else b_hh)


def _by_kernel(kernel: str, gate_grads: Tensor, x: Tensor, before: Tensor, biased: bool) -> WeightSums:
    gate_grads, x, before = (rows if rows.stride(1) == 1 else rows.contiguous() for rows in (gate_grads, x, before))
    (steps, inputs), n = x.shape, before.shape[1]
    rows, device = _rows(kernel, n), index_of(x.device)
    tile = _tile(rows, inputs, n)
    tiles = tile.tiles(rows, inputs), tile.tiles(rows, n)
    share = share_of(steps, sum(tiles), tile, processors(device))
    shares = math.ceil(steps / share)
    partial = x.new_empty(shares, sum(tiles), tile.numbers)
    found = WeightSums(
        x.new_empty(rows, inputs),
        x.new_empty(rows, n),
        x.new_empty(rows) if biased else None,
        x.new_empty(rows) if biased else None,
    )
    tensors = {"grads": gate_grads, "x": x, "before": before, "partial": partial, **found._asdict()}
    args = WeightSumsArgs(
        steps=steps, share=share, shares=shares, rows=rows, inputs=inputs, units=n,
        apart=2 * n, gap=n if kernel == "gru" else 0,
        grads_stride=gate_grads.stride(0), x_stride=x.stride(0), before_stride=before.stride(0),
        input_tiles=tiles[0], state_tiles=tiles[1],
        **{name: tensor.data_ptr() for name, tensor in tensors.items() if tensor is not None},
    )  # fmt: skip
    aligned = n % 4 == 0 and all(_is_aligned(matrix) for matrix in (gate_grads, x, before))
    blocks = math.ceil(sum(tiles) * tile.numbers / ADDED_AT_ONCE)
    with on_device(device):
        function(device, tile, aligned, "sum_weights")(shares * sum(tiles), args)
        function(device, tile, aligned, "add_up")(blocks, args)
    return found


def can_run(gate_grads: Tensor) -> bool:
    return gate_grads.device.type == "cuda" and gate_grads.dtype == torch.float32


@cache
def function(device: int, tile: Tile, aligned: bool, name: str) -> Function:
    """The kernel `sum_weights` or `add_up` of weight_sums.cu."""
    code = nvrtc.compile_source(tile.source(aligned), architecture(device), headers())
    threads, shared = (tile.threads, tile.shared_bytes) if name == "sum_weights" else (ADDERS, 4 * 4 * ADDERS)
    return Function(device, code, name, threads, shared)


@lru_cache(maxsize=256)
def share_of(steps: int, tiles: int, tile: Tile, processors: int) -> int:
    """Steps of a share, so that all multiprocessors are busy to the end: a multiple of STEPS."""
    at_once = processors * tile.at_once
    most = max(1, min(steps // STEPS, 4 * at_once // tiles, MOST_PARTIAL // (tiles * tile.numbers)))

    def length(shares: int) -> int:
        return math.ceil(steps / shares / STEPS) * STEPS

    def cost(shares: int) -> float:
        """Time of the whole sum, in steps of one block, including its beginning and adding up the shares."""
        waves = math.ceil(tiles * shares / at_once)
        return waves * (length(shares) + BEGINNING) + shares * tiles * tile.numbers / PARTIAL_PER_STEP

    return length(min(range(1, most + 1), key=cost))


def _rows(kernel: str, units: int) -> int:
    """Rows of each weight matrix."""
    return {"gru": 3, "lstm": 4}.get(kernel, 1) * units


@cache
def _tile(rows: int, inputs: int, units: int) -> Tile:
    return min(TILES, key=lambda tile: tile.cost * (tile.tiles(rows, inputs) + tile.tiles(rows, units)))


def _is_aligned(rows: Tensor) -> bool:
    """Whether all rows may be read in vectors of four."""
    return rows.shape[1] % 4 == rows.stride(0) % 4 == rows.data_ptr() % 16 == 0


@cache
def processors(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
