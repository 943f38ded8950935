"""A compiled step as CUDA C++: pointwise functions, each inside the loop over units that feeds it.

A block walks one row, or a few (see kernels/cuda/fused.cuh); `cuda_layout` says where everything is. There is a barrier
between two loops if the second reads what other threads left in shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from timeloom.compile.cuda_layout import MOST_LOCAL, Direction, Layout, Packed, Product, Where
from timeloom.compile.graph import Matrix
from timeloom.compile.program import Fused
from timeloom.compile.schedule import Item, Loop, schedule
from timeloom.compile.text import pointwise_text


@dataclass(frozen=True)
class CudaSource:
    """CUDA text, and what a launch needs to know."""

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
    """Where the weights of each product lie, in order."""


def emit(fused: Fused, direction: Direction, room: int, rows: int = 1) -> CudaSource:
    """The source of one direction, for blocks of `rows` rows with `room` bytes of shared memory.

    `rows` is a power of two up to 32; raises NotFused if these are too many.
    """
    program = fused.forward if direction == "forward" else fused.adjoint
    offsets = tuple(sum(fused.inputs[:i]) for i in range(len(fused.inputs)))
    kernel = _Kernel(fused, direction, program, schedule(program, offsets), room, rows, offsets=offsets)
    places = tuple(product.where for product in kernel.products)
    weights, vectors = tuple(kernel.weights), len(fused.units)
    return CudaSource(kernel.text(), kernel.threads, 4 * kernel.used, weights, len(fused.parts), vectors, rows, places)


@dataclass
class _Kernel(Layout):
    offsets: tuple[int, ...] = ()
    _left_places: set[int] = field(default_factory=set)

    def text(self) -> str:
        pointwise, body, members, loads = [], [], [], []
        for number, product in enumerate(self.products):
            slices, shape = self.slices[self.width_of(product)], product.shape
            sizes = f"{shape.count}, {shape.blocks}, {shape.outputs}, {shape.inputs}, {slices}"
            members.append(f"  using S{number} = Shape<{sizes}, {str(product.transposed).lower()}>;")
            kind = {"registers": "InRegisters<S{0}>", "shared": "InShared<S{0}, {1}>", "memory": "InMemory<S{0}>"}
            members.append(f"  {kind[product.where].format(number, slices)} w{number};")
            to = f"shared + AT_WEIGHTS_{number}" if product.where == "shared" else "nullptr"
            loads.append(f"    w{number}.load(a.weights[{self.weights.index(self.packed(product))}], {to});")
        for value in sorted(self.local):
            members.append(f"  float v{value}[{self.units_of(self.plan.slots[value])}];")
        if self.vectors_kept:
            for number, width in enumerate(self.fused.units):
                if width in self.slices:
                    members.append(f"  float u{number}[{self.units_of(width)}];")
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
            "                  const index_t token, const bool steps, const bool decay, const bool real) {",
            *body, "  }", "};",
        ]  # fmt: skip
        return "\n".join(
            [*head, '#include "fused.cuh"', *pointwise, *step, f'#include "fused_{self.direction}.cuh"', ""]
        )

    def _load_vector(self, number: int, width: int) -> str:
        slices, units = self.slices[width], self.units_of(width)
        own = f"(int)threadIdx.x / {slices} + i * {self.threads // slices}"
        return (
            f"    for (int i = 0; i < {units}; i++)\n"
            f"      u{number}[i] = {own} < {width} ? a.vectors[{number}][{own}] : 0.0f;"
        )

    def _needs(self, number: int, loop: Loop) -> set[int]:
        """Values that a loop reads from shared memory."""
        found = {operand for product in self.products if product.loop == number for operand in product.operands}
        found |= {value for kind, value, _ in loop.reads if kind == "slot" and value not in self.local}
        return found | {value for kind, value, _ in loop.reads if kind == "total"}

    def _loop(self, name: str, number: int, loop: Loop) -> str:
        width, slices, units = loop.width, self.slices[loop.width], self.units_of(loop.width)
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

    def _columns(self, loop: Loop, products: list[Product]) -> dict[int, int]:
        """The index in `sum` of each product's value."""
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

    def _multiply(self, number: int, product: Product) -> str:
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
        """Where a vector begins in shared memory, and whether each of its blocks is aligned to four floats."""
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
        """Code for the next gradient as the sum of its places, which may overlap and leave gaps."""
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
