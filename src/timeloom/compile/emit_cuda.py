"""A compiled step as CUDA C++: its pointwise texts, and around each the loop over units that feeds it.

A block walks one row, or a few (see kernels/cuda/fused.cuh). A loop's unit belongs to a few lanes of a warp, the same for
all loops of its width: what a later loop reads of the same unit stays in the thread's registers. What a product is taken
of, and sums over a row, go through shared memory, behind a barrier. Weights stay in registers for all steps as far as they
fit there, then in shared memory; what fits neither is read from memory at every step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from timeloom.compile.graph import Matrix
from timeloom.compile.program import Fused, Program, overlap
from timeloom.compile.refusal import NotFused
from timeloom.compile.schedule import Item, Loop, Schedule, schedule
from timeloom.compile.text import pointwise_text

Direction = Literal["forward", "adjoint"]
Where = Literal["registers", "shared", "memory"]
WANTED_TERMS = 48
"""Terms of a unit's products for each lane, about: more lanes would spend their time on adding up."""
LANES_WANTED = 256
"""Threads of a block up to which a unit is given more than one lane."""
MOST_THREADS = 512
MOST_LOCAL = 4
"""Units of a thread up to which what loops leave for each other stays in its registers."""
MOST_VECTORS = 16
"""Numbers of per-unit vectors that a thread keeps in registers."""
REGISTERS, MOST_REGISTERS, WORKING = 65536, 255, 64
"""Registers of a multiprocessor, of a thread at most, and what a thread needs beside weights and what it keeps."""
RINGS = (6, 4, 3, 2)
"""Steps of inputs on the chip, the most that fit."""


@dataclass(frozen=True)
class Packed:
    """A stack of matrices as the kernel is given it: as it is, or, `in_fours`, as `[matrix][four terms][unit][4]`."""

    matrix: int
    in_fours: bool = False
    transposed: bool = False


@dataclass(frozen=True)
class CudaSource:
    """CUDA text, and what a launch needs to know of it."""

    text: str
    threads: int
    shared: int
    """Bytes of shared memory."""
    weights: tuple[Packed, ...]
    parts: int
    vectors: int
    rows: int
    """Rows of a block."""
    places: tuple[Where, ...]
    """Where the weights of each product are, in order."""


@dataclass
class _Product:
    """One use of a stack of matrices: forward, or transposed for gradients, of `which` of its matrices."""

    loop: int
    matrix: int
    transposed: bool
    which: tuple[int, ...]
    shape: Matrix
    """As it maps here."""
    operands: tuple[int, ...]
    """Values that each is multiplied with; of a stack that is not transposed one for all."""
    column: int
    where: Where = "memory"


def emit(fused: Fused, direction: Direction, room: int, rows: int = 1) -> CudaSource:
    """The source of one direction for blocks of so many bytes of shared memory and so many rows (a power of two up to
    32); NotFused where these are too many.
    """
    program = fused.forward if direction == "forward" else fused.adjoint
    offsets = tuple(sum(fused.inputs[:i]) for i in range(len(fused.inputs)))
    return _Kernel(fused, direction, program, schedule(program, offsets), offsets, room, rows).emit()


