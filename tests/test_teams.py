"""Threads that share the units of a row compute what one thread does, to the bit, however many they are."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import zoo
from hypothesis import given
from hypothesis import strategies as st
from random_cells import RandomCell
from test_compile_step import at_once, problem_of  # noqa: F401
from test_fused_sums import problem as own_problem
from test_sweeps import as_dtype, buffers, needs_kernels, poisoned, ragged, rows_like
from test_sweeps import problem_of as layer_problem
from torch import Tensor

import timeloom as tl
from timeloom.kernels import AdjointData, sweeper
from timeloom.kernels.cpu import build, texts
from timeloom.kernels.cpu import launch as launch_file
from timeloom.kernels.cpu.teams import CACHED, MOST_TEAMS, TOGETHER, WORTH_SHARING, Team, team_of
from timeloom.problem import Recurrence, Segments, cut

THREADS = (2, 3, 5)
STEPS = 13


@given(rows=st.integers(1, 5000), threads=st.integers(1, 200), work=st.integers(0, 10**7))
def test_no_more_threads_than_there_are(rows: int, threads: int, work: int) -> None:
    together, members = team_of(rows, threads, work)
    if members == 1:
        assert together == -(-rows // threads)
        return
    teams = -(-rows // together)
    assert 1 < members <= threads // teams
    assert together <= min(rows, TOGETHER)
    assert teams <= MOST_TEAMS
    assert teams * members >= min(rows, threads)
    assert work * together >= members * WORTH_SHARING


def test_rows_that_fill_all_threads_are_cut_among_them() -> None:
    assert team_of(2, 2, CACHED - 1) == Team(1, 1)
    assert team_of(2, 2, CACHED) == Team(2, 2)
    assert team_of(16, 2, 10**7) == Team(8, 1)
    assert team_of(1, 16, 10 * WORTH_SHARING) == Team(1, 10)
    assert team_of(1, 16, WORTH_SHARING) == Team(1, 1)
    assert team_of(1, 16, 0) == Team(1, 1)


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch, threads_as_before: None) -> None:
    """All threads that there are share a group of rows, however little work it is."""

    def team(rows: int, threads: int, work: int) -> Team:
        together = min(rows, TOGETHER)
        members = threads // -(-rows // together)
        return Team(together, members) if work and members > 1 else Team(-(-rows // threads), 1)

    monkeypatch.setattr(launch_file, "team_of", team)


def swept(problem: Recurrence, segments: Segments, lead: int) -> list[Tensor]:
    """All that sweeps in both directions find, in memory that shows what was not written."""
    kernels, rows = sweeper(problem), rows_like(segments, problem).to(problem.u.dtype)
    states = buffers(problem)
    found = list(kernels.forward(segments, rows, states, want_decay=True)) + states
    states = buffers(problem)
    for part, initial in zip(states, problem.initial.split(problem.cell.parts, -1), strict=True):
        part[0] = initial
    kernels.forward(cut(problem, problem.steps), problem.initial, states)
    found += kernels.forward_entering(segments, lead, buffers(problem), want_decay=True)
    torch.manual_seed(1)
    incoming = torch.randn(*problem.u.shape[:2], problem.cell.parts[0], dtype=problem.u.dtype)
    for entering in (False, True):
        gates = poisoned(*problem.u.shape[:2], problem.cell.gate_width, dtype=problem.u.dtype)
        resets = poisoned(len(segments), problem.cell.size, dtype=problem.u.dtype)
        data = AdjointData(states, incoming, gates, resets if problem.resets is not None else None)
        if entering:
            found += kernels.adjoint_entering(segments, lead, problem.initial, data, want_decay=True)
        else:
            found += kernels.adjoint(segments, rows, data, want_decay=True)
        found += [gates, resets]
    return [tensor for tensor in found if tensor is not None]


def assert_same_bits(problem: Recurrence, segments: Segments, threads: int) -> None:
    for lead in (1, 4):
        torch.set_num_threads(1)
        alone = swept(problem, segments, lead)
        torch.set_num_threads(threads)
        for index, (one, other) in enumerate(zip(swept(problem, segments, lead), alone, strict=True)):
            assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0)), index


@needs_kernels
@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("name", zoo.KERNELS)
def test_torchs_cells(name: str, threads: int) -> None:
    for n, batch, resets in ((1, 1, False), (17, 1, True), (70, 1, False), (70, 2, True), (33, 3, True)):
        problem = as_dtype(layer_problem(name, n, batch, resets=resets), torch.float32)
        assert_same_bits(problem, cut(problem, STEPS), threads)
        assert_same_bits(problem, ragged(STEPS, batch), threads)


@needs_kernels
@pytest.mark.usefixtures("at_once", "shared")
@pytest.mark.parametrize("seed", range(12))
def test_random_cells(seed: int) -> None:
    torch.manual_seed(seed)
    problem = problem_of(RandomCell(seed).double(), steps=STEPS, batch=1 + seed % 3)
    assert_same_bits(problem, cut(problem, STEPS), 3)
    assert_same_bits(problem, ragged(STEPS, problem.batch), 3)


@needs_kernels
@pytest.mark.usefixtures("at_once", "shared")
@pytest.mark.parametrize("name", ["LayerNormGRU", "LayerNormLSTM", "SLSTM", "BlockGRU"])
@pytest.mark.parametrize("threads", THREADS)
def test_cells_that_sum_up_a_row(name: str, threads: int) -> None:
    for ragged_ones in (False, True):
        problem = own_problem(name, 40, ragged_ones)
        segments = cut(problem, 30)
        assert_same_bits(problem, segments, threads)
        assert_same_bits(problem, Segments(*(column[:3] for column in segments.columns)), threads)


@needs_kernels
@pytest.mark.usefixtures("threads_as_before")
@pytest.mark.parametrize("name", zoo.KERNELS)
def test_a_row_of_its_own_thread_is_summed_as_a_lone_one(name: str) -> None:
    """In several sums, none of which waits for the others: by one, calls without gradients take twice the time."""
    torch.set_num_threads(2)
    problem = as_dtype(layer_problem(name, 33, 2), torch.float32)
    kernels = sweeper(problem)
    both, _ = kernels.forward(cut(problem, problem.steps), problem.initial, None)
    for row in range(2):
        one = replace(problem, u=problem.u[:, row : row + 1].contiguous(), initial=problem.initial[row : row + 1])
        end, _ = sweeper(one).forward(cut(one, one.steps), one.initial, None)
        assert torch.equal(end[0], both[row])


def gradients(layer: torch.nn.Module, x: Tensor) -> list[Tensor]:
    layer.zero_grad()
    x = x.clone().requires_grad_()
    y, _ = layer(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(parameter.grad for parameter in layer.parameters())]  # type: ignore[list-item]


@needs_kernels
@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize("kind", ["GRU", "LSTM", "RNN"])
def test_whole_layers_sum_what_one_thread_does(kind: str) -> None:
    torch.manual_seed(0)
    layer = getattr(tl, kind)(9, 50, solver=tl.solvers.Shooting(chunk=2**40, warmup=0))
    for steps in (1, 63, 200):
        x = torch.randn(steps, 1, 9)
        torch.set_num_threads(1)
        alone = gradients(layer, x)
        torch.set_num_threads(4)
        for one, other in zip(gradients(layer, x), alone, strict=True):
            assert torch.equal(one, other)


@needs_kernels
@pytest.mark.usefixtures("shared")
def test_a_team_that_is_given_up_finds_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that never looks at the others before it takes them for late, and grants no time for that."""
    problem = as_dtype(layer_problem("gru", 70, 2, resets=True), torch.float32)
    text = texts.source(texts.KERNELS["gru"]).text
    hasty = build._library("step", text, ("-DAWAKE=1", "-DGRACE=-1e18"))
    torch.set_num_threads(1)
    alone = swept(problem, cut(problem, STEPS), 4)
    for symbol in ("timeloom_gru_forward", "timeloom_gru_adjoint"):
        monkeypatch.setattr(build.library(), symbol, getattr(hasty, symbol), raising=False)
    torch.set_num_threads(4)
    for one, other in zip(swept(problem, cut(problem, STEPS), 4), alone, strict=True):
        assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))
