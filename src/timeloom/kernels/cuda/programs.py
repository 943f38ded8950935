"""Sources of the CUDA kernels: a skeleton, a cell's text, and the sizes they are compiled for; and their arguments."""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from timeloom.cells.base import NO_MASKS, Masks
from timeloom.kernels.cuda.driver import Function
from timeloom.kernels.cuda.nvrtc import compile_ahead, compile_source

ROWS, TILE = 8, 16
"""Rows of a block and units of a warp in products on the tensor cores, as in products.cuh."""
RINGS = (8, 6, 4, 3)
"""Possible sizes, in steps, of the ring buffer of inputs in shared memory: the largest that fits is used."""
SINGLE_RING = 8
"""Its size where a block walks one row."""
CLUSTERS = (1, 2, 4, 8, 16)
"""Numbers of blocks that may share a row; GPUs need not support clusters of 16."""
MOST_WEIGHTS = 3 * 128**2
"""Recurrent weights that fit in the registers of a block."""
CHAIN_THREADS = {"carry": 256, "measure": 256, "compare": 1024, "certify": 1024}
FOLDER = Path(__file__).parent
GENERATED = FOLDER / "generated"
"""Texts of cells: see texts.py."""
HALVES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
"""HALF in the kernels, by the dtype of the weights: how the tensor cores multiply, split or in half precision."""


@dataclass(frozen=True)
class CellText:
    """What the host must know of a cell's text; the text defines all of it but `most_units`."""

    file: str
    products: int
    inputs: int
    parts: int
    """Parts of the state: h, or h and c."""
    saved: int
    streams: int
    """Vectors that a step of the adjoint reads."""
    most_units: int
    """Widest layer whose rows are walked in tiles: its weights fit in the registers of a multiprocessor."""


MOST_UNITS = {"gru": 128, "lstm": 64, "rnn_tanh": 128, "rnn_relu": 128}
"""`CellText.most_units` of the cells that have kernels."""


def file_of(kernel: str, zoned: bool) -> str:
    """The file of a cell's text in `GENERATED`."""
    return f"{'zoned_' * zoned}{kernel}.cuh"


def text_of(kernel: str, masks: Masks = NO_MASKS) -> CellText:
    return _text_of(kernel, masks.zoned)


@cache
def _text_of(kernel: str, zoned: bool) -> CellText:
    file = file_of(kernel, zoned)
    defined = dict(re.findall(r"^#define (\w+) (\d+)$", (GENERATED / file).read_text(), re.MULTILINE))
    count = {name: int(number) for name, number in defined.items()}
    seen = count["BEFORE"].bit_count() + count["AFTER"].bit_count()
    return CellText(
        file,
        products=count["PRODUCTS"],
        inputs=count["INPUTS"],
        parts=count["PARTS"],
        saved=count["SAVED"],
        streams=count["SAVED"] + seen + 1,
        most_units=MOST_UNITS[kernel],
    )


