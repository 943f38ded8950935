"""The pointwise part of a loop as C, the same text for every device: `V` is the device's number or vector type."""

from __future__ import annotations

import math

from timeloom.compile.graph import Graph
from timeloom.compile.pointwise import FUNCTIONS
from timeloom.compile.schedule import Item, Loop


def literal(number: float) -> str:
    if math.isnan(number):
        return "v_const(NAN)"
    if math.isinf(number):
        return "v_const(INFINITY)" if number > 0 else "v_const(-INFINITY)"
    return f"v_const({number!r})"


def pointwise_text(name: str, graph: Graph, loop: Loop, input_offsets: tuple[int, ...]) -> str:
    """A function `name(const V *in, V *out, int decay)` that computes `loop.leaves` from `loop.reads`."""
    names: dict[int, str] = {}
    where: dict[Item, int] = {item: i for i, item in enumerate(loop.reads)}
    lines: list[str] = []

    def read(index: int) -> str | None:
        value = graph[index]
        if value.op == "number":
            return literal(float(value.detail[0]))
        key: Item
        if value.op in ("state", "grad", "after"):
            key = (value.op, int(value.detail[0]), int(value.detail[1]))
        elif value.op == "input":
            key = ("input", 0, input_offsets[int(value.detail[0])])
        elif value.op in ("unit", "mask"):
            key = (value.op, int(value.detail[0]), 0)
        elif value.op == "tape":
            key = ("tape", value.width, int(value.detail[0]))
        elif value.op == "total":
            key = ("total", index, 0)
        else:
            key = ("product", index, 0) if ("product", index, 0) in where else ("slot", index, 0)
        return f"in[{where[key]}]" if key in where else None

    def name_of(index: int, indent: str) -> str:
        if index not in names:
            found = read(index) if index not in own else None
            names[index] = found if found is not None else compute(index, indent)
        return names[index]

    def compute(index: int, indent: str) -> str:
        value = graph[index]
        args = [name_of(arg, indent) for arg in value.args]
        lines.append(f"{indent}const V v{index} = {FUNCTIONS[value.op].c.format(*args)};")
        return f"v{index}"

    own = {i for i in (*loop.values, *loop.for_decay) if graph[i].op not in ("product", "pull")}
    for number, (_, value) in enumerate(loop.leaves[: loop.decays]):
        lines.append(f"  out[{number}] = {name_of(value, '  ')};")
    if loop.leaves[loop.decays :]:
        lines.append("  if (decay) {")
        for number, (_, value) in enumerate(loop.leaves[loop.decays :], loop.decays):
            lines.append(f"    out[{number}] = {name_of(value, '    ')};")
        lines.append("  }")
    return "\n".join([f"INLINE void {name}(const V *in, V *out, const int decay) {{", *lines, "}"])
