"""The fused Newton kernels against their twin, run on the CPU lane by lane, and the twin against the plain loop."""

from __future__ import annotations

import pytest
import torch
from nvrtc_layout import same_layout
from torch import Tensor
from warp_on_cpu import COMPILER, WarpNewton

from timeloom.cells import Cell, GRUCell, LSTMCell, RNNCell
from timeloom.kernels.cuda import nvrtc
from timeloom.kernels.cuda.newton import ONE_GROUP, NewtonArgs, NewtonVariant, chunk_for
from timeloom.kernels.cuda.programs import headers, text_of
from timeloom.kernels.reference import AdjointData, ReferenceSweeper
from timeloom.problem import Recurrence, Segments, cut_evenly, empty_states
from timeloom.solve.newton_reference import NewtonReference
from timeloom.solve.residual import SHARE_OF_BOX

on_cpu = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
compiles = pytest.mark.skipif(nvrtc.unavailable() is not None, reason=f"no NVRTC: {nvrtc.unavailable()}")
CASES = [("gru", 1), ("gru", 3), ("gru", 16), ("gru", 20), ("gru", 32), ("lstm", 5), ("lstm", 16)]
CASES += [("rnn_tanh", 8), ("rnn_tanh", 20), ("rnn_relu", 9)]


def cell_of(kernel: str, n: int, generator: torch.Generator, scale: float = 1.0) -> tuple[Cell, int]:
    """A cell with weights as torch begins with, and the width of its inputs."""
    gates = {"gru": 3, "lstm": 4}.get(kernel, 1)
    w_hh = scale * (2 * torch.rand(gates * n, n, generator=generator) - 1) / n**0.5
    if kernel == "gru":
        return GRUCell(w_hh, 2 * torch.rand(n, generator=generator) - 1), gates * n
    return (LSTMCell(w_hh) if kernel == "lstm" else RNNCell(w_hh, kernel.removeprefix("rnn_"))), gates * n


def problem_of(kernel: str, n: int, steps: int, batch: int, scale: float = 1.0) -> Recurrence:
    generator = torch.Generator().manual_seed(n)
    cell, width = cell_of(kernel, n, generator, scale)
    u = torch.randn(steps, batch, width, generator=generator)
    return Recurrence(cell, u, 0.3 * torch.randn(batch, cell.size, generator=generator))


def in_double(problem: Recurrence) -> Recurrence:
    cell = problem.cell.with_weights(tuple(weight.double() for weight in problem.cell.weights))
    return Recurrence(cell, problem.u.double(), problem.initial.double())


def saved_of(problem: Recurrence, states: list[Tensor]) -> Tensor | None:
    """The values of the gates that the adjoint reads."""
    if not text_of(str(problem.cell.kernel)).saved:
        return None
    return torch.cat(problem.cell._gates(states[0][:-1], problem.u), -1).contiguous()  # type: ignore[attr-defined]


def kernels_of(problem: Recurrence, chunk: int, saved: Tensor | None = None) -> WarpNewton:
    return WarpNewton(problem, SHARE_OF_BOX, saved, chunk)


def run_in_order(problem: Recurrence) -> list[Tensor]:
    states = empty_states(problem.steps, problem.initial, problem.cell.parts)
    ReferenceSweeper(problem).forward(
        cut_evenly(problem.steps, problem.batch, problem.steps, False), problem.initial, states
    )
    return states


def assert_close(given: Tensor, expected: Tensor, scale: float = 0.0) -> None:
    """To rounding, beside the largest number expected, or beside `scale` where that is larger."""
    torch.testing.assert_close(given, expected, rtol=2e-6, atol=2e-6 * max(float(expected.abs().max()), scale))


@on_cpu
@pytest.mark.parametrize(("kernel", "n"), CASES)
@pytest.mark.parametrize(("steps", "batch", "chunk"), [(13, 2, 5), (1, 1, 1), (24, 1, 12)])
def test_a_step_is_the_twins(kernel: str, n: int, steps: int, batch: int, chunk: int) -> None:
    problem = problem_of(kernel, n, steps, batch)
    kernels, twin = kernels_of(problem, chunk), NewtonReference(problem, chunk)
    states = None
    for _ in range(2):  # from the initial state everywhere, then from states of their own
        given, expected = torch.zeros(2), torch.zeros(2)
        maps, twins = kernels.compose(states, given[0]), twin.compose(states, expected[0])
        assert_close(maps.matrices, twins.matrices)
        assert_close(maps.sources, twins.sources, scale=1.0)  # differences of states
        starts = kernels.chain(maps)
        assert_close(starts, twin.chain(maps), scale=1.0)
        found = kernels.apply(states, starts)
        for part, of_twin in zip(found, twin.apply(states, starts), strict=True):
            assert_close(part[1:], of_twin[1:])
        finished = kernels.finish(found, given[1])
        for part, of_twin in zip(finished, twin.finish(found, expected[1]), strict=True):
            assert_close(part, of_twin)
        torch.testing.assert_close(given, expected, rtol=1e-3, atol=2e-6)
        states = found


