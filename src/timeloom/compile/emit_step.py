"""One program of a compiled step as C for the CPU: pointwise functions, each inside the loop that feeds it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from string import ascii_lowercase

from timeloom.compile.graph import Matrix
from timeloom.compile.program import Fused, Program, overlap
from timeloom.compile.schedule import Item, Loop, Schedule
from timeloom.compile.sizes import Sizes
from timeloom.compile.text import pointwise_text

MOST_COLUMNS = 8
"""Most products of one vector that are summed side by side in registers."""


@dataclass(frozen=True)
class Pack:
    """The memory layout of a stack of matrices for one loop.

    It is `[block of units][depth][count × span][lanes]`, or, transposed, `[block of units][count][depth][span][lanes]`.
    """

    matrix: int
    transposed: bool
    span: int


def stored_inputs(fused: Fused) -> dict[int, int]:
    """Inputs with gradients that are not read again, and the offsets of these in what the adjoint writes.

    The loop that computes such a gradient can store it where it belongs.
    """
    graph = fused.adjoint.graph
    values = {place.offset: place.value for place in fused.adjoint.written}
    read = {arg for index in graph.needed(fused.adjoint.roots) for arg in graph[index].args}
    summed = {*fused.unit_at, *[at for stack in fused.product_at for at in stack]}
    own = [at for at in fused.input_at if fused.input_at.count(at) == 1 and at not in summed and values[at] not in read]
    return {fused.input_at.index(at): at for at in own if graph[values[at]].op == "pull"}


def _rounded_up(widths: Counter[str]) -> str:
    """The size of these counts of vectors by width, each padded to whole V's."""
    return " + ".join(f"{count} * ROUND_UP({width})" for width, count in widths.items()) or "0"