@dataclass(frozen=True)
class Variant:
    """One sweep kernel of a cell: everything that it is compiled for.

    single: a block walks one row, in float32; else ROWS rows, by the tensor cores.
    stores: 0 for only starts and ends; forward 1 for states, 2 for gate values too; adjoint 1 for gate gradients.
    masks: those of a dropout inside the recurrence (`timeloom.cells.masked`); that of the products must be the same at
        all steps of a sequence.
    """

    kernel: str
    units: int
    half: int
    adjoint: bool
    single: bool
    stores: int
    decay: bool
    resets: bool
    masks: Masks = NO_MASKS

    @property
    def text(self) -> CellText:
        return text_of(self.kernel, self.masks)

    @property
    def cluster(self) -> int:
        """Blocks that share a single row: the fewest whose registers hold the weights, 0 if none do."""
        weights = self.text.products * self.units**2
        return next((blocks for blocks in CLUSTERS if weights <= MOST_WEIGHTS * blocks), 0) if self.single else 1

    @property
    def slices(self) -> int:
        """Lanes that share a unit of a single row: about 48 weights per lane, up to 192 in the widest layers."""
        terms = self.text.products * self.units
        if self.cluster > 1:
            return next(slices for slices in (4, 8, 16) if terms <= 192 * slices)
        return 2 if terms > 256 and self.text.products < 4 else 4 if terms > 96 else 2 if terms > 24 else 1

    @property
    def padded(self) -> int:
        multiple = math.lcm(self.cluster * max(32 // self.slices, 1), 4 * self.slices) if self.single else TILE
        return -(-self.units // multiple) * multiple

    @property
    def threads(self) -> int:
        """Threads of a block; with tensor cores, a warp for each tile, and one that copies unless there are eight."""
        if self.single:
            return self.padded // self.cluster * self.slices
        warps = self.padded // TILE
        return 32 * (warps + (warps != 8))

    def shared_bytes(self, ring: int) -> int:
        """Dynamic shared memory of a block: two buffers of the operand, the ring, and scales."""
        if self.single:
            return 0
        products, vectors = (self.text.products, self.text.streams) if self.adjoint else (1, self.text.inputs)
        multiple, piece = (16, 4) if self.half else (8, 8)
        region = -(-self.padded // 4 // multiple) * multiple
        operand = 2 * ROWS * (products * region + 4) * piece * 2
        return operand + ring * ROWS * (vectors * self.padded + 4) * 4 + 2 * (self.padded // TILE) * ROWS * 4

    def ring(self, room: int) -> int | None:
        """The size, in steps, of the ring buffer that fits in `room` bytes of shared memory; None if none does."""
        return SINGLE_RING if self.single else next((ring for ring in RINGS if self.shared_bytes(ring) <= room), None)

    def source(self, ring: int) -> str:
        defines = {"UNITS": self.units, "N": self.padded, "RING": ring, "HALF": self.half}
        defines |= {"SLICES": self.slices, "CLUSTER": self.cluster, "DROPPED": int(self.masks.dropped)}
        defines |= {"STORES": self.stores, "DECAY": int(self.decay), "RESETS": int(self.resets)}
        return source_of(defines, f"{self.name}{'_single' * self.single}.cu")

    @property
    def name(self) -> str:
        return "adjoint" if self.adjoint else "forward"


@dataclass(frozen=True)
class Wide:
    """One sweep kernel of a wide layer, launched once per step: everything that it is compiled for.

    mode: see wide.cuh; the others as in `Variant`.
    """

    kernel: str
    units: int
    mode: int
    adjoint: bool
    stores: int
    decay: bool
    resets: bool
    masks: Masks = NO_MASKS

    @property
    def text(self) -> CellText:
        return text_of(self.kernel, self.masks)

    @property
    def name(self) -> str:
        return "wide_adjoint" if self.adjoint else "wide_forward"

    @property
    def threads(self) -> int:
        """Threads of a row: about two units per thread, up to 512 threads."""
        return min(512, -(-self.units // 64) * 32)

    @property
    def source(self) -> str:
        defines = {"UNITS": self.units, "THREADS": self.threads, "MODE": self.mode, "DROPPED": int(self.masks.dropped)}
        defines |= {"STORES": self.stores, "DECAY": int(self.decay), "RESETS": int(self.resets)}
        return source_of(defines, f"{self.name}.cu")


def source_of(defines: dict[str, int], file: str) -> str:
    """A skeleton, to be compiled for these definitions."""
    return "\n".join([*(f"#define {name} {value}" for name, value in defines.items()), f'#include "{file}"', ""])


@cache
def headers(cell: str | None = None) -> tuple[tuple[str, str], ...]:
    """All files that a source may include; `cell.cuh` is the file `cell` of `GENERATED`."""
    found = {path.name: path.read_text() for path in sorted(FOLDER.glob("*.cu*"))}
    if cell is not None:
        found["cell.cuh"] = (GENERATED / cell).read_text()
    return tuple(found.items())


def foresee(device: int, variants: Iterable[Variant]) -> None:
    """Compile these kernels, apart from those that do not fit, and those of chains in the background."""
    compile_ahead(_chain_source(), architecture(device))
    for variant in variants:
        ring = variant.ring(shared_room(device))
        if ring is not None:
            compile_ahead(variant.source(ring), architecture(device), headers(variant.text.file))


@cache
def sweep_function(device: int, variant: Variant) -> Function:
    ring = variant.ring(shared_room(device))
    assert ring is not None
    code = compile_source(variant.source(ring), architecture(device), headers(variant.text.file))
    return Function(device, code, variant.name, variant.threads, variant.shared_bytes(ring), variant.cluster)


@cache
def wide_function(device: int, variant: Wide) -> Function:
    code = compile_source(variant.source, architecture(device), headers(variant.text.file))
    return Function(device, code, variant.name, variant.threads, 0)


@cache
def chain_function(device: int, name: str) -> Function:
    """A kernel of chain.cu; `certify` needs a GPU with clusters."""
    code = compile_source(_chain_source(), architecture(device))
    return Function(device, code, name, CHAIN_THREADS[name], 0)


@cache
def _chain_source() -> str:
    return (FOLDER / "chain.cu").read_text()


@cache
def architecture(device: int) -> str:
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device))


@cache
def shared_room(device: int) -> int:
    """Bytes of shared memory that a block may have: 227 KiB on an H200, 163 on an A100, 99 on consumer GPUs."""
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 227 << 10))


def _fields(pointers: str, numbers: str) -> list[tuple[str, type]]:
    return [(name, ctypes.c_void_p) for name in pointers.split()] + [(name, ctypes.c_int) for name in numbers.split()]


class ForwardArgs(ctypes.Structure):
    """As in forward_args.cuh; missing arguments are NULL or zero."""

    _fields_ = [
        *_fields(
            "inputs mask weights vectors origin starts ends decay h c saved sequence begin end resets unless",
            "steps batch rows lead",
        ),
        ("limit", ctypes.c_float),
    ]


class AdjointArgs(ctypes.Structure):
    """As in adjoint_args.cuh."""

    _fields_ = [
        *_fields(
            "saved h c incoming weights vectors mask origin final starts ends decay gate_grads reset_grads sequence "
            "begin end lengths resets unless",
            "steps batch rows lead",
        ),
        ("limit", ctypes.c_float),
    ]


_STEP = [*_fields("product of_weights operand scales carried", "step")]


class WideForwardArgs(ctypes.Structure):
    """As in wide_forward.cu."""

    _fields_ = [("sweep", ForwardArgs), *_STEP]


class WideAdjointArgs(ctypes.Structure):
    """As in wide_adjoint.cu."""

    _fields_ = [("sweep", AdjointArgs), *_STEP]


class ChainArgs(ctypes.Structure):
    """As in chain.cu."""

    _fields_ = [
        *_fields("starts ends decay bound moves corrected measured worst", "links batch parts n fading"),
        ("floor", ctypes.c_float * 2),
        ("limit", ctypes.c_float),
    ]


class DenseChainArgs(ctypes.Structure):
    """As in dense_chain.cu."""

    _fields_ = _fields("matrices offsets first found", "links batch")


class WeightSumsArgs(ctypes.Structure):
    """As in weight_sums.cu."""

    _fields_ = _fields(
        "grads x before partial w_ih w_hh b_ih b_hh",
        "steps share shares rows apart gap grads_stride inputs units x_stride before_stride input_tiles state_tiles",
    )