@on_cpu
@pytest.mark.parametrize(("kernel", "n"), CASES)
@pytest.mark.parametrize(("steps", "batch", "chunk"), [(13, 2, 5), (1, 1, 1)])
@pytest.mark.parametrize("with_incoming", [False, True])
def test_gradients_before_chunks_are_the_adjoint_sweeps(
    kernel: str, n: int, steps: int, batch: int, chunk: int, with_incoming: bool
) -> None:
    problem = problem_of(kernel, n, steps, batch)
    states = run_in_order(problem)
    generator = torch.Generator().manual_seed(1)
    incoming = torch.randn(steps, batch, n, generator=generator) if with_incoming else None
    final = torch.randn(batch, problem.cell.size, generator=generator)
    kernels = kernels_of(problem, chunk, saved_of(problem, states))
    maps = kernels.compose_adjoint(states, incoming)
    twins = NewtonReference(problem, chunk).compose_adjoint(states, incoming)
    assert_close(maps.matrices, twins.matrices)
    assert_close(maps.sources, twins.sources)
    ends = kernels.chain(maps, final)
    whole = Segments(torch.arange(batch), torch.zeros(batch, dtype=torch.int64), torch.full((batch,), steps))
    assert_close(ends[0], final)
    for link in range(1, kernels.links):  # from the end of time to the end of each chunk
        behind = Segments(whole.sequence, whole.begin + (kernels.links - link) * chunk, whole.end)
        assert_close(ends[link], ReferenceSweeper(problem).adjoint(behind, final, AdjointData(states, incoming))[0])
    begins = torch.cat([ends[1:], torch.zeros_like(ends[:1])])
    moved = kernels.correct(maps, ends + 1, begins)
    assert_close(moved, NewtonReference(problem, chunk).correct(maps, ends + 1, begins))


@on_cpu
@pytest.mark.parametrize(("kernel", "n"), [("gru", 16), ("lstm", 5), ("rnn_tanh", 9)])
def test_many_links_are_run_through_in_groups(kernel: str, n: int) -> None:
    problem = problem_of(kernel, n, 101, 2)
    kernels, twin = kernels_of(problem, 1), NewtonReference(problem, 1)
    assert kernels.links > ONE_GROUP
    maps, first = twin.compose(None, torch.zeros(())), torch.randn(2, problem.cell.size)
    assert_close(kernels.chain(maps, first), twin.chain(maps, first))
    assert_close(kernels.chain(maps), twin.chain(maps))


@on_cpu
def test_what_overflows_moves_by_its_jump_alone() -> None:
    problem = problem_of("rnn_relu", 4, 40, 1, scale=1e6)
    kernels, residual = kernels_of(problem, 10), torch.zeros(())
    states = kernels.apply(None, kernels.chain(kernels.compose(None, residual)))
    assert torch.isfinite(residual)
    assert torch.isfinite(states[0][1:11]).all()


@on_cpu
def test_a_residual_that_is_not_a_number_is_infinite() -> None:
    problem = problem_of("gru", 4, 12, 1)
    problem.u[7] = torch.nan
    kernels, residual = kernels_of(problem, 5), torch.zeros(())
    kernels.compose(None, residual)
    assert residual.isinf()


@pytest.mark.parametrize(("kernel", "n"), CASES)
def test_steps_of_the_twin_end_at_the_plain_loops_states(kernel: str, n: int) -> None:
    problem = problem_of(kernel, n, 37, 2)
    problem = Recurrence(
        problem.cell.with_weights(tuple(w.double() for w in problem.cell.weights)),
        problem.u.double(),
        problem.initial.double(),
    )
    twin, residual, states = NewtonReference(problem, 9), torch.zeros((), dtype=torch.float64), None
    for _ in range(20):
        states = twin.apply(states, twin.chain(twin.compose(states, residual)))
    for part, truth in zip(twin.finish(states, residual), run_in_order(problem), strict=True):
        torch.testing.assert_close(part, truth, rtol=1e-12, atol=1e-12)
    assert residual < 1e-12


@compiles
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
@pytest.mark.parametrize("adjoint", [False, True], ids=["forward", "adjoint"])
@pytest.mark.parametrize(("kernel", "n"), [("gru", 7), ("lstm", 16), ("rnn_relu", 3)])
def test_every_cell_compiles(kernel: str, n: int, adjoint: bool, architecture: str) -> None:
    variant = NewtonVariant(kernel, n)
    same = same_layout("NewtonArgs", NewtonArgs, "floor", "worst")
    code = nvrtc.compile_source(variant.source(adjoint) + same, architecture, headers(text_of(kernel).file))
    assert b"chain" in code


@pytest.mark.parametrize(("steps", "batch"), [(1, 1), (100, 1), (16384, 1), (30000, 256), (1_000_000, 16)])
def test_chunks_are_as_long_as_there_are_many(steps: int, batch: int) -> None:
    chunk = chunk_for(steps, batch)
    assert 1 <= chunk <= steps
    assert -(-steps // chunk) * batch <= max(2048 + batch, 4 * steps**0.5 + 1)
