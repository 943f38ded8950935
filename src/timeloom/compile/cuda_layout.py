"""The layout of a CUDA kernel: which thread computes what, and what is in registers, shared or global memory.

A loop's unit belongs to a few lanes of a warp, the same for all loops of its width: values that a later loop reads of
the same unit stay in the thread's registers. Operands of products, and sums over a row, go through shared memory.
Weights stay in registers for all steps as far as they fit there, then in shared memory; what fits neither is read from
global memory at every step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from timeloom.compile.graph import Matrix
from timeloom.compile.program import Fused, Program, overlap
from timeloom.compile.refusal import NotFused
from timeloom.compile.schedule import Loop, Schedule

Direction = Literal["forward", "adjoint"]
Where = Literal["registers", "shared", "memory"]
WANTED_TERMS = 48
"""Terms of a unit's products per lane, about: more lanes would spend their time adding up partial sums."""
LANES_WANTED = 256
"""Threads of a block up to which a unit gets more than one lane."""
MOST_THREADS = 512
MOST_LOCAL = 4
"""Units per thread up to which values passed between loops stay in its registers."""
MOST_VECTORS = 16
"""Most elements of per-unit vectors that a thread keeps in registers."""
REGISTERS, MOST_REGISTERS, WORKING = 65536, 255, 64
"""Registers of a multiprocessor, most registers of a thread, and those it needs beside weights and kept values."""
RINGS = (6, 4, 3, 2)
"""Possible sizes, in steps, of the ring buffer of inputs in shared memory: the largest that fits is used."""


@dataclass(frozen=True)
class Packed:
    """The layout of a stack of matrices for a kernel: unchanged, or, `in_fours`, `[matrix][four terms][unit][4]`."""

    matrix: int
    in_fours: bool = False
    transposed: bool = False


@dataclass
class Product:
    """One use of a stack of matrices, or of `which` of them: as they are, or transposed for gradients."""

    loop: int
    matrix: int
    transposed: bool
    which: tuple[int, ...]
    shape: Matrix
    """The shape of the stack in this use, transposed where it is."""
    operands: tuple[int, ...]
    """The value that each matrix multiplies; one for all of them unless transposed."""
    column: int
    where: Where = "memory"


