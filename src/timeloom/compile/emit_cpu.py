"""A compiled step as C for the CPU: its pointwise texts, and around each the loop that feeds it."""

from __future__ import annotations

from dataclasses import dataclass

from timeloom.compile.program import Fused, Program, overlap
from timeloom.compile.schedule import Item, Loop, Schedule, schedule
from timeloom.compile.sums import Sums, sums_of
from timeloom.compile.tape import taped
from timeloom.compile.text import pointwise_text

MOST_COLUMNS = 8
"""Products of one vector that are summed side by side."""
ALIGNED = 16
"""Numbers of which a tape has a multiple, so that its vectors do not lie across the lines of a cache."""


@dataclass(frozen=True)
class Pack:
    """How a stack of matrices lies in memory for one loop: `[block of units][depth][count × span][lanes]`, or,
    transposed, `[block of units][count][depth][span][lanes]`.
    """

    matrix: int
    transposed: bool
    span: int


@dataclass(frozen=True)
class Source:
    """C text, the packed weights that it expects, in order, and the numbers of a step that it keeps on a tape."""

    text: str
    packs: tuple[Pack, ...]
    tape: int
    sums: Sums
    """What the adjoint can sum on its way."""


def emit(fused: Fused) -> Source:
    """The source of a compiled step, without the element type."""
    offsets = [sum(fused.inputs[:i]) for i in range(len(fused.inputs))]
    packs: list[Pack] = []
    steps, scratch, totals = [], 1, 1
    tape = taped(fused)
    programs = [("forward", fused.forward if tape is None else tape.forward), ("adjoint", fused.adjoint)]
    if tape is not None:
        programs.append(("taped", tape.adjoint))
    for name, program in programs:
        plan = schedule(program, tuple(offsets))
        text, used = _Step(fused, name, program, plan, tuple(offsets), packs).emit()
        steps.append(text)
        scratch, totals = max(scratch, used), max(totals, len(plan.totals))
    starts = [sum(fused.parts[:i]) for i in range(len(fused.parts))]
    decaying = {place.part for place in fused.forward.kept}
    width = 0 if tape is None else -(-tape.width // ALIGNED) * ALIGNED if tape.width > ALIGNED else tape.width
    sums = sums_of(fused)
    head = [
        f"#define PARTS {len(fused.parts)}",
        f"#define SIZE {sum(fused.parts)}",
        f"#define PART_WIDTHS {{{', '.join(map(str, fused.parts))}}}",
        f"#define PART_OFFSETS {{{', '.join(map(str, starts))}}}",
        f"#define INPUTS {sum(fused.inputs)}",
        f"#define WRITTEN {fused.gate_width}",
        f"#define SCRATCH ({scratch})",
        f"#define TOTALS {totals}",
        f"#define DECAYING {sum(1 << part for part in decaying)}",
        f"#define ADDED {int(overlap(fused.adjoint, fused.parts))}",
        f"#define TAPE {width}",
        f"#define SUMS {sums.size}",
        f"#define INPUT_GRADS {{{', '.join(map(str, fused.inputs or (0,)))}}}",
        f"#define INPUT_GRADS_AT {{{', '.join(map(str, fused.input_at or (0,)))}}}",
        '#include "fused_sums.h"',
    ]
    text = "\n".join([*head, *steps, _sum_steps(sums), '#include "fused_walk.h"', ""])
    return Source(text, tuple(packs), width, sums)


def _sum_steps(sums: Sums) -> str:
    """The function that sums what a few steps have written."""
    calls = []
    for one in sums.all:
        if one.operand is None:
            calls.append(f"  column_sum(w, {one.column}, {one.width}, sums + {one.at});")
            continue
        part, offset = one.operand
        values = "w->written" if part is None else f"w->before[{part}]"
        calls.append(f"  outer_sum(w, {values}, {offset}, {one.depth}, {one.column}, {one.width}, sums + {one.at});")
    return "\n".join(["static void sum_steps(const waiting *w, real *sums) {", *calls, "}"])


class _Step:
    """The text of one step function."""

    def __init__(
        self, fused: Fused, name: str, program: Program, plan: Schedule, offsets: tuple[int, ...], packs: list[Pack]
    ) -> None:
        self.fused, self.name, self.program, self.plan = fused, name, program, plan
        self.offsets, self.packs = offsets, packs
        self.slot_at: dict[int, str] = {}
        at = "0"
        self.written_at = {
            place.value: place.offset for place in program.written if place.width >= plan.slots.get(place.value, 0)
        }
        for value, width in plan.slots.items():
            if value in self.written_at:  # it is read where it is written out
                continue
            self.slot_at[value] = at
            at = f"{at} + ROUND_UP({width})"
        self.scratch = at
        self.total_at = {value: i for i, value in enumerate(plan.totals)}
        self.back = name != "forward"
        self.adds = self.back and overlap(program, fused.parts)

    def emit(self) -> tuple[str, int]:
        texts, calls = [], []
        for number, loop in enumerate(self.plan.loops):
            name = f"{self.name}_{number}"
            texts.append(pointwise_text(name, self.plan.graph, loop, self.offsets))
            texts.append(self._loop(name, loop))
            calls.append(f"  {name}_loop(a, g, decay, real_step);")
        head = f"static void {self.name}_step(const fused_args *a, group *g, const int decay, const int real_step) {{"
        size = sum((width + 63) // 64 * 64 for width in self.plan.slots.values()) + 1
        return "\n".join([*texts, head, *calls, "}"]), size

    def _loop(self, name: str, loop: Loop) -> str:
        columns: dict[int, int] = {}
        count = sum(self.fused.matrices[matrix].count for matrix, _ in loop.stacks) + len(loop.pulls)
        span = 2 if count == 1 and loop.width > 16 else 1
        # Sums of one vector's products stand in registers together, those of others wait in the first cache.
        most = max([self.fused.matrices[matrix].count for matrix, _ in loop.stacks] + [len(loop.pulls) and 1, 1]) * span
        rows = "ROWS" if most <= 3 else "(ROWS / 2)" if most <= 6 else "(ROWS / 4)"
        self._columns_of_loop = max(count * span, 1)
        products, first = [], 0
        for matrix, operand in loop.stacks:
            products.append(self._stack(loop, matrix, operand, first, span, max(count * span, 1), columns))
            first += self.fused.matrices[matrix].count * span
        for pull in loop.pulls:
            products.append(self._pull(loop, pull, first, span, max(count * span, 1)))
            columns[pull] = first
            first += span
        reads = "\n".join(f"      in[{i}] = {self._read(item, columns, span)};" for i, item in enumerate(loop.reads))
        leaves = "\n".join(f"      {self._leave(item, i)}" for i, (item, _) in enumerate(loop.leaves[: loop.decays]))
        decays = "\n".join(f"        {self._leave(item, i)}" for i, (item, _) in
                           enumerate(loop.leaves[loop.decays :], loop.decays))  # fmt: skip
        summed = sorted(self.total_at[item[1]] for item, _ in loop.leaves if item[0] == "total")
        before = "".join(f"  clear_totals(g, {i}, 1);\n" for i in summed)
        after = "".join(f"  add_totals(g, {i}, 1);\n" for i in summed)
        each = f"for (int s = 0; s < {span}; s++) " if span > 1 else ""
        return f"""INLINE void {name}_tile(const int rows, const fused_args *a, group *g, const int decay,
    const int real_step, const long r0, const long j) {{
  V acc[ROWS * {max(count * span, 1)}];
  for (int i = 0; i < rows * {max(count * span, 1)}; i++) acc[i] = (V){{}};
{chr(10).join(products)}
  ROLL for (int r = 0; r < rows; r++) {{
    const long row = r0 + r;
    if (!g->steps[row]) continue;
    {each}{{
      const long unit = (j * {span} + {"s" if span > 1 else "0"}) * WIDE, lanes = {loop.width} - unit;
      {"if (lanes <= 0) break;" if span > 1 else ""}
      V in[{max(len(loop.reads), 1)}], out[{max(len(loop.leaves), 1)}];
{reads}
      {name}(in, out, decay);
{leaves}
      if (decay) {{
{decays}
      }}
    }}
  }}
}}
static void {name}_loop(const fused_args *a, group *g, const int decay, const int real_step) {{
{before}#define TILE_CALL(rows) {name}_tile(rows, a, g, decay, real_step, r, j);
  for (long j = 0; j * {span} * WIDE < {loop.width}; j++) TILED({rows}, TILE_CALL)
#undef TILE_CALL
{after}}}"""

    def _pack(self, matrix: int, transposed: bool, span: int) -> int:
        pack = Pack(matrix, transposed, span)
        if pack not in self.packs:
            self.packs.append(pack)
        return self.packs.index(pack)

    def _stack(
        self, loop: Loop, matrix: int, operand: int, first: int, span: int, every: int, columns: dict[int, int]
    ) -> str:
        shape = self.fused.matrices[matrix]
        for index in range(len(self.plan.graph.values)):
            value = self.plan.graph[index]
            if value.op == "product" and value.detail[0] == matrix:
                columns[index] = first + int(value.detail[1]) * span
        pack, width = self._pack(matrix, False, span), shape.count * span
        inputs, outputs = shape.inputs, shape.outputs
        text, remaining, column = "", width, first
        text += self._range(shape.blocks, outputs, inputs, loop.width, span)
        text += f"    const real *w = a->weights[{pack}] + j * depth * {width} * WIDE, *from[ROWS];\n"
        text += f"    for (int r = 0; r < rows; r++) from[r] = {self._vector(operand)} + k0;\n"
        while remaining:  # more columns than registers hold go in several passes over the vector
            some = min(remaining, MOST_COLUMNS)
            if some == width:
                text += f"    multiply(rows, {some}, {column}, {every}, depth, from, w, acc);\n"
            else:
                at = f"w + {column - first} * WIDE, {width}"
                text += f"    multiply_some(rows, {some}, {column}, {every}, depth, from, {at}, acc);\n"
            remaining, column = remaining - some, column + some
        return f"  {{\n{text}  }}"

    def _pull(self, loop: Loop, pull: int, first: int, span: int, every: int) -> str:
        value = self.plan.graph[pull]
        shape = self.fused.matrices[int(value.detail[0])]
        pack = self._pack(int(value.detail[0]), True, span)
        text = self._range(shape.blocks, shape.inputs, shape.outputs, loop.width, span)
        text += f"    const real *w = a->weights[{pack}] + j * {shape.count} * depth * {span} * WIDE, *from[ROWS];\n"
        for number, arg in enumerate(value.args):
            if self.plan.graph[arg].op == "number" and self.plan.graph[arg].detail[0] == 0:
                continue
            text += f"    for (int r = 0; r < rows; r++) from[r] = {self._vector(arg)} + k0;\n"
            at = f"w + {number} * depth * {span} * WIDE"
            text += f"    multiply(rows, {span}, {first}, {every}, depth, from, {at}, acc);\n"
        return f"  {{\n{text}  }}"

    @staticmethod
    def _range(blocks: int, outputs: int, inputs: int, width: int, span: int) -> str:
        """Which numbers of a vector a block of units looks at: of block-diagonal matrices a few, of others all."""
        if blocks == 1:
            return f"    const long depth = {inputs}, k0 = 0;\n"
        return (
            f"    const long depth = band_depth({outputs}, {inputs}, {width}, {span} * WIDE);\n"
            f"    const long k0 = band_begin({outputs}, {inputs}, {blocks * inputs}, depth, j * {span} * WIDE);\n"
        )

    def _vector(self, operand: int) -> str:
        """Where the vector of row r0 + r begins."""
        value = self.plan.graph[operand]
        if value.op in ("state", "grad"):
            part, offset = map(int, value.detail)
            if value.op == "state" and self.back:
                return f"g->before[{part}][r0 + r] + {offset}"
            return f"g->{value.op}[{part}] + (r0 + r) * padded({part}) + {offset}"
        if value.op == "input":
            return f"a->inputs + g->token[r0 + r] * INPUTS + {self.offsets[int(value.detail[0])]}"
        if operand in self.written_at:
            return f"g->out[r0 + r] + {self.written_at[operand]}"
        return f"g->slots + (r0 + r) * SLOT_STRIDE + {self.slot_at[operand]}"

    def _read(self, item: Item, columns: dict[int, int], span: int) -> str:
        kind, number, offset = item
        if kind == "product":
            return f"acc[r * {self._columns_of_loop} + {columns[number]}{' + s' if span > 1 else ''}]"
        if kind == "state" and self.back:
            return f"load_units(g->before[{number}][row] + {offset} + unit, lanes)"
        if kind in ("state", "grad"):
            return f"*(const V *)(g->{kind}[{number}] + row * padded({number}) + {offset} + unit)"
        if kind == "slot" and number in self.written_at:
            return f"*(const V *)(g->out[row] + {self.written_at[number]} + unit)"
        if kind == "slot":
            return f"*(const V *)(g->slots + row * SLOT_STRIDE + {self.slot_at[number]} + unit)"
        if kind == "total":
            return f"v_const(g->totals[row * TOTALS + {self.total_at[number]}])"
        if kind == "unit":
            return f"*(const V *)(a->units[{number}] + unit)"
        if kind == "tape":
            place = f"a->tape + g->token[row] * TAPE + {offset}"
            return f"load_units({place} + unit, lanes)" if number else f"v_const(*({place}))"
        return f"load_units(a->inputs + g->token[row] * INPUTS + {offset} + unit, lanes)"

    def _leave(self, item: Item, number: int) -> str:
        kind, at, offset = item
        if kind == "next":
            place = f"g->next[{at}] + row * padded({at}) + {offset} + unit"
            if self.adds:
                return f"store_units({place}, *(const V *)({place}) + out[{number}], lanes);"
            text = f"store_units({place}, out[{number}], lanes);"
            if self.name == "forward":
                width = self.fused.parts[at]
                kept = f"a->states[{at}] + (g->token[row] + a->batch) * {width} + {offset} + unit"
                text += f" if (real_step) store_units({kept}, out[{number}], lanes);"
            return text
        if kind == "tape":
            place, when = f"a->tape + g->token[row] * TAPE + {offset}", "real_step && a->tape"
            if at == 0:
                return f"if ({when} && unit == 0) *({place}) = out[{number}][0];"
            return f"if ({when}) store_units({place} + unit, out[{number}], lanes);"
        if kind == "written":
            return f"store_units(g->out[row] + {offset} + unit, out[{number}], lanes);"
        if kind == "slot" and at in self.written_at:
            return ""
        if kind == "slot":
            return f"*(V *)(g->slots + row * SLOT_STRIDE + {self.slot_at[at]} + unit) = out[{number}];"
        if kind == "total":
            return f"g->partial[row * TOTALS + {self.total_at[at]}] += only(out[{number}], lanes);"
        place = f"g->decay[{at}] + row * padded({at}) + {offset} + unit"
        return f"store_units({place}, *(const V *)({place}) * out[{number}], lanes);"
