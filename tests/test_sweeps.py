"""The C sweeps against their readable twin in float64, and what happens where they cannot be built."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import zoo
from torch import Tensor

from timeloom.kernels import AdjointData, CPUSweeper, ReferenceSweeper, sweeper
from timeloom.kernels.cpu import build
from timeloom.problem import Recurrence, Segments, cut

STEPS = 13
SIZES = (1, 5, 16, 17, 33, 64)
"""Below, at and above the kernels' vector widths, and odd."""
CLOSE = 3e-5
"""Largest error against float64, relative to the largest value, over a dozen steps in float32."""

pytestmark = pytest.mark.usefixtures("one_thread")
needs_kernels = pytest.mark.skipif(build.unavailable() is not None, reason=f"no C kernels: {build.unavailable()}")


def problem_of(
    name: str, n: int, batch: int, steps: int = STEPS, resets: bool = False, regime: str = "default"
) -> Recurrence:
    """A problem in float64 whose numbers are all float32's, so that a cast loses nothing."""
    net = zoo.network(name, regime, n=n)
    x, initial = zoo.data(net, steps, batch)
    problem = net.recurrence(x.detach(), initial.detach())
    marks = torch.rand(steps, batch, generator=torch.Generator().manual_seed(4)) < 0.2 if resets else None
    return as_dtype(as_dtype(replace(problem, resets=marks), torch.float32), torch.float64)


def as_dtype(problem: Recurrence, dtype: torch.dtype) -> Recurrence:
    weights = tuple(weight.detach().to(dtype) for weight in problem.cell.weights)
    return replace(
        problem,
        cell=problem.cell.with_weights(weights),
        u=problem.u.detach().to(dtype),
        initial=problem.initial.detach().to(dtype),
    )


def ragged(steps: int, batch: int, seed: int = 0) -> Segments:
    """Every sequence cut at random places, some stretches empty, some of time left out, rows in random order."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for sequence in range(batch):
        cuts = torch.randint(0, steps + 1, (5,), generator=generator).sort().values.tolist()
        rows += [(sequence, begin, end) for begin, end in pairwise(cuts)]
        rows.append((sequence, cuts[0], cuts[0]))
    order = torch.randperm(len(rows), generator=generator)
    return Segments(*torch.tensor(rows, dtype=torch.int64)[order].t().contiguous())


def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    """Memory in which an entry that was never written is seen."""
    return torch.full(shape, torch.nan, dtype=dtype)


def buffers(problem: Recurrence) -> list[Tensor]:
    shape = (problem.steps + 1, problem.batch)
    return [poisoned(*shape, width, dtype=problem.u.dtype) for width in problem.cell.parts]


def rows_like(segments: Segments, problem: Recurrence, seed: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 0.5 * torch.randn(len(segments), problem.cell.size, generator=generator)


def assert_same(given: Tensor | None, expected: Tensor | None, what: str) -> None:
    """Equal to float32's accuracy, and NaN exactly where the other is."""
    if expected is None or given is None:
        assert given is expected, what
        return
    given = given.double()
    assert torch.equal(given.isnan(), expected.isnan()), f"{what}: written entries differ"
    finite = expected.isfinite()
    assert torch.equal(given[~finite & ~expected.isnan()], expected[~finite & ~expected.isnan()]), f"{what}: infinities"
    atol = CLOSE * max(1e-6, float(expected[finite].abs().max()) if finite.any() else 0.0)
    torch.testing.assert_close(given[finite], expected[finite], rtol=0, atol=atol, msg=lambda text: f"{what}: {text}")


def compare_forward(problem: Recurrence, segments: Segments, want_decay: bool = True) -> None:
    starts = rows_like(segments, problem)
    results = []
    for kind, one in ((CPUSweeper, as_dtype(problem, torch.float32)), (ReferenceSweeper, problem)):
        states = buffers(one)
        ends, decay = kind(one).forward(segments, starts.to(one.u.dtype), states, want_decay)
        results.append((ends, decay, *states))
    for what, given, expected in zip(("ends", "decay", "h", "c"), *results, strict=False):
        assert_same(given, expected, what)


