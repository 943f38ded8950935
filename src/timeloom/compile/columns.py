"""Where a loop of a CPU kernel sums its products: which of them share a sum."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from timeloom.compile.graph import Matrix
from timeloom.compile.program import Program
from timeloom.compile.schedule import Loop, Schedule


@dataclass
class Columns:
    """Sums that a loop makes for each unit, side by side: `of` each product, transposed product or sum of two products
    which one it is; the `firsts` of every stack of matrices.
    """

    of: dict[int, int] = field(default_factory=dict)
    firsts: list[int] = field(default_factory=list)
    count: int = 0


def columns_of(loop: Loop, plan: Schedule, program: Program) -> Columns:
    """Columns of a loop's products. Two that are only added to each other are one sum, if the rest of their stacks
    stays side by side; the loop then reads that sum.
    """
    found, graph = Columns(), plan.graph
    pairs = _pairs(loop, plan, program)
    for matrix, operand in loop.stacks:
        members = {
            int(graph[i].detail[1]): i
            for i in graph.needed(program.roots)
            if graph[i].op == "product" and (graph[i].detail[0], graph[i].args[0]) == (matrix, operand)
        }
        shared = {at: pairs[i] for at, i in members.items() if i in pairs and pairs[i][0] in found.of}
        first = _common_first(shared, found, program.matrices[matrix])
        if first is None:
            shared, first = {}, found.count
        found.firsts.append(first)
        found.of |= {i: first + at for at, i in members.items()}
        found.of |= {together: first + at for at, (_, together) in shared.items()}
        found.count = max(found.count, first + program.matrices[matrix].count)
        for at, (other, together) in shared.items():
            _read_together(loop, (members[at], other), together)
    for pull in loop.pulls:
        found.of[pull] = found.count
        found.count += 1
    return found


def _pairs(loop: Loop, plan: Schedule, program: Program) -> dict[int, tuple[int, int]]:
    """Of a product that is only added to another one: the other one, and their sum."""
    graph, needed = plan.graph, plan.graph.needed(program.roots)
    uses = Counter(arg for index in needed for arg in graph[index].args)
    uses.update(place.value for place in (*program.next, *program.written, *program.kept, *program.taped))
    pairs: dict[int, tuple[int, int]] = {}
    for index in loop.values:
        args = graph[index].args
        if graph[index].op == "add" and all(
            graph[arg].op == "product" and uses[arg] == 1 and (graph[arg].detail[0], graph[arg].args[0]) in loop.stacks
            for arg in args
        ):
            pairs |= {args[0]: (args[1], index), args[1]: (args[0], index)}
    return pairs


def _common_first(shared: dict[int, tuple[int, int]], found: Columns, matrix: Matrix) -> int | None:
    """Where a stack begins whose members share these sums: all others stand behind those that are there already."""
    firsts = {found.of[other] - at for at, (other, _) in shared.items()}
    if len(firsts) != 1 or min(firsts) < 0:
        return None
    (first,) = firsts
    return first if all(first + at >= found.count for at in range(matrix.count) if at not in shared) else None


def _read_together(loop: Loop, both: tuple[int, int], together: int) -> None:
    loop.values.remove(together)
    apart = [("product", one, 0) for one in both]
    loop.reads = [*[item for item in loop.reads if item not in apart], ("product", together, 0)]
