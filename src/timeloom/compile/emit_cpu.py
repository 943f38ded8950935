"""A compiled step as C for the CPU: its programs, and all that the walk through time has to know of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from timeloom.compile.emit_step import Pack, StepText, stored_inputs
from timeloom.compile.program import INPUT, Fused, Program, overlap
from timeloom.compile.schedule import Schedule, schedule
from timeloom.compile.sizes import NUMBERS, Sizes
from timeloom.compile.sums import Sums, sums_of
from timeloom.compile.tape import taped

ALIGNED = 16
"""Numbers of which a wide tape has a multiple, so that its vectors do not lie across the lines of a cache."""


@dataclass(frozen=True)
class Read:
    """Which packed weights a sweep in one direction reads, and whether it reads per-unit vectors."""

    packs: frozenset[Pack]
    units: bool


@dataclass(frozen=True)
class Source:
    """C text, the packed weights that it expects, in order, and the numbers of a step that it keeps on a tape."""

    text: str
    packs: tuple[Pack, ...]
    forward: Read
    adjoint: Read
    tape: int
    sums: Sums
    """What the adjoint can sum on its way."""
    sharable: bool
    """Whether threads may share the units of a row: not where a row is summed up within a step."""


def emit(fused: Fused) -> Source:
    """The source of a compiled step, without the element type; it may be given a tape."""
    tape = taped(fused)
    if tape is None:
        return source_of_programs(fused, {"forward": fused.forward, "adjoint": fused.adjoint}, 0)
    programs = {"forward": tape.forward, "adjoint": fused.adjoint, "taped": tape.adjoint}
    return source_of_programs(fused, programs, tape.width)


def source_of_programs(
    fused: Fused, programs: dict[str, Program], tape: int, sizes: Sizes = NUMBERS, name: str = "fused"
) -> Source:
    """The source of the programs `forward`, `adjoint` and `taped`, the adjoint that reads a tape of this width: of the
    last two, of which one may be missing, it is run where there is one.
    """
    offsets = tuple(sum(fused.inputs[:i]) for i in range(len(fused.inputs)))
    packs: list[Pack] = []
    read = dict.fromkeys(("forward", "adjoint"), Read(frozenset(), False))
    steps, plans, products, scratch, totals = [], [], set[tuple[int, int]](), "1", 0
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
    sums = sums_of(fused)
    text = "\n".join([
        f"#define NAME {name}",
        *_sizes_text(fused, sizes, tape, sums),
        f"#define SCRATCH {scratch}",
        f"#define TOTALS {max(totals, 1)}",
        f"#define ADJOINT_STEP {_adjoint_step(programs)}",
        f"#define LOSS_IN_STEP {int(all(map(_reads_gradients_once, plans)))}",
        '#include "fused_sums.h"',
        *[f"PRODUCTS({columns}, {every})" for columns, every in sorted(products)],
        *steps, _sum_steps(sums, sizes), '#include "fused_walk.h"', "",
    ])  # fmt: skip
    return Source(text, tuple(packs), **read, tape=aligned(tape), sums=sums, sharable=totals == 0)


def aligned(tape: int) -> int:
    """The width of a tape as it lies in memory."""
    return -(-tape // ALIGNED) * ALIGNED if tape > ALIGNED else tape


def _reads_gradients_once(plan: Schedule) -> bool:
    """Whether the gradient that an adjoint step is given is read by one loop each, and multiplied by none."""
    reads = [item for loop in plan.loops for item in loop.reads if item[0] == "grad"]
    multiplied = {arg for value in plan.graph.values if value.op in ("product", "pull") for arg in value.args}
    return len(set(reads)) == len(reads) and not any(plan.graph[arg].op == "grad" for arg in multiplied)


def _adjoint_step(programs: Iterable[str]) -> str:
    steps = [f"{step}_step" for step in programs if step != "forward"]
    return steps[0] if len(steps) == 1 else f"(a->tape ? {steps[1]} : {steps[0]})"


def _sizes_text(fused: Fused, sizes: Sizes, tape: int, sums: Sums) -> list[str]:
    """All that the walk through time has to know of a step's sizes."""
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
    """The function that sums what a few steps have written."""
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