def compare_adjoint(problem: Recurrence, segments: Segments, incoming: bool = True, want_decay: bool = True) -> None:
    generator = torch.Generator().manual_seed(6)
    states = [torch.empty_like(part) for part in buffers(problem)]
    for part, initial in zip(states, problem.initial.split(problem.cell.parts, -1), strict=True):
        part[0] = initial
    ReferenceSweeper(problem).forward(cut(problem, problem.steps), problem.initial, states)
    states = [part.float().double() for part in states]
    grads = torch.randn(*problem.u.shape[:2], problem.cell.parts[0], generator=generator) if incoming else None
    ends, results = rows_like(segments, problem), []
    for kind, one in ((CPUSweeper, as_dtype(problem, torch.float32)), (ReferenceSweeper, problem)):
        dtype = one.u.dtype
        gates = poisoned(*one.u.shape[:2], one.cell.gate_width, dtype=dtype)
        to_reset = poisoned(len(segments), one.cell.size, dtype=dtype) if one.resets is not None else None
        given = [part.to(dtype) for part in states]
        data = AdjointData(given, None if grads is None else grads.to(dtype), gates, to_reset)
        begins, decay = kind(one).adjoint(segments, ends.to(dtype), data, want_decay)
        results.append((begins, decay, gates, to_reset))
    for what, given, expected in zip(("begins", "decay", "gate_grads", "reset_grads"), *results, strict=True):
        assert_same(given, expected, what)


@needs_kernels
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("name", zoo.KERNELS)
def test_every_size(name: str, n: int) -> None:
    for batch, resets in ((1, False), (3, True), (10, True)):
        problem = problem_of(name, n, batch, resets=resets)
        compare_forward(problem, ragged(STEPS, batch))
        compare_adjoint(problem, ragged(STEPS, batch))
        compare_forward(problem, cut(problem, 4))
        compare_adjoint(problem, cut(problem, 4))


@needs_kernels
@pytest.mark.parametrize("batch", range(1, 12))
@pytest.mark.parametrize("name", zoo.KERNELS)
def test_every_number_of_rows(name: str, batch: int) -> None:
    """Tiles of rows, their halves, and single rows; more rows than a group holds."""
    problem = problem_of(name, 17, batch)
    compare_forward(problem, cut(problem, STEPS))
    compare_adjoint(problem, cut(problem, STEPS))
    compare_forward(problem, cut(problem, 1))
    compare_adjoint(problem, cut(problem, 1))


@needs_kernels
@pytest.mark.parametrize(("name", "regime"), zoo.cases(zoo.KERNELS))
def test_every_regime(name: str, regime: str) -> None:
    problem = problem_of(name, 20, 4, steps=6, regime=regime)
    compare_forward(problem, ragged(6, 4))
    compare_adjoint(problem, ragged(6, 4))


@needs_kernels
@pytest.mark.parametrize("name", zoo.KERNELS)
def test_what_is_not_asked_for_is_not_given(name: str) -> None:
    problem = problem_of(name, 9, 5, resets=True)
    segments = ragged(STEPS, 5)
    compare_forward(problem, segments, want_decay=False)
    compare_adjoint(problem, segments, incoming=False, want_decay=False)
    fast, starts = CPUSweeper(as_dtype(problem, torch.float32)), rows_like(segments, problem)
    ends, decay = fast.forward(segments, starts)
    assert decay is None
    assert torch.equal(ends, fast.forward(segments, starts, buffers(fast.problem))[0])
    assert torch.equal(starts, rows_like(segments, problem)), "the starts were overwritten"


