"""A compiled step as kernels of any device read it: forward and adjoint program, and where gradients lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from timeloom.compile.derive import Adjoint, kept
from timeloom.compile.graph import Graph, Matrix, Place
from timeloom.compile.pointwise import FUNCTIONS

INPUT = -1
"""Stands for the step's inputs in place of a part of the state."""


@dataclass(frozen=True)
class Program:
    """One step, forward or adjoint: its next state (or gradient), the vectors it writes out, and its decay."""

    graph: Graph
    next: tuple[Place, ...]
    """The next state; in an adjoint the gradient of the state before, whose places may overlap: they add up."""
    written: tuple[Place, ...] = ()
    """Vectors that an adjoint step writes out side by side: `part` is 0, `offset` runs over all of them."""
    kept: tuple[Place, ...] = ()
    matrices: tuple[Matrix, ...] = ()
    taped: tuple[Place, ...] = ()
    """Values that a forward step saves for the adjoint one, side by side, `part` 0; one number per row has width 1."""

    def pull_width(self, matrix: int) -> int:
        """Width of the operand of a transposed product with this stack."""
        return self.matrices[matrix].blocks * self.matrices[matrix].outputs

    @property
    def roots(self) -> list[int]:
        return [place.value for place in (*self.next, *self.written, *self.kept)]


@dataclass(frozen=True, eq=False)
class Fused:
    """A step in its normal form.

    parts: widths of the state's parts. inputs, units: widths of the input and the per-unit vectors.
    matrices: stacks of recurrent matrices. The weights of a cell are these, then the per-unit vectors.
    """

    parts: tuple[int, ...]
    inputs: tuple[int, ...]
    units: tuple[int, ...]
    matrices: tuple[Matrix, ...]
    forward: Program
    adjoint: Program
    input_at: tuple[int, ...]
    """Offset of each input's gradient in what the adjoint writes."""
    unit_at: tuple[int | None, ...]
    """The same for gradients of the per-unit vectors, to be summed over rows and steps; None where they are zero."""
    product_at: tuple[tuple[int | None, ...], ...]
    """The same for gradients of the products, for each stack."""
    operand_at: tuple[tuple[int | None, int], ...]
    """The operand of each stack: part and offset of the state, or None and an offset in what the adjoint writes; INPUT
    and an offset in the inputs, if sweeps sum all gradients of weights."""

    @property
    def gate_width(self) -> int:
        """Width of what the adjoint writes at every step."""
        return sum(place.width for place in self.adjoint.written)

    @property
    def work(self) -> int:
        """Multiplications in the products of a step."""
        return sum(m.count * m.blocks * m.outputs * m.inputs for m in self.matrices)

    def describe(self) -> str:
        """The normal form in a line."""
        totals = sum(self.forward.graph[i].op == "total" for i in self.forward.graph.needed(self.forward.roots))
        shapes = ", ".join(
            f"{m.count} × {m.outputs}×{m.inputs}" + (f" in {m.blocks} blocks" if m.blocks > 1 else "")
            for m in self.matrices
        )
        sums = f", {totals} sums over a row" if totals else ""
        return f"products {shapes or 'none'}{sums}; {len(self.inputs)} input vectors computed for all steps at once"


def complete(parts: tuple[int, ...], graph: Graph, outputs: list[Place], matrices: Sequence[Matrix],
             inputs: Sequence[int], units: Sequence[int], shares: Sequence[Place] | None = None,
             sums: bool | None = None) -> Fused:  # fmt: skip
    """The step with its derivatives.

    shares: the decay, if that is not what `kept` finds. sums: whether sweeps always, or never, sum the gradients of
    weights; None writes out all operands of such sums, so that both are possible.
    """
    shares = kept(graph, outputs) if shares is None else shares
    adjoint = Adjoint(graph, outputs)
    written: dict[tuple[int, int], Place] = {}

    def write(value: int, width: int) -> int:
        if (value, width) not in written:
            offset = sum(place.width for place in written.values())
            written[value, width] = Place(0, offset, width, value)
        return written[value, width].offset

    zero = graph.number(0)
    by_input = [adjoint.by_input.get(i, zero) for i in range(len(inputs))]
    for grad, width in zip(by_input, inputs, strict=True):
        if graph[grad].op != "pull":  # gradients by a product with x come last: they may be narrow
            write(grad, width)
    product_at: tuple[tuple[int | None, ...], ...] = tuple(
        tuple(
            write(adjoint.by_product[k, i], m.blocks * m.outputs) if (k, i) in adjoint.by_product else None
            for i in range(m.count)
        )
        for k, m in enumerate(matrices)
    )
    unit_at: tuple[int | None, ...] = tuple(
        write(adjoint.by_unit[i], width) if adjoint.by_unit.get(i, zero) != zero else None
        for i, width in enumerate(units)
    )
    input_at = tuple(write(grad, width) for grad, width in zip(by_input, inputs, strict=True))
    operand_at: list[tuple[int | None, int]] = []
    for k, matrix in enumerate(matrices):
        operand = next(v.args[0] for v in graph.values if v.op == "product" and v.detail[0] == k)
        value = graph[operand]
        if value.op == "state":
            operand_at.append((int(value.detail[0]), int(value.detail[1])))
        elif sums is not None and value.op == "input":
            operand_at.append((INPUT, sum(inputs[: int(value.detail[0])])))
        elif sums is False:
            operand_at.append((None, 0))
        else:
            operand_at.append((None, write(operand, matrix.blocks * matrix.inputs)))
    if sums is False:
        product_at, unit_at = tuple((None,) * m.count for m in matrices), (None,) * len(units)
    return Fused(
        parts, tuple(inputs), tuple(units), tuple(matrices),
        Program(graph, tuple(outputs), (), tuple(shares), tuple(matrices)),
        Program(graph, tuple(adjoint.by_state), tuple(written.values()), tuple(shares), tuple(matrices)),
        input_at, unit_at, product_at, tuple(operand_at),
    )  # fmt: skip