class StepText:
    """The text of one step function."""

    def __init__(
        self, fused: Fused, name: str, program: Program, plan: Schedule, offsets: tuple[int, ...], packs: list[Pack],
        sizes: Sizes,
    ) -> None:  # fmt: skip
        self.fused, self.name, self.program, self.plan = fused, name, program, plan
        self.offsets, self.packs, self.sizes = offsets, packs, sizes
        self.slot_at: dict[int, str] = {}
        self.written_at = {
            place.value: place.offset for place in program.written if place.width >= plan.slots.get(place.value, 0)
        }
        before: Counter[str] = Counter()  # how many slots of each width
        for value, width in plan.slots.items():
            if value in self.written_at:  # it is read where it is written out
                continue
            self.slot_at[value] = _rounded_up(before)
            before[sizes(width)] += 1
        self.scratch = _rounded_up(before)
        self.total_at = {value: i for i, value in enumerate(plan.totals)}
        self.back = name != "forward"
        self.used: set[Pack] = set()
        self.reads_units = False
        self.summed: set[str] = set()
        """Widths of the sums over a row."""
        self.products: set[tuple[int, int]] = set()
        """For products with a function of their own: their columns, and those of the whole loop."""
        self._places: dict[str, tuple[str, str]] = {}
        """Variables that the current loop declares for where a row's numbers begin: type and expression by name."""
        self.adds = self.back and overlap(program, fused.parts)
        self.stored: set[Item] = {("written", 0, at) for at in stored_inputs(fused).values()}

    def emit(self) -> str:
        texts, calls = [], []
        for number, loop in enumerate(self.plan.loops):
            name = f"{self.name}_{number}"
            around = self._loop(name, loop)
            texts += [pointwise_text(name, self.plan.graph, loop, self.offsets), around]
            when = "if (real_step && (a->input_grads || a->written)) " if self._stored(loop) else ""
            calls.append(f"  {when}{name}_loop(a, g, decay, real_step);")
        head = f"static void {self.name}_step(const fused_args *a, group *g, const int decay, const int real_step) {{"
        return "\n".join([*texts, head, *calls, "}"])

    def _stored(self, loop: Loop) -> bool:
        """Whether a loop leaves nothing but gradients of inputs: it then runs only if these are wanted."""
        return self.back and bool(loop.leaves) and {item for item, _ in loop.leaves} <= self.stored

    def _loop(self, name: str, loop: Loop) -> str:
        columns, firsts = self._columns(loop)
        count = firsts[-1]
        # One register of units at a time: with many units, the weights of two would not fit in the L1 cache.
        span = 2 if self.back and count == 1 and loop.width > 16 else 1
        width = self.sizes(loop.width)
        # Sums of one vector's products share the registers; those of other vectors wait in the L1 cache.
        most = max([self.fused.matrices[matrix].count for matrix, _ in loop.stacks] + [len(loop.pulls) and 1, 1]) * span
        rows = "ROWS" if most <= 3 else "(ROWS / 2)" if most <= 6 else "(ROWS / 4)"
        self._is_stored = self._stored(loop)
        every = self._columns_of_loop = max(count * span, 1)
        stacks = list(zip(loop.stacks, firsts, strict=False))
        stacks.sort(key=lambda stack: self.plan.graph[stack[0][1]].op != "input")  # inputs first: they never wait
        products = [
            self._stack(loop, matrix, operand, first * span, span, every) for (matrix, operand), first in stacks
        ]
        products += [self._pull(loop, pull, columns[pull] * span, span, every) for pull in loop.pulls]
        self._places = {}
        fetches = "\n".join(self._fetches(loop))
        reads = "\n".join(f"      in[{i}] = {self._read(item, columns, span)};" for i, item in enumerate(loop.reads))
        leaves = "\n".join(f"      {self._leave(item, i)}" for i, (item, _) in enumerate(loop.leaves[: loop.decays]))
        decays = "\n".join(f"        {self._leave(item, i)}" for i, (item, _) in
                           enumerate(loop.leaves[loop.decays :], loop.decays))  # fmt: skip
        summed = sorted(self.total_at[item[1]] for item, _ in loop.leaves if item[0] == "total")
        after = "".join(f"  add_total(g, {i}, ROUND_UP({width}) / WIDE);\n" for i in summed)
        self.summed |= {width} if summed else set()
        places = "\n".join(f"      {kind}{name} = {place};" for name, (kind, place) in self._places.items())
        each = f"for (int s = 0; s < {span}; s++) " if span > 1 else ""
        blocks = f"OWN_BLOCKS(j, {width}, {span})"
        given, passed = "const fused_args *a, group *g, const int decay, const int real_step", "a, g, decay, real_step"
        made, single, walk = "", "", f"  {blocks} {name}_rows((int)g->count, {passed}, 0, j, NULL);"
        if products:
            head = (
                f"{name}_products(const int rows, const fused_args *a, group *g, const long r0, const long j, V *acc)"
            )
            made = f"INLINE void {head} {{\n{chr(10).join(products)}\n}}\n"
            single = f"ONCE void {name}_single({given}) {{\n  {blocks} SINGLE({every}, {name})\n}}\n"
            walk = f"  if (g->count == 1) {name}_single({passed});\n  else {blocks} TILES({rows}, {every}, {name})"
        return f"""{made}INLINE void {name}_rows(const int rows, {given},
    const long r0, const long j, const V *acc) {{
  ROLL for (int r = 0; r < rows; r++) {{
    const long row = r0 + r, token = g->token[row];
    if (!g->steps[row]) continue;
    {each}{{
      const long unit = (j * {span} + {"s" if span > 1 else "0"}) * WIDE, lanes = {width} - unit;
      {"if (lanes <= 0) break;" if span > 1 else ""}
      V in[{max(len(loop.reads), 1)}], out[{max(len(loop.leaves), 1)}];
{places}
{fetches}
{reads}
      {name}(in, out, decay);
{leaves}
      if (decay) {{
{decays}
      }}
    }}
  }}
}}
{single}ONCE void {name}_loop({given}) {{
{walk}
  meet(g);
{after}}}"""

    def _columns(self, loop: Loop) -> tuple[dict[int, int], list[int]]:
        """The index of each product among the sums that a loop computes for a unit; and where every stack begins there,
        followed by the number of sums.
        """
        graph, columns, firsts = self.plan.graph, {}, [0]
        for stack in loop.stacks:
            for index, value in enumerate(graph.values):
                if value.op == "product" and (value.detail[0], value.args[0]) == stack:
                    columns[index] = firsts[-1] + int(value.detail[1])
            firsts.append(firsts[-1] + self.fused.matrices[stack[0]].count)
        columns |= {pull: firsts[-1] + number for number, pull in enumerate(loop.pulls)}
        firsts[-1] += len(loop.pulls)
        return columns, firsts

    def _place(self, name: str) -> str:
        """The variable for where a row's numbers of a kind begin at a unit, declared once before its use."""
        part = name.lstrip(ascii_lowercase)
        places = {
            "ahead": ("const long ", f"{'-' * self.back}AHEAD * a->batch"),
            "tape": ("real *const ", "a->tape + token * TAPE + unit"),
            "input": ("const real *const ", "a->inputs + token * a->input_stride + unit"),
            "slots": ("real *const ", "g->slots + row * SLOT_STRIDE + unit"),
            "written": ("real *const ", "g->out[row] + unit"),
            f"before{part}": ("const real *const ", f"g->before[{part}][row] + unit"),
            f"at{part}": ("const long ", f"row * padded(a, {part}) + unit"),
        }
        self._places[name] = places[name]
        return name

    def _fetches(self, loop: Loop) -> list[str]:
        """Prefetches: rows lie far apart in memory, and are too many streams for a processor to predict."""
        texts = []
        for kind, number, offset in [*loop.reads, *[item for item, _ in loop.leaves]]:
            at = self.sizes(offset)
            if kind == "tape" and number:
                when = "" if self.back else "if (real_step && a->tape) "
                place, stride = f"{self._place('tape')} + {at}", "TAPE"
            elif kind == "state" and self.back:
                when, place = "", f"{self._place(f'before{number}')} + {at}"
                stride = self.sizes(self.fused.parts[number])
            elif kind == "mask":
                when, stride = "", f"a->mask_strides[{number}]"
                place = f"a->masks[{number}] + token * {stride} + unit"
            elif kind == "input":
                when, place, stride = "", f"{self._place('input')} + {at}", "a->input_stride"
            else:
                continue
            texts.append(f"      {when}__builtin_prefetch({place} + {self._place('ahead')} * {stride});")
        return texts

    def _pack(self, matrix: int, transposed: bool, span: int) -> int:
        pack = Pack(matrix, transposed, span)
        if pack not in self.packs:
            self.packs.append(pack)
        self.used.add(pack)
        return self.packs.index(pack)

    def _stack(self, loop: Loop, matrix: int, operand: int, first: int, span: int, every: int) -> str:
        shape = self.fused.matrices[matrix]
        pack, width = self._pack(matrix, False, span), shape.count * span
        text, remaining, column = self._range(shape, loop.width, span), width, first
        text += f"    const real *w = a->weights[{pack}] + j * depth * {width} * WIDE, *from[ROWS];\n"
        text += f"    for (int r = 0; r < rows; r++) from[r] = {self._vector(operand)} + k0;\n"
        if self.plan.graph[operand].op == "input":
            when, ahead = "if (j == 0) " if shape.blocks == 1 else "", f"{'-' * self.back}AHEAD"
            text += f"    {when}fetch_rows(rows, from, {ahead} * a->batch * a->input_stride, depth);\n"
        while remaining:  # more columns than registers hold go in several passes over the vector
            some = min(remaining, MOST_COLUMNS)
            if some == width:
                text += f"    multiply(rows, g->alone, 1, {some}, {every}, depth, from, w, acc + {column});\n"
            else:
                at = f"w + {column - first} * WIDE, {width}"
                text += f"    multiply_some(rows, {some}, {every}, depth, from, {at}, acc + {column});\n"
            remaining, column = remaining - some, column + some
        return f"  {{\n{text}  }}"

    def _pull(self, loop: Loop, pull: int, first: int, span: int, every: int) -> str:
        value = self.plan.graph[pull]
        shape = self.fused.matrices[int(value.detail[0])]
        pack = self._pack(int(value.detail[0]), True, span)
        text = self._range(shape.transposed, loop.width, span)
        text += f"    const real *w = a->weights[{pack}] + j * {shape.count} * depth * {span} * WIDE, *from[ROWS];\n"
        runs = self._runs(shape, value.args)
        if not runs:
            text += f"    clear_sums(rows, {span}, {every}, acc + {first});\n"
        for number, (first_arg, last_arg) in enumerate(runs):
            text += f"    for (int r = 0; r < rows; r++) from[r] = {self._vector(value.args[first_arg])} + k0;\n"
            at, count = f"w + {first_arg} * depth * {span} * WIDE", last_arg - first_arg
            depth = "depth" if count == 1 else f"{count} * depth"
            how = f"rows, g->alone, {int(number == 0)}, {depth}, from"
            text += f"    {self._multiply_apart(span, every)}({how}, {at}, acc + {first});\n"
        return f"  {{\n{text}  }}"

    def _multiply_apart(self, columns: int, every: int) -> str:
        """The function for so many of a loop's sums: on its own it can keep more pointers in registers."""
        self.products.add((columns, every))
        return f"multiply_{columns}_{every}"

    def _runs(self, shape: Matrix, args: tuple[int, ...]) -> list[tuple[int, int]]:
        """Ranges of a transposed product's arguments, without zeros; arguments that are contiguous form one range."""
        runs: list[tuple[int, int]] = []
        for number, arg in enumerate(args):
            value = self.plan.graph[arg]
            if value.op == "number" and value.detail[0] == 0:
                continue
            before = self.written_at.get(args[number - 1]) if runs and runs[-1][1] == number else None
            if shape.blocks == 1 and before is not None and self.written_at.get(arg) == before + shape.outputs:
                runs[-1] = (runs[-1][0], number + 1)
            else:
                runs.append((number, number + 1))
        return runs

    def _range(self, shape: Matrix, width: int, span: int) -> str:
        """The range of a vector that a block of units reads: a band for block-diagonal matrices, else all of it."""
        if shape.blocks == 1:
            return f"    const long depth = {self.sizes(shape.inputs)}, k0 = 0;\n"
        outputs, inputs, whole = map(self.sizes, (shape.outputs, shape.inputs, shape.blocks * shape.inputs))
        return (
            f"    const long depth = band_depth({outputs}, {inputs}, {self.sizes(width)}, {span} * WIDE);\n"
            f"    const long k0 = band_begin({outputs}, {inputs}, {whole}, depth, j * {span} * WIDE);\n"
        )

    def _vector(self, operand: int) -> str:
        """Where the operand vector of row r0 + r begins."""
        value = self.plan.graph[operand]
        if value.op in ("state", "grad"):
            part, offset = map(int, value.detail)
            if value.op == "state" and self.back:
                return f"g->before[{part}][r0 + r] + {self.sizes(offset)}"
            return f"g->{value.op}[{part}] + (r0 + r) * padded(a, {part}) + {self.sizes(offset)}"
        if value.op == "input":
            return f"a->inputs + g->token[r0 + r] * a->input_stride + {self.sizes(self.offsets[int(value.detail[0])])}"
        if operand in self.written_at:
            return f"g->out[r0 + r] + {self.sizes(self.written_at[operand])}"
        return f"g->slots + (r0 + r) * SLOT_STRIDE + {self.slot_at[operand]}"

    def _read(self, item: Item, columns: dict[int, int], span: int) -> str:
        kind, number, offset = item
        at = self.sizes(offset)
        if kind == "product":
            return f"acc[r * {self._columns_of_loop} + {columns[number] * span}{' + s' if span > 1 else ''}]"
        if kind == "state" and self.back:
            return f"load_units({self._place(f'before{number}')} + {at}, lanes)"
        if kind in ("state", "grad"):
            held = f"*(const V *)(g->{kind}[{number}] + {self._place(f'at{number}')} + {at})"
            return f"{held} + LOSS({number}, {at} + unit)" if kind == "grad" else held
        if kind == "after":
            width = self.sizes(self.fused.parts[number])
            return f"load_units(a->states[{number}] + (token + a->batch) * {width} + {at} + unit, lanes)"
        if kind == "mask":
            row = f"token * a->mask_strides[{number}]"
            return f"load_units(a->masks[{number}] + {row} + unit, lanes)"
        if kind == "slot" and number in self.written_at:
            return f"*(const V *)({self._place('written')} + {self.sizes(self.written_at[number])})"
        if kind == "slot":
            return f"*(const V *)({self._place('slots')} + {self.slot_at[number]})"
        if kind == "total":
            return f"v_const(g->totals[row * TOTALS + {self.total_at[number]}])"
        if kind == "unit":
            self.reads_units = True
            return f"load_units(a->units[{number}] + unit, lanes)"
        if kind == "tape":
            place = f"{self._place('tape')} + {at}"
            return f"load_units({place}, lanes)" if number else f"v_const(*({place} - unit))"
        return f"load_units({self._place('input')} + {at}, lanes)"

    def _leave(self, item: Item, number: int) -> str:
        kind, index, offset = item
        at = self.sizes(offset)
        if kind == "next":
            place = f"g->next[{index}] + {self._place(f'at{index}')} + {at}"
            if self.adds:
                return f"store_units({place}, *(const V *)({place}) + out[{number}], lanes);"
            text = f"store_units({place}, out[{number}], lanes);"
            if self.name == "forward":
                width = self.sizes(self.fused.parts[index])
                kept = f"a->states[{index}] + (token + a->batch) * {width} + {at} + unit"
                text += f" if (real_step) store_units({kept}, out[{number}], lanes);"
            return text
        if kind == "tape":
            place, when = f"{self._place('tape')} + {at}", "real_step && a->tape"
            if index == 0:
                return f"if ({when} && unit == 0) *({place}) = out[{number}][0];"
            return f"if ({when}) store_units({place}, out[{number}], lanes);"
        if item in self.stored:
            to = self.sizes(self.offsets[self.fused.input_at.index(offset)])
            own = f"a->input_grads + token * a->input_stride + {to} + unit"
            apart = "a->written" if self._is_stored else "a->written || !a->input_grads || !real_step"
            return f"store_units({apart} ? {self._place('written')} + {at} : {own}, out[{number}], lanes);"
        if kind == "written":
            return f"store_units({self._place('written')} + {at}, out[{number}], lanes);"
        if kind == "slot" and index in self.written_at:
            return ""
        if kind == "slot":
            return f"*(V *)({self._place('slots')} + {self.slot_at[index]}) = out[{number}];"
        if kind == "total":
            place = f"(row * TOTALS + {self.total_at[index]}) * SUMMED + unit / WIDE"
            return f"g->partial[{place}] = only(out[{number}], lanes);"
        place = f"g->decay[{index}] + {self._place(f'at{index}')} + {at}"
        return f"store_units({place}, *(const V *)({place}) * out[{number}], lanes);"