@needs_kernels
@pytest.mark.parametrize("name", zoo.KERNELS)
def test_empty_stretches_change_nothing(name: str) -> None:
    problem = as_dtype(problem_of(name, 7, 3), torch.float32)
    segments = Segments(torch.tensor([0, 1, 2]), torch.tensor([0, 5, STEPS]), torch.tensor([0, 5, STEPS]))
    fast, states, rows = CPUSweeper(problem), buffers(problem), rows_like(segments, problem)
    ends, decay = fast.forward(segments, rows, states, True)
    assert torch.equal(ends, rows)
    assert all(bool(part.isnan().all()) for part in states)
    gates = poisoned(STEPS, 3, problem.cell.gate_width, dtype=torch.float32)
    data = AdjointData([part.zero_() for part in states], None, gates)
    begins, decay_back = fast.adjoint(segments, rows, data, want_decay=True)
    assert torch.equal(begins, rows)
    assert bool(gates.isnan().all())
    expected = ReferenceSweeper(problem).forward(segments, rows, None, True)[1]
    last = problem.cell.parts[-1]
    for one in (decay, decay_back):
        assert torch.equal(one[:, -last:], expected[:, -last:])
    none = Segments(*(torch.zeros(0, dtype=torch.int64) for _ in range(3)))
    assert fast.forward(none, rows[:0], states)[0].shape == (0, problem.cell.size)


@needs_kernels
@pytest.mark.parametrize("name", zoo.KERNELS)
def test_layout_of_memory_does_not_matter(name: str) -> None:
    """Inputs, weights and rows that are views of something else."""
    problem = as_dtype(problem_of(name, 6, 4), torch.float32)
    segments, rows = ragged(STEPS, 4), rows_like(ragged(STEPS, 4), problem)

    def shuffled(tensor: Tensor) -> Tensor:
        return tensor.t().contiguous().t() if tensor.dim() == 2 else torch.stack([tensor, tensor], -1)[..., 0]

    weights = tuple(shuffled(weight) for weight in problem.cell.weights)
    views = replace(
        problem, cell=problem.cell.with_weights(weights), u=shuffled(problem.u), initial=shuffled(problem.initial)
    )
    assert not views.u.is_contiguous()
    results = []
    for one, given in ((problem, rows), (views, shuffled(rows))):
        states, gates = buffers(one), poisoned(STEPS, 4, one.cell.gate_width, dtype=torch.float32)
        fast = CPUSweeper(one)
        ends = fast.forward(segments, given, states)[0]
        incoming = torch.ones(STEPS, 4, one.cell.parts[0])
        incoming = incoming if one is problem else torch.ones(()).expand_as(incoming)
        full = [part.nan_to_num() for part in states]
        results.append((ends, *states, fast.adjoint(segments, given, AdjointData(full, incoming, gates))[0], gates))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one.nan_to_num(), other.nan_to_num())


@needs_kernels
def test_threads_do_not_change_a_bit() -> None:
    problem = as_dtype(problem_of("gru", 24, 7), torch.float32)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            states = buffers(problem)
            segments = cut(problem, 2)
            ends, _ = CPUSweeper(problem).forward(segments, rows_like(segments, problem), states)
            results.append((ends, states[0]))
    finally:
        torch.set_num_threads(before)
    for ends, states in results[1:]:
        assert torch.equal(ends, results[0][0])
        assert torch.equal(states.nan_to_num(), results[0][1].nan_to_num())