def overlap(program: Program, parts: tuple[int, ...]) -> bool:
    """Whether the places of the next gradient overlap, or leave gaps."""
    places = sorted((place.part, place.offset, place.width) for place in program.next)
    return places != [(part, 0, width) for part, width in enumerate(parts)]


def evaluate(
    graph: Graph, roots: Sequence[int], leaves: dict[str, Sequence[Tensor]], matrices: Sequence[Tensor]
) -> dict[int, Tensor]:
    """Values of the roots and all that they depend on, `(N, width)` (or `(N, 1)`), in torch: the reference for kernels.

    leaves: parts of `state` and `grad`, `(N, part)` each; `input` and `mask` vectors `(N, width)`, `unit` vectors
    `(width,)`; for a program that reads a tape also `tape`, one tensor `(N, width)`, and parts of `after` like `state`.
    """
    like = leaves["state"][0]
    held: dict[int, Tensor] = {}
    for index in graph.needed(list(roots)):
        value = graph[index]
        args = [held[arg] for arg in value.args]
        if value.op == "number":
            held[index] = like.new_full((1, 1), value.detail[0])
        elif value.op in ("state", "grad", "after"):
            part, offset = map(int, value.detail)
            held[index] = leaves[value.op][part][:, offset : offset + value.width]
        elif value.op == "tape":
            offset = int(value.detail[0])
            held[index] = leaves["tape"][0][:, offset : offset + (value.width or 1)]
        elif value.op in ("input", "unit", "mask"):
            held[index] = leaves[value.op][int(value.detail[0])]
        elif value.op == "total":
            held[index] = args[0].sum(-1, keepdim=True)
        elif value.op == "product":
            matrix, number = map(int, value.detail)
            held[index] = _blockwise(args[0], matrices[matrix][number])
        elif value.op == "pull":
            matrix = int(value.detail[0])
            width = matrices[matrix].shape[1] * matrices[matrix].shape[2]
            spread = [arg.expand(-1, width) if arg.shape[-1] == 1 else arg for arg in args]
            terms = [_blockwise(arg, w.transpose(-1, -2)) for arg, w in zip(spread, matrices[matrix], strict=False)]
            held[index] = torch.stack(torch.broadcast_tensors(*terms)).sum(0)
        else:
            held[index] = FUNCTIONS[value.op].on_tensors(*args)
    return held


def gathered(places: Sequence[Place], part: int, values: dict[int, Tensor], like: Tensor) -> Tensor:
    """The values of one part at their offsets: `(N, part)`, as `like`."""
    mine = [place for place in places if place.part == part]
    if len(mine) == 1 and mine[0].width == like.shape[1]:
        return values[mine[0].value].expand_as(like)
    whole = torch.zeros_like(like)
    for place in mine:
        stretch = torch.zeros_like(like[:, : place.width]) + values[place.value]
        whole = whole + torch.nn.functional.pad(stretch, (place.offset, like.shape[1] - place.offset - place.width))
    return whole


def _blockwise(value: Tensor, matrix: Tensor) -> Tensor:
    """`(N, blocks · in)` times `(blocks, out, in)`, block by block."""
    if len(matrix) == 1:
        return value @ matrix[0].t()
    return torch.einsum("nbi,boi->nbo", value.unflatten(-1, (len(matrix), -1)), matrix).flatten(-2)
