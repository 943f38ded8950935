"""Properties over random shapes, chunks, dtypes, lengths and resets."""

from __future__ import annotations

import pytest
import torch
import zoo
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import timeloom as tl
from timeloom.problem import Recurrence, cut
from timeloom.solvers import MGRIT, Auto, Shooting, Solver

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore:MGRIT.*does not fit")]

repeatable = settings(deadline=None, max_examples=60, derandomize=True)
CLOSE = {torch.float64: 1e-9, torch.float32: 2e-4}
MOST_BEYOND = 5
"""Sweeps after the first that meets the tolerance: jumps that meet it may add up to more, and large first corrections
and float64 gradients take one more."""

shootings = st.builds(
    Shooting,
    chunk=st.integers(1, 30),
    correction=st.sampled_from(["auto", "none", "diag", "newton"]),
    warmup=st.sampled_from([None, 0, 1, 5]),
    max_iters=st.sampled_from([None, 1, 2, 5]),
    adjoint=st.sampled_from(["same", "sequential"]),
)
multigrids = st.builds(
    MGRIT,
    coarsening=st.integers(2, 9) | st.lists(st.integers(2, 5), min_size=1, max_size=3).map(tuple),
    relaxation=st.sampled_from(["F", "FCF", "FCFCF", ("F", "FCF")]),
    weight=st.sampled_from([1.0, 0.7, 1.2]),
    cycle=st.sampled_from(["V", "F"]),
    cycles=st.sampled_from([None, 1, 3]),
    skip_down=st.booleans(),
    guess=st.sampled_from(["warmup", "nested", "initial"]),
    coarse_inputs=st.sampled_from(["mean", "inject"]),
    adjoint=st.sampled_from(["same", "sequential"]),
)
solvers = st.one_of(shootings, multigrids, st.just(Auto()))


@st.composite
def problems(
    draw: st.DrawFn, names: tuple[str, ...]
) -> tuple[zoo.Network, Tensor, Tensor, Tensor | None, Tensor | None]:
    """A network, inputs and initial state, and now and then lengths and resets."""
    dtype = draw(st.sampled_from([torch.float64, torch.float32]))
    regime = draw(st.sampled_from(["default", "gate+4", "gate+6", "weights×2"]))
    name, n, seed = draw(st.sampled_from(names)), draw(st.integers(1, 9)), draw(st.integers(0, 1000))
    steps, batch = draw(st.integers(1, 30)), draw(st.integers(1, 5))
    net = zoo.network(name, regime, n=n, seed=seed, dtype=dtype)
    x, initial = zoo.data(net, steps, batch, seed=seed, dtype=dtype)
    lengths = draw(st.none() | st.lists(st.integers(0, steps), min_size=batch, max_size=batch).map(torch.tensor))
    marks = st.lists(st.lists(st.booleans(), min_size=batch, max_size=batch), min_size=steps, max_size=steps)
    resets = draw(st.none() | marks.map(torch.tensor))
    return net, x, initial, lengths, resets


@repeatable
@given(problem=problems(zoo.HAND_WRITTEN), solver=solvers, loss=st.sampled_from(["outputs", "last", "both"]))
def test_every_solver_gives_the_plain_loops_states_and_gradients(
    problem: tuple[zoo.Network, Tensor, Tensor, Tensor | None, Tensor | None], solver: Solver, loss: str
) -> None:
    net, x, initial, lengths, resets = problem
    close = CLOSE[x.dtype]
    solution = zoo.solve(net, x, initial, solver, lengths, resets)
    states, final = zoo.truth(net, x, initial, lengths, resets)
    outputs = states[..., : net.parts[0]]
    assert solution.report.converged
    assert zoo.difference(solution.outputs, outputs) < close
    assert zoo.difference(solution.final, final) < close
    ours = zoo.gradients(net, x, initial, solution.outputs, solution.final, loss)
    theirs = zoo.gradients(net, x, initial, outputs, final, loss)
    scale = max(float(value.abs().max()) for value in theirs.values())
    for name, value in theirs.items():
        assert float((ours[name] - value).abs().max()) <= close * scale, name
    if lengths is not None:
        for b, length in enumerate(lengths.tolist()):
            assert bool((solution.outputs[length:, b] == 0).all())
            assert bool((ours["x"][length:, b] == 0).all())


@repeatable
@given(
    problem=problems(("function", "function of tuple", "elementwise", "module")),
    solver=solvers,
    loss=st.sampled_from(["outputs", "last", "both"]),
)
def test_so_do_generic_cells(
    problem: tuple[zoo.Network, Tensor, Tensor, Tensor | None, Tensor | None], solver: Solver, loss: str
) -> None:
    net, x, initial, _, _ = problem
    solution = zoo.solve(net, x, initial, solver)
    states, final = zoo.truth(net, x, initial)
    close = CLOSE[x.dtype]
    assert zoo.difference(solution.outputs, states) < close
    ours = zoo.gradients(net, x, initial, solution.outputs, solution.final, loss)
    theirs = zoo.gradients(net, x, initial, states, final, loss)
    scale = max(float(value.abs().max()) for value in theirs.values())
    for name, value in theirs.items():
        assert float((ours[name] - value).abs().max()) <= close * scale, name