@needs_kernels
@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize("lengths", [None, [STEPS, 0, 7]])
@pytest.mark.parametrize("lead", [1, 4, 30])
@pytest.mark.parametrize("name", zoo.KERNELS)
def test_entering_early(name: str, lead: int, lengths: list[int] | None, resets: bool) -> None:
    """One call is the warm-up and the sweep that the reference makes in two passes."""
    problem = problem_of(name, 17, 3, resets=resets)
    problem = replace(problem, lengths=None if lengths is None else torch.tensor(lengths))
    solved = [torch.zeros_like(part) for part in buffers(problem)]
    for part, initial in zip(solved, problem.initial.split(problem.cell.parts, -1), strict=True):
        part[0] = initial
    ReferenceSweeper(problem).forward(cut(problem, STEPS), problem.initial, solved)
    generator = torch.Generator().manual_seed(6)
    final = torch.randn(3, problem.cell.size, generator=generator)
    incoming = torch.randn(STEPS, 3, problem.cell.parts[0], generator=generator)
    results = []
    for kind, one in ((CPUSweeper, as_dtype(problem, torch.float32)), (ReferenceSweeper, problem)):
        dtype, states = one.u.dtype, buffers(one)
        forward = kind(one).forward_entering(cut(one, 4), lead, states, True)
        gates = poisoned(STEPS, 3, one.cell.gate_width, dtype=dtype)
        rows = cut(one, 4, backwards=True)
        to_reset = poisoned(len(rows), one.cell.size, dtype=dtype) if resets else None
        data = AdjointData([part.to(dtype) for part in solved], incoming.to(dtype), gates, to_reset)
        backward = kind(one).adjoint_entering(rows, lead, final.to(dtype), data, True)
        results.append((*forward, *states, *backward, gates, to_reset))
    for index, (given, expected) in enumerate(zip(*results, strict=True)):
        assert_same(given, expected, f"result {index}")


@needs_kernels
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["inputs", "weights", "start"])
@pytest.mark.parametrize("name", zoo.KERNELS)
def test_values_that_are_not_finite_spread_as_in_torch(name: str, where: str, value: float) -> None:
    problem = as_dtype(problem_of(name, 5, 3), torch.float32)
    rows = problem.initial.clone()
    if where == "inputs":
        problem.u[4, 1, 2] = value
    elif where == "weights":
        problem.cell.weights[0][2, 1] = value
    else:
        rows[1, 0] = value
    segments, results = cut(problem, STEPS), []
    for kind in (CPUSweeper, ReferenceSweeper):
        states = buffers(problem)
        ends = kind(problem).forward(segments, rows, states)[0]
        results.append((ends, *(part[1:] for part in states)))
    for given, expected in zip(*results, strict=True):
        assert_same(given, expected.double(), "forward")


@needs_kernels
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", zoo.KERNELS)
def test_gradients_that_are_not_finite_spread_as_in_torch(name: str, value: float) -> None:
    """They stay in their own sequence and go back in time, never forward; a relu that is off stops them."""
    net = zoo.network(name, n=16, dtype=torch.float32)
    x, initial = zoo.data(net, STEPS, 3, dtype=torch.float32)
    states, _ = zoo.truth(net, x, initial)
    incoming = torch.zeros(STEPS, 3, net.parts[0])
    incoming[6, 1, int(states[6, 1, : net.parts[0]].argmax())] = value
    expected = torch.autograd.grad(states[..., : net.parts[0]], (x, initial), incoming)
    problem = as_dtype(net.recurrence(x, initial), torch.float32)
    before = torch.cat([initial.unsqueeze(0), states]).detach().split(net.parts, -1)
    gates = poisoned(STEPS, 3, problem.cell.gate_width, dtype=torch.float32)
    data = AdjointData([part.contiguous() for part in before], incoming, gates)
    begins, _ = CPUSweeper(problem).adjoint(cut(problem, STEPS), torch.zeros(3, net.size), data)
    d_x = problem.cell.input_grads(gates) @ net.parameters["weight_ih_l0"].detach()
    for given, wanted in ((d_x, expected[0]), (begins, expected[1])):
        assert torch.equal(given.isfinite(), wanted.isfinite())
    assert bool(gates[7:].isfinite().all())
    assert bool(gates[:, [0, 2]].isfinite().all())
    assert not bool(expected[1][1].isfinite().all())