@dataclass
class Layout:
    """The layout of one kernel, for blocks of `rows` rows with `room` bytes of shared memory."""

    fused: Fused
    direction: Direction
    program: Program
    plan: Schedule
    room: int
    rows: int
    products: list[Product] = field(default_factory=list)
    weights: list[Packed] = field(default_factory=list)
    """Layouts of the kernel's weight arguments, in order."""
    defines: dict[str, int | str] = field(default_factory=dict)
    """Sizes and offsets, by the names of macros in the kernel's files."""

    def __post_init__(self) -> None:
        loops = self.plan.loops
        self.products = [product for number, loop in enumerate(loops) for product in self._products(number, loop)]
        self.slices = {loop.width: self._slices(loop.width) for loop in loops}
        wanted = max((loop.width * self.slices[loop.width] for loop in loops), default=1)
        self.threads = min(-(-wanted // 32) * 32, MOST_THREADS)
        if self.rows > 1 and any(self.units_of(loop.width) > MOST_LOCAL for loop in loops):
            raise NotFused(f"{max(loop.width for loop in loops)} units are too many for {self.rows} rows of a block")
        self.adds = self.direction == "adjoint" and overlap(self.program, self.fused.parts)
        self._find_slots()
        self.used = self._lay_out()

    def _products(self, number: int, loop: Loop) -> list[Product]:
        found, column = [], 0
        for matrix, operand in loop.stacks:
            shape = self.fused.matrices[matrix]
            found.append(Product(number, matrix, False, tuple(range(shape.count)), shape, (operand,), column))
            column += shape.count
        for pull in loop.pulls:
            value = self.plan.graph[pull]
            matrix = int(value.detail[0])
            given = [(i, arg) for i, arg in enumerate(value.args) if not self._is_zero(arg)]
            which, operands = tuple(i for i, _ in given), tuple(arg for _, arg in given)
            shape = self.fused.matrices[matrix].transposed
            found.append(Product(number, matrix, True, which, shape, operands, column))
            column += 1
        return found

    def _is_zero(self, index: int) -> bool:
        value = self.plan.graph[index]
        return value.op == "number" and value.detail[0] == 0

    def _slices(self, width: int) -> int:
        """Lanes per unit in all loops of this width: one for each row if a block has several."""
        if self.rows > 1:
            return self.rows
        terms = max(
            sum(len(p.which) * p.shape.inputs for p in self.products if p.loop == number)
            for number, loop in enumerate(self.plan.loops)
            if loop.width == width
        )
        slices = 1
        while slices < 32 and terms > WANTED_TERMS * slices and 2 * width * slices <= LANES_WANTED:
            slices *= 2
        return slices

    def units_of(self, width: int) -> int:
        """Units per thread."""
        return -(-width * self.slices[width] // self.threads)

    # ---- what lies where ---------------------------------------------------------------------------------------------

    def _find_slots(self) -> None:
        """Choose the vectors that go through shared memory: operands of products, and those with too many units."""
        operands = {operand for product in self.products for operand in product.operands}
        self.multiplied = {value for value in self.plan.slots if value in operands}
        read = {number for loop in self.plan.loops for kind, number, _ in loop.reads if kind == "slot"}
        self.local = {v for v in read if self.units_of(self.plan.slots[v]) <= MOST_LOCAL}
        self.in_shared = [v for v in self.plan.slots if v in self.multiplied or v not in self.local]
        self.grad_multiplied = any(self.plan.graph[operand].op == "grad" for operand in operands)
        numbers = sum(self.units_of(width) for width in self.fused.units if width in self.slices)
        self.vectors_kept = numbers <= MOST_VECTORS

    def _lay_out(self) -> int:
        """Place everything in shared memory, and the weights; returns the number of floats used."""
        fused, places, room = self.fused, [], 0
        for width in fused.parts:
            places.append(room)
            room += _in_fours(width)
        inputs = _in_fours(sum(fused.inputs))
        step = inputs if self.direction == "forward" else inputs + 2 * room
        warps = -(-self.threads // 32)
        sizes: dict[str, int] = {"STATE": 2 * room, "DECAY": room, "TOTALS": len(self.plan.totals) * _in_fours(warps)}
        sizes |= {f"SLOT_{value}": _in_fours(self.plan.slots[value]) for value in self.in_shared}
        if self.adds:
            sizes |= {f"PLACE_{number}": _in_fours(place.width) for number, place in enumerate(self.program.next)}
        fixed, most = sum(sizes.values()), self.room // 4
        ring = next((ring for ring in RINGS if self.rows * self._apart(fixed + ring * step) <= most), None)
        if ring is None:
            raise NotFused(
                f"a row takes {4 * (fixed + RINGS[-1] * step)} bytes of a multiprocessor's shared memory, "
                f"and this GPU has {self.room} for {self.rows}"
            )
        sizes["RING"] = ring * step
        at = 0
        for name, size in sizes.items():
            self.defines[f"AT_{name}"] = at
            at += size
        self.defines["ROW_ROOM"] = self._apart(at)
        at = self._place_weights(self.rows * self._apart(at), most)
        self.defines |= {
            "THREADS": self.threads, "ROWS": self.rows, "RING": ring, "RING_ROOM": step,
            "PARTS": len(fused.parts), "ROOM": room, "SIZE": sum(fused.parts),
            "PART_WIDTHS": _listed(fused.parts), "PART_PLACES": _listed(places),
            "PART_OFFSETS": _listed([sum(fused.parts[:i]) for i in range(len(fused.parts))]),
            "INPUTS": sum(fused.inputs), "WRITTEN": fused.gate_width, "TOTALS": len(self.plan.totals),
            "DECAYING": sum(1 << part for part in {place.part for place in fused.forward.kept}),
            "GRAD_IS_MULTIPLIED": int(self.grad_multiplied), "IN_FOURS": int(all(w % 4 == 0 for w in fused.parts)),
            "MATRICES": len(self.weights), "VECTORS": len(fused.units),
        }  # fmt: skip
        return at

    def _apart(self, floats: int) -> int:
        """Floats from one row to the next, such that the lanes of a warp access different banks."""
        return floats if self.rows == 1 else -(-floats // 32) * 32 + 32 // self.rows

    def _place_weights(self, at: int, most: int) -> int:
        """Place weights in registers, then in shared memory from `at` on; returns where that ends."""
        kept = sum(self.units_of(self.plan.slots[v]) for v in self.local)
        kept += sum(self.units_of(w) for w in self.fused.units if w in self.slices) if self.vectors_kept else 0
        left = min(REGISTERS // self.threads, MOST_REGISTERS) - WORKING - kept
        for number, product in enumerate(self.products):
            width, slices = product.shape.blocks * product.shape.outputs, self.slices[self.width_of(product)]
            groups = -(-product.shape.inputs // (4 * slices))
            registers = self.units_of(width) * len(product.which) * groups * 4
            stride = -(-width // 8) * 8 + (8 // slices if slices < 8 else 1) if slices > 1 else width
            floats = len(product.which) * groups * slices * stride * 4
            whole = len(product.which) == product.shape.count  # matrices that are not used would be loaded, too
            if registers <= left and whole:
                product.where, left = "registers", left - registers
            elif at + floats <= most and whole:
                product.where = "shared"
                self.defines[f"AT_WEIGHTS_{number}"] = at
                at += floats
            if self.packed(product) not in self.weights:
                self.weights.append(self.packed(product))
        return at

    def width_of(self, product: Product) -> int:
        return self.plan.loops[product.loop].width

    @staticmethod
    def packed(product: Product) -> Packed:
        """The layout of a product's weights."""
        in_memory = product.where == "memory"
        return Packed(product.matrix, in_memory, in_memory and product.transposed)


def _in_fours(number: int) -> int:
    return -(-number // 4) * 4


def _listed(numbers: tuple[int, ...] | list[int]) -> str:
    return f"{{{', '.join(map(str, numbers))}}}"