@repeatable
@given(problem=problems(zoo.HAND_WRITTEN), solver=shootings)
def test_reports_never_lie(
    problem: tuple[zoo.Network, Tensor, Tensor, Tensor | None, Tensor | None], solver: Shooting
) -> None:
    net, x, initial, lengths, resets = problem
    solution = zoo.solve(net, x, initial, solver, lengths, resets)
    solution.outputs.sum().backward()
    for report in (solution.report, solution.report.backward):
        assert report.chunk == len(x) or report.chunk == solver.chunk
        assert report.converged
        assert report.iterations == max(1, len(report.residuals))
        assert report.iterations <= (solver.max_iters or 40)
        met = not report.residuals or report.residuals[-1] <= report.tolerance
        explained = "may add up to" in report.reason or "as near as rounding allows" in report.reason
        assert met != report.fell_back or explained
        assert sum(residual <= report.tolerance for residual in report.residuals[:-1]) <= MOST_BEYOND


@repeatable
@given(
    steps=st.integers(1, 50),
    chunk=st.integers(1, 60),
    lengths=st.none() | st.lists(st.integers(0, 50), min_size=1, max_size=5),
    backwards=st.booleans(),
)
def test_chunks_cover_every_step_once(steps: int, chunk: int, lengths: list[int] | None, backwards: bool) -> None:
    ends = [steps] * 2 if lengths is None else [min(length, steps) for length in lengths]
    net = zoo.network("gru", n=1)
    x, initial = zoo.data(net, steps, len(ends))
    problem = net.recurrence(x, initial)
    given_lengths = None if lengths is None else torch.tensor(ends)
    problem = Recurrence(problem.cell, problem.u, problem.initial, given_lengths)
    segments = cut(problem, chunk, backwards)
    assert len(segments) == -(-steps // chunk) * len(ends)
    covered = torch.zeros(steps, len(ends), dtype=torch.int64)
    for sequence, begin, end in zip(*(column.tolist() for column in segments.columns), strict=True):
        assert 0 <= begin <= end <= ends[sequence]
        assert end - begin <= chunk
        covered[begin:end, sequence] += 1
    inside = torch.arange(steps)[:, None] < torch.tensor(ends)
    assert torch.equal(covered, inside.long())
    order = segments.begin.view(-1, len(ends))
    assert bool((order.diff(dim=0) * (-1 if backwards else 1) >= 0).all())


@repeatable
@given(
    steps=st.integers(0, 200),
    batch=st.lists(st.integers(1, 3), max_size=2),
    n=st.integers(1, 4),
    dense=st.booleans(),
    reverse=st.booleans(),
    start=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_linear_scan_is_the_loop(
    steps: int, batch: list[int], n: int, dense: bool, reverse: bool, start: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    a = torch.tanh(draw(steps, *batch, n, n) / n if dense else draw(steps, *batch, n))
    b, h0 = draw(steps, *batch, n), draw(*batch, n) if start else None
    states, h = [], torch.zeros(*batch, n, dtype=torch.float64) if h0 is None else h0
    for t in reversed(range(steps)) if reverse else range(steps):
        h = ((a[t] @ h.unsqueeze(-1)).squeeze(-1) if dense else a[t] * h) + b[t]
        states.append(h)
    expected = torch.stack(states[::-1] if reverse else states) if states else b
    torch.testing.assert_close(tl.linear_scan(a, b, h0, reverse), expected, rtol=1e-10, atol=1e-10)


@repeatable
@given(
    steps=st.integers(1, 40),
    batch=st.integers(1, 6),
    chunk=st.integers(1, 40),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    order=st.randoms(use_true_random=False),
)
def test_sequences_of_a_batch_do_not_look_at_each_other(
    steps: int, batch: int, chunk: int, dtype: torch.dtype, order: object
) -> None:
    """Other companions, in another order, change nothing but rounding."""
    generator = torch.Generator().manual_seed(steps)
    h0 = torch.randn(batch, 3, generator=generator).to(dtype)
    xs = torch.randn(steps, batch, 3, generator=generator).to(dtype)
    permutation = list(range(batch))
    order.shuffle(permutation)

    def cell(h: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(0.7 * h + x)

    together, _ = tl.unroll(cell, h0, xs, Shooting(chunk=chunk))
    shuffled, _ = tl.unroll(cell, h0[permutation], xs[:, permutation], Shooting(chunk=chunk))
    assert zoo.difference(shuffled.double(), together[:, permutation].double()) <= 16 * torch.finfo(dtype).eps
    alone, _ = tl.unroll(cell, h0[:1], xs[:, :1], Shooting(chunk=chunk))
    assert zoo.difference(alone.double(), together[:, :1].double()) <= 16 * torch.finfo(dtype).eps
