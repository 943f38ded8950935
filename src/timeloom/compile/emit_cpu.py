"""A compiled step as C for the CPU: its programs, and the sizes that the walk through time needs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from timeloom.compile.emit_step import Pack, StepText, stored_inputs
from timeloom.compile.program import INPUT, Fused, Program, overlap
from timeloom.compile.schedule import Schedule, schedule
from timeloom.compile.sizes import NUMBERS, Sizes
from timeloom.compile.sums import Sums, sums_of
from timeloom.compile.tape import taped

ALIGNED = 16
"""Numbers to a multiple of which a wide tape is padded, so that its vectors do not straddle cache lines."""


@dataclass(frozen=True)
class Read:
    """The packed weights that a sweep in one direction reads, and whether it reads per-unit vectors."""

    packs: frozenset[Pack]
    units: bool


@dataclass(frozen=True)
class Source:
    """C text, and the packed weights that it expects, in order."""

    text: str
    packs: tuple[Pack, ...]
    forward: Read
    adjoint: Read


@dataclass(frozen=True)
class Sources:
    """The sources of a compiled step, for either element type.

    There is one for each program, so that only what runs is compiled, and in parallel. taped: the adjoint that reads a
    tape, if anything can be saved. adjoint: the one that recomputes everything, for states that do not come from a
    forward sweep. tape: numbers per step that a forward sweep can save. sums: those that an adjoint sweep can
    accumulate.
    """

    forward: Source
    adjoint: Source
    taped: Source | None
    tape: int
    sums: Sums

    @property
    def common(self) -> tuple[str, ...]:
        """The texts that a training step needs."""
        return self.forward.text, (self.taped or self.adjoint).text


def emit(fused: Fused) -> Sources:
    found = taped(fused)
    width = 0 if found is None else found.width

    def source(**program: Program) -> Source:
        return source_of_programs(fused, program, width)

    forward = source(forward=fused.forward if found is None else found.forward)
    back = None if found is None else source(taped=found.adjoint)
    return Sources(forward, source(adjoint=fused.adjoint), back, aligned(width), sums_of(fused))


def source_of_programs(
    fused: Fused, programs: dict[str, Program], tape: int, sizes: Sizes = NUMBERS, name: str = "fused"
) -> Source:
    """The source of some or all of the programs `forward`, `adjoint` and `taped`, which reads a tape of this width."""
    offsets = tuple(sum(fused.inputs[:i]) for i in range(len(fused.inputs)))
    packs: list[Pack] = []
    read = dict.fromkeys(("forward", "adjoint"), Read(frozenset(), False))
    steps, plans, products, scratch, totals = [], [], set[tuple[int, int]](), "1", 1
    summed = "1"
    for step, program in programs.items():
        plan = schedule(program, offsets, late=True)
        plans.append(plan)
        writer = StepText(fused, step, program, plan, offsets, packs, sizes)
        steps.append(writer.emit())
        products |= writer.products
        direction = "forward" if step == "forward" else "adjoint"
        before = read[direction]
        read[direction] = Read(before.packs | writer.used, before.units or writer.reads_units)
        scratch = scratch if writer.scratch == "0" else f"MOST({scratch}, {writer.scratch})"
        totals = max(totals, len(plan.totals))
        for width in sorted(writer.summed):
            summed = f"MOST({summed}, ROUND_UP({width}) / WIDE)"
    sums, back = sums_of(fused), any(step != "forward" for step in programs)
    text = "\n".join([
        f"#define NAME {name}",
        *_sizes_text(fused, sizes, tape, sums),
        f"#define SCRATCH {scratch}",
        f"#define TOTALS {totals}",
        f"#define SUMMED {summed}",
        *_steps_text(programs),
        f"#define LOSS_IN_STEP {int(all(map(_reads_gradients_once, plans)))}",
        '#include "fused_sums.h"' if back else '#include "fused.h"',
        *[f"PRODUCTS({columns}, {every})" for columns, every in sorted(products)],
        *steps, *[_sum_steps(sums, sizes)] * back, '#include "fused_walk.h"', "",
    ])  # fmt: skip
    return Source(text, tuple(packs), **read)


def _steps_text(programs: Collection[str]) -> list[str]:
    """Macros for the step functions: of two adjoints, the one that reads a tape is used if there is one."""
    back = [f"{step}_step" for step in programs if step != "forward"]
    adjoint = back if len(back) < 2 else [f"(a->tape ? {back[1]} : {back[0]})"]
    forward = ["#define FORWARD_STEP forward_step"] * ("forward" in programs)
    return forward + [f"#define ADJOINT_STEP {step}" for step in adjoint]


def aligned(tape: int) -> int:
    """The width of a tape in memory, with padding."""
    return -(-tape // ALIGNED) * ALIGNED if tape > ALIGNED else tape


def _reads_gradients_once(plan: Schedule) -> bool:
    """Whether each stretch of an adjoint step's incoming gradient is read by one loop, and by no product."""
    reads = [item for loop in plan.loops for item in loop.reads if item[0] == "grad"]
    multiplied = {arg for value in plan.graph.values if value.op in ("product", "pull") for arg in value.args}
    return len(set(reads)) == len(reads) and not any(plan.graph[arg].op == "grad" for arg in multiplied)


def _sizes_text(fused: Fused, sizes: Sizes, tape: int, sums: Sums) -> list[str]:
    """Macros with the sizes of a step that the walk through time needs."""
    starts = [sum(fused.parts[:i]) for i in range(len(fused.parts))]
    decaying = {place.part for place in fused.forward.kept}
    copied = [i for i in range(len(fused.inputs)) if i not in stored_inputs(fused)]
    numbers = " + ".join(f"{sizes(one.depth)} * {sizes(one.width)}" for one in sums.all) or "0"

    def listed(widths: Sequence[int]) -> str:
        return f"{{{', '.join(map(sizes, widths or (0,)))}}}"

    return [
        f"#define PARTS {len(fused.parts)}",
        f"#define SIZE {sizes(sum(fused.parts))}",
        f"#define PART_WIDTHS {listed(fused.parts)}",
        f"#define PART_OFFSETS {listed(starts)}",
        f"#define WRITTEN {sizes(fused.gate_width)}",
        f"#define DECAYING {sum(1 << part for part in decaying)}",
        f"#define ADDED {int(overlap(fused.adjoint, fused.parts))}",
        f"#define TAPE ALIGNED({sizes(tape)})",
        f"#define SUMS ({numbers})",
        f"#define COPIED {len(copied)}",
        f"#define COPIED_WIDTHS {listed([fused.inputs[i] for i in copied])}",
        f"#define COPIED_FROM {listed([fused.input_at[i] for i in copied])}",
        f"#define COPIED_TO {listed([sum(fused.inputs[:i]) for i in copied])}",
    ]


def _sum_steps(sums: Sums, sizes: Sizes) -> str:
    """The C function that adds what a few steps have written to the sums."""
    calls = []
    for one in sums.all:
        columns = f"{sizes(one.column)}, {sizes(one.width)}, sums"
        if one.operand is None:
            calls.append(f"  sums = column_sum(g, w, {columns});")
            continue
        part, offset = one.operand
        values = "w->written" if part is None else "w->inputs" if part == INPUT else f"w->before[{part}]"
        calls.append(f"  sums = outer_sum(g, w, {values}, {sizes(offset)}, {sizes(one.depth)}, {columns});")
    head = "static void sum_steps(const fused_args *a, const group *g, const waiting *w) {"
    return "\n".join([head, "  real *sums = g->sums;", *calls, "}"])