def _in_fours(number: int) -> int:
    return -(-number // 4) * 4


@dataclass
class _Kernel:
    fused: Fused
    direction: Direction
    program: Program
    plan: Schedule
    offsets: tuple[int, ...]
    room: int
    rows: int
    products: list[_Product] = field(default_factory=list)
    weights: list[Packed] = field(default_factory=list)
    defines: dict[str, int | str] = field(default_factory=dict)
    _left_places: set[int] = field(default_factory=set)

    def emit(self) -> CudaSource:
        fused, loops = self.fused, self.plan.loops
        self.products = [product for number, loop in enumerate(loops) for product in self._products(number, loop)]
        self.slices = {loop.width: self._slices(loop.width) for loop in loops}
        wanted = max((loop.width * self.slices[loop.width] for loop in loops), default=1)
        self.threads = min(-(-wanted // 32) * 32, MOST_THREADS)
        if self.rows > 1 and any(self._units(loop.width) > MOST_LOCAL for loop in loops):
            raise NotFused(f"{max(loop.width for loop in loops)} units are too many for {self.rows} rows of a block")
        self.adds = self.direction == "adjoint" and overlap(self.program, fused.parts)
        self._find_slots()
        used = self._lay_out()
        text = self._text()
        return CudaSource(text, self.threads, 4 * used, tuple(self.weights), len(fused.parts), len(fused.units), self.rows,
                          tuple(product.where for product in self.products))  # fmt: skip

    # ---- products, and who shares them -------------------------------------------------------------------------------

    def _products(self, number: int, loop: Loop) -> list[_Product]:
        found, column = [], 0
        for matrix, operand in loop.stacks:
            shape = self.fused.matrices[matrix]
            found.append(_Product(number, matrix, False, tuple(range(shape.count)), shape, (operand,), column))
            column += shape.count
        for pull in loop.pulls:
            value = self.plan.graph[pull]
            matrix = int(value.detail[0])
            given = [(i, arg) for i, arg in enumerate(value.args) if not self._is_zero(arg)]
            which, operands = tuple(i for i, _ in given), tuple(arg for _, arg in given)
            shape = self.fused.matrices[matrix].transposed
            found.append(_Product(number, matrix, True, which, shape, operands, column))
            column += 1
        return found

    def _is_zero(self, index: int) -> bool:
        value = self.plan.graph[index]
        return value.op == "number" and value.detail[0] == 0

    def _slices(self, width: int) -> int:
        """Lanes of a unit, for all loops of this width: one for each row where there are several."""
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

    def _units(self, width: int) -> int:
        """Units of a thread."""
        return -(-width * self.slices[width] // self.threads)

    # ---- what lies where ---------------------------------------------------------------------------------------------

    def _find_slots(self) -> None:
        """Which vectors go through shared memory: those that products are taken of, and those of too many units."""
        operands = {operand for product in self.products for operand in product.operands}
        self.multiplied = {value for value in self.plan.slots if value in operands}
        read = {number for loop in self.plan.loops for kind, number, _ in loop.reads if kind == "slot"}
        self.local = {v for v in read if self._units(self.plan.slots[v]) <= MOST_LOCAL}
        self.in_shared = [v for v in self.plan.slots if v in self.multiplied or v not in self.local]
        self.grad_multiplied = any(self.plan.graph[operand].op == "grad" for operand in operands)
        numbers = sum(self._units(width) for width in self.fused.units if width in self.slices)
        self.vectors_kept = numbers <= MOST_VECTORS

    def _lay_out(self) -> int:
        """Give everything its place in shared memory, and the weights theirs; returns the floats that are used."""
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
            "THREADS": self.threads, "ROWS": self.rows, "RING": ring, "RING_ROOM": step, "PARTS": len(fused.parts), "ROOM": room,
            "SIZE": sum(fused.parts), "PART_WIDTHS": _listed(fused.parts), "PART_PLACES": _listed(places),
            "PART_OFFSETS": _listed([sum(fused.parts[:i]) for i in range(len(fused.parts))]),
            "INPUTS": sum(fused.inputs), "WRITTEN": fused.gate_width, "TOTALS": len(self.plan.totals),
            "DECAYING": sum(1 << part for part in {place.part for place in fused.forward.kept}),
            "GRAD_IS_MULTIPLIED": int(self.grad_multiplied), "IN_FOURS": int(all(w % 4 == 0 for w in fused.parts)),
            "MATRICES": len(self.weights), "VECTORS": len(fused.units),
        }  # fmt: skip
        return at

    def _apart(self, floats: int) -> int:
        """Floats from one row to the next, so that the lanes of a warp meet different banks."""
        return floats if self.rows == 1 else -(-floats // 32) * 32 + 32 // self.rows

    def _place_weights(self, at: int, most: int) -> int:
        """Weights into registers, then into shared memory from `at` on; returns where that ends."""
        kept = sum(self._units(self.plan.slots[v]) for v in self.local)
        kept += sum(self._units(w) for w in self.fused.units if w in self.slices) if self.vectors_kept else 0
        left = min(REGISTERS // self.threads, MOST_REGISTERS) - WORKING - kept
        for number, product in enumerate(self.products):
            width, slices = product.shape.blocks * product.shape.outputs, self.slices[self._width(product)]
            groups = -(-product.shape.inputs // (4 * slices))
            registers = self._units(width) * len(product.which) * groups * 4
            stride = -(-width // 8) * 8 + (8 // slices if slices < 8 else 1) if slices > 1 else width
            floats = len(product.which) * groups * slices * stride * 4
            whole = len(product.which) == product.shape.count  # what is left out of a stack would be loaded as well
            if registers <= left and whole:
                product.where, left = "registers", left - registers
            elif at + floats <= most and whole:
                product.where = "shared"
                self.defines[f"AT_WEIGHTS_{number}"] = at
                at += floats
            packed = Packed(product.matrix, product.where == "memory", product.where == "memory" and product.transposed)
            if packed not in self.weights:
                self.weights.append(packed)
        return at

    def _width(self, product: _Product) -> int:
        return self.plan.loops[product.loop].width

    # ---- text --------------------------------------------------------------------------------------------------------

    def _text(self) -> str:
        pointwise, body, members, loads = [], [], [], []
        for number, product in enumerate(self.products):
            slices, shape = self.slices[self._width(product)], product.shape
            sizes = f"{shape.count}, {shape.blocks}, {shape.outputs}, {shape.inputs}, {slices}"
            members.append(f"  using S{number} = Shape<{sizes}, {str(product.transposed).lower()}>;")
            kind = {"registers": "InRegisters<S{0}>", "shared": "InShared<S{0}, {1}>", "memory": "InMemory<S{0}>"}
            members.append(f"  {kind[product.where].format(number, slices)} w{number};")
            given = Packed(product.matrix, product.where == "memory", product.where == "memory" and product.transposed)
            to = f"shared + AT_WEIGHTS_{number}" if product.where == "shared" else "nullptr"
            loads.append(f"    w{number}.load(a.weights[{self.weights.index(given)}], {to});")
        for value in sorted(self.local):
            members.append(f"  float v{value}[{self._units(self.plan.slots[value])}];")
        if self.vectors_kept:
            for number, width in enumerate(self.fused.units):
                if width in self.slices:
                    members.append(f"  float u{number}[{self._units(width)}];")
                    loads.append(self._load_vector(number, width))
        dirty: set[int] = set()
        for number, loop in enumerate(self.plan.loops):
            name = f"{self.direction}_{number}"
            pointwise.append(pointwise_text(name, self.plan.graph, loop, self.offsets))
            if self._needs(number, loop) & dirty:
                body.append("    meet();")
                dirty.clear()
            body.append(self._loop(name, number, loop))
            dirty |= {value for (kind, value, _), _ in loop.leaves if kind in ("slot", "total")}
        if self.adds:
            body.append(self._gather())
        places = "const float *state, const float *grad, const float *added, float *next"
        places = "const float *state, float *next" if self.direction == "forward" else places
        head = [f"#define {name} {value}" for name, value in self.defines.items()]
        step = [
            "struct Step {", *members,
            "  INLINE void load(const FusedArgs &a, float *shared) {", *loads, "  }",
            f"  INLINE void run(const FusedArgs &a, float *const shared, {places}, const float *given,",
            "                  const index_t token, const bool steps, const bool decay, const bool real) {", *body, "  }",
            "};",
        ]  # fmt: skip
        return "\n".join(
            [*head, '#include "fused.cuh"', *pointwise, *step, f'#include "fused_{self.direction}.cuh"', ""]
        )

    def _load_vector(self, number: int, width: int) -> str:
        slices, units = self.slices[width], self._units(width)
        own = f"(int)threadIdx.x / {slices} + i * {self.threads // slices}"
        return (
            f"    for (int i = 0; i < {units}; i++)\n"
            f"      u{number}[i] = {own} < {width} ? a.vectors[{number}][{own}] : 0.0f;"
        )

    def _needs(self, number: int, loop: Loop) -> set[int]:
        """Values that a loop finds in shared memory."""
        found = {operand for product in self.products if product.loop == number for operand in product.operands}
        found |= {value for kind, value, _ in loop.reads if kind == "slot" and value not in self.local}
        return found | {value for kind, value, _ in loop.reads if kind == "total"}

    def _loop(self, name: str, number: int, loop: Loop) -> str:
        width, slices, units = loop.width, self.slices[loop.width], self._units(loop.width)
        own = [(at, product) for at, product in enumerate(self.products) if product.loop == number]
        sums = sum(1 if product.transposed else len(product.which) for _, product in own)
        columns = self._columns(loop, [product for _, product in own])
        lines = [self._multiply(at, product) for at, product in own]
        if sums:
            lines.append("#pragma unroll")
            lines.append(f"        for (int c = 0; c < {sums}; c++) sum[c] = over_slices<{slices}>(acc[c]);")
        lines += [f"        in[{i}] = {self._read(item, columns)};" for i, item in enumerate(loop.reads)]
        lines.append(f"        {name}(in, out, decay);")
        lines += [f"        {self._leave(item, i)}" for i, (item, _) in enumerate(loop.leaves[: loop.decays])]
        if loop.leaves[loop.decays :]:
            lines.append("        if (decay) {")
            lines += [f"          {self._leave(item, i)}" for i, (item, _) in
                      enumerate(loop.leaves[loop.decays :], loop.decays)]  # fmt: skip
            lines.append("        }")
        totals = [value for (kind, value, _), _ in loop.leaves if kind == "total"]
        before = "".join(f"      float t{value} = 0.0f;\n" for value in totals)
        after = "".join(f"      leave_total<{slices}>(shared + {self._total(value)}, t{value});\n" for value in totals)
        acc = f"        float acc[{sums}][ROWS] = {{}}, sum[{sums}];\n" if sums else ""
        writes = "inside && steps" if self.rows > 1 else f"inside && threadIdx.x % {slices} == 0"
        return f"""    {{
{before}#pragma unroll {units if units <= MOST_LOCAL else 1}
      for (int i = 0; i < {units}; i++) {{
        const int own = (int)threadIdx.x / {slices} + i * {self.threads // slices};
        const bool inside = own < {width}, writes = {writes};
        const int unit = inside ? own : 0;
{acc}        V in[{max(len(loop.reads), 1)}], out[{max(len(loop.leaves), 1)}];
{chr(10).join(lines)}
      }}
{after}    }}"""

    def _columns(self, loop: Loop, products: list[_Product]) -> dict[int, int]:
        """Which sum each product's value is."""
        graph, found = self.plan.graph, {}
        pulls = iter(loop.pulls)
        for product in products:
            if product.transposed:
                found[next(pulls)] = product.column
                continue
            for index, value in enumerate(graph.values):
                if value.op == "product" and value.detail[0] == product.matrix:
                    found[index] = product.column + int(value.detail[1])
        return found

    def _multiply(self, number: int, product: _Product) -> str:
        lines = []
        if not product.transposed:
            vector, fits = self._vector(product.operands[0], product.shape)
            call = f"multiply<S{number}, {fits}, 0, {product.shape.count}>"
            return f"        {call}(acc + {product.column}, w{number}, i, unit, {vector});"
        for which, operand in zip(product.which, product.operands, strict=True):
            vector, fits = self._vector(operand, product.shape)
            call = f"multiply<S{number}, {fits}, {which}, 1>"
            lines.append(f"        {call}(acc + {product.column}, w{number}, i, unit, {vector});")
        return "\n".join(lines)

    def _vector(self, operand: int, shape: Matrix) -> tuple[str, str]:
        """Where a vector begins in shared memory, and whether that is a multiple of four floats for every block."""
        value = self.plan.graph[operand]
        if value.op not in ("state", "grad"):
            return f"shared + AT_SLOT_{operand}", str(shape.blocks == 1 or shape.inputs % 4 == 0).lower()
        part, offset = map(int, value.detail)
        aligned = offset % 4 == 0 and (shape.blocks == 1 or shape.inputs % 4 == 0)
        return f"{value.op} + part_place[{part}] + {offset}", str(aligned).lower()

    def _total(self, value: int) -> str:
        return f"AT_TOTALS + {self.plan.totals.index(value)} * WARPS_IN_FOURS"

    def _read(self, item: Item, columns: dict[int, int]) -> str:
        kind, number, offset = item
        if kind == "product":
            return f"sum[{columns[number]}]"
        if kind == "state":
            return f"state[part_place[{number}] + {offset} + unit]"
        if kind == "grad":
            at = f"part_place[{number}] + {offset} + unit"
            return f"grad[{at}] + added[{at}]"
        if kind == "slot":
            return f"v{number}[i]" if number in self.local else f"shared[AT_SLOT_{number} + unit]"
        if kind == "total":
            return f"whole(shared + {self._total(number)})"
        if kind == "unit":
            return f"u{number}[i]" if self.vectors_kept else f"__ldg(a.vectors[{number}] + unit)"
        return f"given[{offset} + unit]"

    def _leave(self, item: Item, number: int) -> str:
        kind, at, offset = item
        if kind == "next" and self.adds:
            place = next(i for i, p in enumerate(self.program.next) if (p.part, p.offset) == (at, offset)
                         and i not in self._left_places)  # fmt: skip
            self._left_places.add(place)
            return f"if (writes) shared[AT_PLACE_{place} + unit] = out[{number}];"
        if kind == "next":
            text = f"next[part_place[{at}] + {offset} + unit] = out[{number}];"
            if self.direction == "forward":
                width = self.fused.parts[at]
                kept = f"a.states[{at}][(token + a.batch) * {width} + {offset} + unit]"
                text = f"{{ {text} if (real) {kept} = out[{number}]; }}"
            return f"if (writes) {text}"
        if kind == "written":
            return f"if (writes && real) a.written[token * WRITTEN + {offset} + unit] = out[{number}];"
        if kind == "slot":
            text = f"v{at}[i] = out[{number}];" if at in self.local else ""
            if at in self.in_shared:
                text += f" if (writes) shared[AT_SLOT_{at} + unit] = out[{number}];"
            return text.strip()
        if kind == "total":
            return f"t{at} += writes ? out[{number}] : 0.0f;"
        return f"if (writes) shared[AT_DECAY + part_place[{at}] + {offset} + unit] *= out[{number}];"

    def _gather(self) -> str:
        """The next gradient as the sum of its places, which may overlap and leave gaps."""
        lines = ["    meet();"]
        for part, width in enumerate(self.fused.parts):
            lines += [
                f"    for (int unit = IN_ROW; unit < {width}; unit += THREADS / ROWS) {{",
                "      float sum = 0.0f;",
            ]
            for number, place in enumerate(self.program.next):
                if place.part == part:
                    inside = f"unit >= {place.offset} && unit < {place.offset + place.width}"
                    lines.append(f"      if ({inside}) sum += shared[AT_PLACE_{number} + unit - {place.offset}];")
            lines += [f"      if (steps) next[part_place[{part}] + unit] = sum;", "    }"]
        return "\n".join(lines)


def _listed(numbers: tuple[int, ...] | list[int]) -> str:
    return f"{{{', '.join(map(str, numbers))}}}"