def test_large_arguments_saturate() -> None:
    """Gates at ±1e4 and ±1e30 give torch's limits, not an overflow."""
    if build.unavailable() is not None:
        pytest.skip("no C kernels")
    for name in zoo.KERNELS:
        problem = as_dtype(problem_of(name, 8, 2), torch.float32)
        scale = torch.tensor([1e4, -1e4, 1e30, -1e30, 80.0, -80.0, 100.0, -100.0])
        problem.u.copy_(problem.u.sign() * scale.repeat(problem.u.shape[-1] // 8))
        compare_forward(as_dtype(problem, torch.float64), cut(problem, STEPS if name != "rnn relu" else 1))


def test_reference_forward_is_the_plain_loop() -> None:
    """The twin itself, on stretches that together are all of time, against torch's own steps."""
    for name in zoo.ZOO:
        net = zoo.network(name)
        x, initial = zoo.data(net, STEPS, 3)
        problem = net.recurrence(x, initial)
        states, _ = zoo.truth(net, x, initial)
        with torch.no_grad():
            whole = [poisoned(STEPS + 1, 3, width, dtype=torch.float64) for width in net.parts]
            ends, _ = ReferenceSweeper(problem).forward(cut(problem, STEPS), initial, whole)
            assert zoo.difference(ends, states[-1]) < 1e-13
            assert zoo.difference(torch.cat(whole, -1)[1:], states) < 1e-13
            starts = torch.cat([initial.unsqueeze(0), states])[[0, 5, 10]].flatten(0, 1)
            pieces = [poisoned(STEPS + 1, 3, width, dtype=torch.float64) for width in net.parts]
            ReferenceSweeper(problem).forward(cut(problem, 5), starts, pieces)
            assert zoo.difference(torch.cat(pieces, -1)[1:], states) < 1e-13


@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize("name", ["gru", "lstm projected", "function of tuple", "elementwise"])
def test_reference_transfer_is_the_derivative_of_ends_by_starts(name: str, resets: bool) -> None:
    net = zoo.network(name)
    x, initial = zoo.data(net, STEPS, 2)
    marks = torch.zeros(STEPS, 2, dtype=torch.bool)
    marks[4, 0] = True
    problem = net.recurrence(x.detach(), initial.detach())
    problem = replace(problem, resets=marks if resets else None)
    reference = ReferenceSweeper(problem)
    states = [torch.zeros(STEPS + 1, 2, width, dtype=torch.float64) for width in net.parts]
    for part, start in zip(states, problem.initial.split(net.parts, -1), strict=True):
        part[0] = start
    with torch.no_grad():
        reference.forward(cut(problem, STEPS), problem.initial, states)
        segments = Segments(torch.tensor([0, 1, 0, 1]), torch.tensor([2, 2, 7, 13]), torch.tensor([6, 5, 13, 13]))
        transfer = reference.transfer(segments, states)
    state = torch.cat(states, -1)
    for row, (b, begin, end) in enumerate(zip(*(column.tolist() for column in segments.columns), strict=True)):

        def end_of(start: Tensor, b: int = b, begin: int = begin, end: int = end) -> Tensor:
            for t in range(begin, end):
                start = problem.initial[b] if resets and marks[t, b] else start
                start = net.step(start[None], x[t, b][None])[0]
            return start

        expected = torch.autograd.functional.jacobian(end_of, state[begin, b])
        torch.testing.assert_close(transfer[row], expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["gru", "lstm", "function of tuple"])
def test_entering_early_is_a_run_from_the_initial_state(name: str) -> None:
    """Starts come from the steps before a stretch, or all of them where there are fewer; the rest is a plain sweep."""
    net = zoo.network(name)
    x, initial = zoo.data(net, STEPS, 2)
    problem = net.recurrence(x.detach(), initial.detach())
    reference, segments = ReferenceSweeper(problem), cut(problem, 4)
    with torch.no_grad():
        states, expected = buffers(problem), buffers(problem)
        starts, ends, decay = reference.forward_entering(segments, 3, states, True)
        for row, (b, begin, _) in enumerate(zip(*(column.tolist() for column in segments.columns), strict=True)):
            start, early = problem.initial[b : b + 1], max(0, begin - 3)
            for t in range(early, begin):
                start = net.step(start, x[t, b : b + 1])
            torch.testing.assert_close(starts[row], start[0])
        plain_ends, plain_decay = reference.forward(segments, starts, expected, True)
    for given, wanted in ((ends, plain_ends), (decay, plain_decay), *zip(states, expected, strict=True)):
        assert torch.equal(given.nan_to_num(), wanted.nan_to_num())


@pytest.mark.parametrize("lengths", [None, [STEPS, 6, 0]])
@pytest.mark.parametrize("name", ["gru", "lstm"])
def test_entering_late_is_a_run_back_from_zero_or_from_the_end(name: str, lengths: list[int] | None) -> None:
    net = zoo.network(name)
    x, initial = zoo.data(net, STEPS, 3)
    problem = net.recurrence(x.detach(), initial.detach())
    problem = replace(problem, lengths=None if lengths is None else torch.tensor(lengths))
    ends_of = [STEPS] * 3 if lengths is None else lengths
    reference, segments = ReferenceSweeper(problem), cut(problem, 4, backwards=True)
    states = [part.nan_to_num() for part in buffers(problem)]
    incoming = torch.randn(STEPS, 3, net.parts[0], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    final = torch.ones(3, net.size, dtype=torch.float64)
    with torch.no_grad():
        reference.forward(cut(problem, STEPS), problem.initial, states)
        gates = poisoned(STEPS, 3, problem.cell.gate_width, dtype=torch.float64)
        data = AdjointData(states, incoming, gates)
        ends, begins, _ = reference.adjoint_entering(segments, 3, final, data, False)
        data = AdjointData(states, incoming)
        for row, (b, begin, end) in enumerate(zip(*(column.tolist() for column in segments.columns), strict=True)):
            late = min(end + 3, ends_of[b])
            grad = final[b] if late == ends_of[b] else torch.zeros_like(final[b])
            back = Segments(*(torch.tensor([value]) for value in (b, end, late)))
            entry, _ = reference.adjoint(back, grad[None], data)
            torch.testing.assert_close(ends[row], entry[0])
            span = Segments(*(torch.tensor([value]) for value in (b, begin, end)))
            torch.testing.assert_close(begins[row], reference.adjoint(span, entry, data)[0][0])
    inside = torch.arange(STEPS)[:, None] < torch.tensor(ends_of)
    assert torch.equal(~gates.isnan().any(-1), inside)


def test_the_fastest_sweeper_is_chosen() -> None:
    single = as_dtype(problem_of("gru", 4, 2), torch.float32)
    assert type(sweeper(problem_of("gru", 4, 2))) is ReferenceSweeper
    assert type(sweeper(as_dtype(problem_of("lstm projected", 4, 2), torch.float32))) is ReferenceSweeper
    expected = CPUSweeper if build.unavailable() is None else ReferenceSweeper
    assert type(sweeper(single)) is expected


RUN = """
import torch, timeloom as tl
from timeloom.kernels.cpu import build
torch.manual_seed(0)
torch.set_num_threads(1)
gru = tl.GRU(3, 10, solver=tl.solvers.Shooting(chunk=8))
x = torch.randn(50, 2, 3)
y, h = gru(x)
y.sum().backward()
y, h = gru(x)
print(repr(build.unavailable()))
print(y.detach().double().sum().item(), gru.weight_hh_l0.grad.abs().sum().item(), gru.reports[0].converged)
"""


@functools.cache
def quick_compiler() -> str:
    """The usual one, told not to optimize: here kernels must be built, not be fast."""
    script = Path(tempfile.mkdtemp()) / "quick-cc"
    script.write_text('#!/usr/bin/env bash\nexec cc "${@/#-O3/-O0}"\n')
    script.chmod(0o755)
    atexit.register(shutil.rmtree, script.parent, ignore_errors=True)
    return str(script)


def run_apart(cache: Path, **environment: str) -> tuple[str, list[float]]:
    """A process of its own, with a cache of its own: why it has no kernels, and what it computed."""
    root = Path(__file__).parents[1]
    fixed = {"PYTHONPATH": str(root / "src"), "TIMELOOM_CACHE": str(cache), "TIMELOOM_NATIVE": "1"}
    fixed |= {"CC": quick_compiler()} if shutil.which("cc") else {}
    command = [sys.executable, "-W", "error", "-W", "default::RuntimeWarning", "-c", RUN]
    with tempfile.TemporaryDirectory() as home:  # the user's own cache may hold these kernels already
        elsewhere = {"HOME": home, "XDG_CACHE_HOME": home, "TMPDIR": home}
        variables = {**os.environ, **elsewhere, **fixed, **environment}
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    why, numbers = done.stdout.strip().splitlines()
    lacking = why != "None" and "switched off" not in why
    assert done.stderr.count("timeloom: no compiled kernels on this CPU") == lacking  # told once
    *values, converged = numbers.split()
    assert converged == "True"
    return why, [float(value) for value in values]


Built = tuple[Path, list[tuple[str, list[float]]]]


@pytest.fixture(scope="module")
def built_at_once(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """A cache that two processes have filled at the same time, and what each of them found."""
    cache = tmp_path_factory.mktemp("cache")
    quick_compiler()  # one for both: two threads would make two of it, and kernels are kept by their compiler
    with ThreadPoolExecutor(2) as pool:
        return cache, list(pool.map(run_apart, [cache, cache]))


def test_without_kernels_results_are_the_same(tmp_path: Path, built_at_once: Built) -> None:
    """Switched off, no working compiler, or a compiler that fails: sweeps run in torch; it is tried only once."""
    failing = tmp_path / "failing-cc"
    calls = tmp_path / "calls"
    failing.write_text(f'#!/bin/sh\necho "$@" >> {calls}\necho no such thing >&2\nexit 1\n')
    failing.chmod(0o755)
    (_, built), _ = built_at_once[1]
    off = run_apart(tmp_path / "b", TIMELOOM_NATIVE="0")
    failed = run_apart(tmp_path / "c", CC=str(failing))
    assert "TIMELOOM_NATIVE=0" in off[0]
    assert "no such thing" in failed[0]
    builds = [line for line in calls.read_text().splitlines() if "--version" not in line]
    assert len(builds) == 1, "a compiler that failed was called again"
    assert not list((tmp_path / "c").rglob("*.so")), "a failed build left a file"
    assert off[1] == pytest.approx(built, rel=1e-5)
    assert failed[1] == pytest.approx(built, rel=1e-5)


@needs_kernels
def test_two_processes_may_build_at_once(built_at_once: Built) -> None:
    cache, results = built_at_once
    assert [why for why, _ in results] == ["None", "None"]
    assert results[0][1] == results[1][1]
    assert len(list(cache.rglob("*"))) == 3, "one directory, the library and that of the step are left"


@needs_kernels
def test_a_damaged_library_is_built_anew(tmp_path: Path, built_at_once: Built) -> None:
    filled, ((_, before), _) = built_at_once
    shutil.copytree(filled, tmp_path, dirs_exist_ok=True)
    libraries = list(tmp_path.rglob("*.so"))
    assert len(libraries) == 2
    for library in libraries:
        library.write_bytes(b"not a library")
    assert run_apart(tmp_path) == ("None", before)
    built = list(tmp_path.rglob("*.so"))
    assert len(built) == 2
    assert all(library.read_bytes() != b"not a library" for library in built)
