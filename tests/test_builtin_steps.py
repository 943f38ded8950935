"""Torch's cells in the compiler's own terms: their equations are the cells', and their sources serve any width."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from timeloom.cells import GRUCell, LSTMCell, RNNCell
from timeloom.cells.base import Cell, Masks
from timeloom.cells.masked import MaskedCell
from timeloom.compile.builtin import EQUATIONS, Builtin, builtin
from timeloom.compile.program import Program, evaluate, gathered
from timeloom.compile.sizes import INPUTS, UNITS, named
from timeloom.compile.sums import sums_of
from timeloom.kernels.cpu.texts import FOLDER, KERNELS, Kernel, source
from timeloom.kernels.reference import units_of

N, DEPTH, ROWS = 5, 3, 7
GATES = {"gru": 3, "lstm": 4, "rnn_tanh": 1, "rnn_relu": 1}


def cell_of(kind: str) -> Cell:
    w_hh = torch.randn(GATES[kind] * N, N, dtype=torch.float64)
    if kind == "gru":
        return GRUCell(w_hh, torch.randn(N, dtype=torch.float64))
    return LSTMCell(w_hh) if kind == "lstm" else RNNCell(w_hh, kind.removeprefix("rnn_"))


class Case:
    """A cell on random rows, and its built-in step on the same."""

    def __init__(self, kind: str, over_x: bool, masked: bool) -> None:
        torch.manual_seed(0)
        plain, gates = cell_of(kind), GATES[kind]
        self.made: Builtin = builtin(kind, N, DEPTH if over_x else None, masked)
        self.cell = MaskedCell(plain, Masks(True, True)) if masked else plain
        self.state, self.grad = torch.randn(2, ROWS, plain.size, dtype=torch.float64)
        masks = list(torch.rand(1 + len(plain.parts), ROWS, N, dtype=torch.float64)) if masked else []
        w_ih, bias = torch.randn(gates * N, DEPTH, dtype=torch.float64), torch.randn(gates * N, dtype=torch.float64)
        x, u = torch.randn(ROWS, DEPTH, dtype=torch.float64), torch.randn(ROWS, gates * N, dtype=torch.float64)
        self.matrices = [plain.weights[0].view(gates, 1, N, N).roll(self.made.turned, 0)]
        units = [units_of(plain)] if kind != "lstm" else []
        if over_x:
            u = x @ w_ih.t() + bias
            self.matrices.append(w_ih.view(gates, 1, N, DEPTH))
            units = [*bias.split(N), *units]
        self.u, self.x, self.w_ih = torch.cat([u, *masks], -1), x, w_ih
        self.leaves: dict[str, list[Tensor]] = {
            "state": list(self.state.split(N, -1)), "grad": list(self.grad.split(N, -1)), "unit": units, "mask": masks,
            "input": [x] if over_x else list(u.split(N, -1)),
        }  # fmt: skip

    def run(self, program: Program) -> dict[int, Tensor]:
        roots = [*program.roots, *[place.value for place in program.taped]]
        return evaluate(program.graph, roots, self.leaves, self.matrices)

    def next_of(self, program: Program, values: dict[int, Tensor], places: str = "next") -> Tensor:
        parts = self.state.split(N, -1)
        return torch.cat([gathered(getattr(program, places), i, values, part) for i, part in enumerate(parts)], -1)


cases = pytest.mark.parametrize("case", [pytest.param(tuple(kernel), id=name) for name, kernel in KERNELS.items()])


@cases
def test_a_step_is_the_cell_s(case: tuple[str, bool, bool]) -> None:
    given = Case(*case)
    program = given.made.fused.forward
    values = given.run(program)
    torch.testing.assert_close(given.next_of(program, values), given.cell.step(given.state, given.u))
    torch.testing.assert_close(given.next_of(program, values, "kept"), given.cell.decay(given.state, given.u))


@cases
@pytest.mark.parametrize("with_tape", [False, True])
def test_its_derivatives_are_the_cell_s(case: tuple[str, bool, bool], with_tape: bool) -> None:
    given = Case(*case)
    fused, taped = given.made.fused, given.made.taped
    expected, gates = given.cell.vjp(given.state, given.u, given.grad)
    program = taped.adjoint if with_tape else fused.adjoint
    if with_tape:
        kept = given.run(taped.forward)
        tape = [kept[place.value] for place in taped.forward.taped]
        given.leaves["tape"] = [torch.cat(tape, -1) if tape else given.state[:, :0]]
        given.leaves["after"] = list(given.cell.step(given.state, given.u).split(N, -1))
    values = given.run(program)
    torch.testing.assert_close(given.next_of(program, values), expected)
    written = torch.cat([values[place.value].expand(ROWS, place.width) for place in program.written], -1)
    if case[1]:
        by_u = given.cell.input_grads(gates)[:, : len(given.w_ih)]
        at = fused.input_at[0]
        torch.testing.assert_close(written[:, at : at + DEPTH], by_u @ given.w_ih)
        assert sum(part is not None for part in fused.product_at[0]) == GATES[case[0]]
    else:  # what solvers read of it
        torch.testing.assert_close(written, gates)


@pytest.mark.parametrize("kind", EQUATIONS)
def test_what_is_summed_does_not_depend_on_what_widths_have_in_common(kind: str) -> None:
    """One text serves all widths: the same sums in the same order, n and depth equal or not."""
    for masked in (False, True):
        shapes = []
        for n, depth in ((UNITS, INPUTS), (4, 4), (1, 1), (8, 4), (3, 12)):
            sums = sums_of(builtin(kind, n, depth, masked).fused)
            shapes.append([(one.operand and one.operand[0], one.width // n, one.width % n) for one in sums.all])
            assert all(one.depth in (1, n, depth) for one in sums.all)
        assert all(shape == shapes[0] for shape in shapes)


def test_sizes_become_names() -> None:
    assert named(0) == "0"
    assert named(UNITS) == "N"
    assert named(INPUTS) == "DEPTH"
    assert named(3 * UNITS) == "(3 * N)"
    assert named(4 * UNITS + INPUTS) == "(4 * N + DEPTH)"
    with pytest.raises(ValueError, match="a size of 129 is not made of"):
        named(UNITS + 2)


def test_generated_files_are_those_that_would_be_written_now() -> None:
    """A wheel is compiled from them. `make kernels` writes them anew."""
    assert sorted(path.name for path in FOLDER.glob("*.c")) == sorted(f"{name}.c" for name in KERNELS)
    for name, kernel in KERNELS.items():
        assert (FOLDER / f"{name}.c").read_text() == source(kernel).text, f"{name}.c is out of date"


def test_files_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from timeloom.kernels.cpu import texts

    monkeypatch.setattr(texts, "KERNELS", {"x_gru": Kernel("gru", True, False)})
    texts.write(tmp_path)
    (path,) = tmp_path.iterdir()
    assert path.read_text().startswith("#define NAME x_gru\n")
