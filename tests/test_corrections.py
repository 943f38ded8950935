"""Corrections between diag and newton: transfers of a few directions, learned from the sweeps or swept beside them."""

from __future__ import annotations

import pytest
import torch
import zoo
from torch import Tensor

import timeloom as tl
from timeloom.auto.experience import Experience
from timeloom.kernels import ReferenceSweeper
from timeloom.scan import linear_scan
from timeloom.solve.backward import solve_backwards
from timeloom.solve.boundaries import before_each
from timeloom.solve.chain import Chain
from timeloom.solve.forward import forward_chain, solve_states
from timeloom.solve.lowrank import Basis, LowRank
from timeloom.solve.secant import MOST_PAIRS, Secants
from timeloom.solvers import Shooting

pytestmark = pytest.mark.usefixtures("one_thread")

NEW = ("secant", "lowrank")
HARD = ("default", "gate+4", "weights×4", "weights×8")


# ---- against the plain loop -------------------------------------------------------------------------------------


@pytest.mark.parametrize("correction", NEW)
@pytest.mark.parametrize(("name", "regime"), [case for case in zoo.cases() if case[1] in HARD])
def test_states_and_gradients_are_the_plain_loops(name: str, regime: str, correction: str) -> None:
    net = zoo.network(name, regime)
    x, initial = zoo.data(net, 17, 3)
    for chunk in (1, 3, 16):
        solver = Shooting(chunk=chunk, correction=correction, rank=2)
        close = {"weights×8": 1e-7, "weights×4": 1e-9}.get(regime, 1e-11)
        report = zoo.check_against_truth(net, x, initial, solver, close).report
        assert report.converged
        assert report.backward.converged


@pytest.mark.parametrize("correction", NEW)
@pytest.mark.parametrize("name", ["gru", "lstm projected", "function of tuple"])
def test_lengths_and_resets(name: str, correction: str) -> None:
    net = zoo.network(name, "gate+4")
    x, initial = zoo.data(net, 17, 5)
    lengths, resets = zoo.marks(17)
    for chunk in (1, 3):
        solver = Shooting(chunk=chunk, correction=correction)
        zoo.check_against_truth(net, x, initial, solver, 1e-11, lengths=lengths, resets=resets)


@pytest.mark.parametrize("correction", NEW)
def test_values_that_are_not_finite_spoil_nothing_else(correction: str) -> None:
    net = zoo.network("gru", dtype=torch.float32)
    x, initial = zoo.data(net, 40, 3, dtype=torch.float32)
    with torch.no_grad():
        x[21, 1, 0] = torch.nan
    solution = zoo.solve(net, x, initial, Shooting(chunk=4, correction=correction, warmup=0))
    states, _ = zoo.truth(net, x, initial)
    assert torch.equal(solution.outputs.isfinite(), states.isfinite())
    finite = states.isfinite()
    assert zoo.difference(solution.outputs[finite], states[finite]) < 1e-5


# ---- how many sweeps --------------------------------------------------------------------------------------------


def sweeps(net: zoo.Network, x: Tensor, initial: Tensor, correction: str, **options: object) -> tuple[int, int]:
    """Forward and backward."""
    solver = Shooting(correction=correction, tol=1e-6, max_iters=60, **options)  # type: ignore[arg-type]
    solution = zoo.solve(net, x, initial, solver)
    solution.outputs.sum().backward()
    report = solution.report
    assert not report.fell_back, correction
    assert not report.backward.fell_back, correction
    assert report.solver == f"shooting[{correction}]"
    return report.iterations, report.backward.iterations


@pytest.mark.parametrize(("name", "regime"), [("gru", "weights×4"), ("lstm", "gate+4"), ("rnn tanh", "weights×2")])
def test_the_more_is_known_of_a_link_the_fewer_sweeps(name: str, regime: str) -> None:
    """On networks that remember by more than their decay: each is better than the last, or as good."""
    net = zoo.network(name, regime, n=12)
    x, initial = zoo.data(net, 256, 2)
    counts = [
        sweeps(net, x, initial, correction, chunk=8) for correction in ("none", "diag", "secant", "lowrank", "newton")
    ]
    for direction in (0, 1):
        found = [count[direction] for count in counts]
        assert found == sorted(found, reverse=True), (direction, found)
        assert found[2] < found[1], (direction, found)
        assert found[4] <= found[2] - 2, (direction, found)


def test_a_higher_rank_is_closer_to_newton() -> None:
    net = zoo.network("gru", "weights×4", n=12)
    x, initial = zoo.data(net, 256, 2)
    by_rank = [sweeps(net, x, initial, "lowrank", chunk=8, rank=rank) for rank in (1, 4, 12)]
    assert by_rank == sorted(by_rank, reverse=True)
    assert by_rank[0] > by_rank[-1]
    newton = sweeps(net, x, initial, "newton", chunk=8)
    assert abs(by_rank[-1][0] - newton[0]) <= 1, "all directions are the whole transfer"
    assert by_rank[-1][1] == newton[1] == 2, "the adjoint is linear: one correction is exact"


def test_secants_make_gradients_exact_once_they_span_the_state() -> None:
    """Of 3 units, 3 changes tell all of a linear chain: here of a rotation, of which the decay knows nothing."""
    turn = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64))[0]

    def cell(h: Tensor, x: Tensor) -> Tensor:
        return 0.99 * h @ turn.t() + x

    def recurrence(x: Tensor, initial: Tensor) -> zoo.Recurrence:
        return zoo.Recurrence(zoo.GenericCell(cell, initial, (3,)), x, initial)

    net = zoo.Network((3,), {}, recurrence, cell)
    x, initial = zoo.data(net, 200, 2)
    found = {}
    for correction in ("none", "secant"):
        solver = Shooting(chunk=4, correction=correction, warmup=0, tol=1e-12, max_iters=60)  # type: ignore[arg-type]
        found[correction] = zoo.check_against_truth(net, x, initial, solver, 1e-10).report.backward.iterations
    assert found["none"] == 50, "every sweep makes one chunk exact"
    assert found["secant"] <= 8


@pytest.mark.parametrize("correction", NEW)
def test_never_more_sweeps_than_chunks(correction: str) -> None:
    for name in ("gru", "lstm", "rnn tanh", "function"):
        net = zoo.network(name, "weights×8", n=8)
        x, initial = zoo.data(net, 40, 3)
        report = zoo.solve(net, x, initial, Shooting(chunk=8, correction=correction)).report
        assert report.iterations <= 5
        assert not report.fell_back


def test_a_cell_whose_decay_is_dear_is_not_asked_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    net = zoo.network("function", "gate+4")
    x, initial = zoo.data(net, 64, 2)

    def refuse(*_: object) -> Tensor:
        raise AssertionError("a dense Jacobian at every step")

    monkeypatch.setattr(zoo.GenericCell, "decay", refuse)
    for correction in NEW:
        report = zoo.solve(net, x, initial, Shooting(chunk=4, correction=correction, tol=1e-9)).report
        assert report.converged


@pytest.mark.parametrize("given", [0, -1, 2.5, "8", True])
def test_ranks_that_cannot_be_meant(given: object) -> None:
    with pytest.raises(ValueError, match=r"rank must be a whole number ≥ 1"):
        Shooting(correction="lowrank", rank=given)  # type: ignore[arg-type]


# ---- the models -------------------------------------------------------------------------------------------------


def low_rank(links: int = 9, batch: int = 2, size: int = 6, rank: int = 3) -> LowRank:
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(links, batch, size, *more, generator=generator) for more in ((), (rank,), (rank,))]
    return LowRank(*(0.5 * part.double() for part in parts))


def test_low_rank_transfers_carry_as_their_matrices_do() -> None:
    model = low_rank()
    jumps = torch.randn(9, 2, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = linear_scan(before_each(model.dense()), jumps)
    for carry in (model.carry, model.in_order, model.scan):
        assert zoo.difference(carry(jumps), expected) < 1e-13
    assert zoo.difference(model.apply(jumps), (model.dense() @ jumps.unsqueeze(-1)).squeeze(-1)) < 1e-14


def test_a_basis_maps_what_it_was_told_and_the_rest_by_the_decay() -> None:
    generator = torch.Generator().manual_seed(0)
    decay, *changes = (torch.randn(4, 2, 6, generator=generator, dtype=torch.float64) for _ in range(4))
    matrix = torch.randn(4, 2, 6, 6, generator=generator, dtype=torch.float64)
    basis, least = Basis(decay, 5), torch.zeros(4, 2, dtype=torch.float64)
    for change in (*changes, 2 * changes[0], changes[1] + 1e-6 * changes[2]):  # the last two tell nothing new
        basis.add(change, (matrix @ change.unsqueeze(-1)).squeeze(-1), least)
    model = basis.over(decay)
    for change in changes:
        assert zoo.difference(model.apply(change), (matrix @ change.unsqueeze(-1)).squeeze(-1)) < 1e-12
    q = basis.directions
    assert zoo.difference(q.transpose(-1, -2) @ q, torch.diag_embed(torch.tensor([1.0, 1, 1, 0, 0])).double()) < 1e-12
    across = torch.randn(4, 2, 6, 1, generator=generator, dtype=torch.float64)
    across = (across - q @ (q.transpose(-1, -2) @ across)).squeeze(-1)
    assert zoo.difference(model.apply(across), decay * across) < 1e-12


def note(secants: Secants, starts: Tensor, ends: Tensor, decay: Tensor) -> None:
    """A sweep around a state of 10: changes of 1 are small beside it."""
    secants.note(10 + starts, ends, decay)


def test_pairs_that_foretell_worse_than_the_decay_are_forgotten() -> None:
    decay, secants = torch.full((1, 1, 3), 0.5), Secants()
    note(secants, torch.zeros(1, 1, 3), torch.zeros(1, 1, 3), decay)
    note(secants, torch.tensor([[[1.0, 0, 0]]]), torch.tensor([[[5.0, 0, 0]]]), decay)  # far from the decay's 0.5
    along = torch.tensor([[[1.0, 0, 0]]])
    assert zoo.difference(secants.model(decay).apply(along), 5 * along) < 1e-5
    note(secants, torch.tensor([[[2.0, 1.0, 0]]]), torch.tensor([[[5.5, 0.5, 0]]]), decay)  # as the decay says
    assert zoo.difference(secants.model(decay).apply(along), 0.5 * along) < 1e-5
    for _ in range(2 * MOST_PAIRS):
        note(secants, torch.randn(1, 1, 3), torch.randn(1, 1, 3), decay)
    assert secants.model(decay).left.shape[-1] == MOST_PAIRS


@pytest.mark.parametrize("linear", [False, True])
def test_large_changes_tell_nothing_of_small_ones_unless_all_is_linear(linear: bool) -> None:
    decay, secants = torch.full((1, 1, 3), 0.5), Secants(linear)
    secants.note(torch.zeros(1, 1, 3), torch.zeros(1, 1, 3), decay)
    secants.note(torch.ones(1, 1, 3), 3 * torch.ones(1, 1, 3), decay)
    found = secants.model(decay).apply(torch.ones(1, 1, 3))
    assert zoo.difference(found, torch.full((1, 1, 3), 3.0 if linear else 0.5)) < 1e-5


def test_a_sequence_that_got_worse_begins_anew() -> None:
    """By the mean of the jumps' logarithms; the sequence beside it keeps what it knows."""
    decay, secants = torch.full((1, 2, 3), 0.5), Secants()
    note(secants, torch.zeros(1, 2, 3), torch.zeros(1, 2, 3), decay)
    secants.doubt(torch.tensor([[1e-2, 1e-2]]), 1e-6)
    note(secants, torch.ones(1, 2, 3), 3 * torch.ones(1, 2, 3), decay)
    secants.doubt(torch.tensor([[1e-3, 1e-1]]), 1e-6)
    images = secants.model(decay).apply(torch.ones(1, 2, 3))
    assert zoo.difference(images[0, 0], torch.full((3,), 3.0)) < 1e-5
    assert zoo.difference(images[0, 1], torch.full((3,), 0.5)) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("correction", NEW)
def test_states_in_half_precision(correction: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    cell = torch.nn.GRUCell(3, 6)
    x, initial = torch.randn(40, 2, 3), torch.randn(2, 6)
    expected, _ = tl.unroll(lambda h, x: cell(x, h), initial, x, solver="sequential")
    halved = cell.to(dtype)
    solver = Shooting(chunk=4, correction=correction, warmup=0)
    found, report = tl.unroll(lambda h, x: halved(x, h), initial.to(dtype), x.to(dtype), solver=solver)
    assert len(report.residuals) > 1
    assert zoo.difference(found.float(), expected) < 8 * torch.finfo(dtype).eps


@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-6), (torch.float32, 2e-2)])
@pytest.mark.parametrize("name", ["gru", "lstm", "function"])
def test_tangents_are_the_dense_transfers_directions(name: str, dtype: torch.dtype, close: float) -> None:
    """Forward by differences, as precise as these are; backward exactly, and without the loss's own gradient."""
    net = zoo.network(name, "gate+4", n=6, dtype=dtype)
    x, initial = zoo.data(net, 20, 2, dtype=dtype)
    problem = net.recurrence(x, initial).detach()
    plan = Shooting(chunk=5, correction="lowrank", tol=1e-9 if dtype == torch.float64 else 1e-6).plan(
        problem, Experience()
    )
    with torch.no_grad():
        states, _ = solve_states(problem, plan, ReferenceSweeper(problem))
        chain = forward_chain(problem, plan, ReferenceSweeper(problem), [part.clone() for part in states])
        _compare_tangents(chain, torch.cat([torch.cat(states, -1)[:-1:5]]).flatten(0, 1), close)
        incoming = torch.randn(states[0][1:].shape, dtype=dtype)

        def drive(back: Chain) -> None:
            _compare_tangents(back, torch.randn(len(back.segments), problem.cell.size, dtype=dtype), 1e-5)

        solve_backwards(problem, states, plan, incoming, torch.zeros_like(problem.initial), drive)


def _compare_tangents(chain: Chain, starts: Tensor, close: float) -> None:
    directions = torch.randn(len(starts), starts.shape[1], 3, dtype=starts.dtype)
    ends, _ = chain.sweep(chain.segments, starts, torch.arange(len(starts)), False)
    expected = chain.transfer(chain.segments, starts) @ directions
    found = chain.tangent(directions, starts, ends, torch.ones_like(starts))
    assert zoo.difference(found, expected) < close


def test_rows_beside_each_other_are_swept_in_groups_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    net = zoo.network("gru", "gate+4", n=6)
    x, initial = zoo.data(net, 40, 2)
    solver = Shooting(chunk=5, correction="lowrank", rank=4)
    at_once = zoo.solve(net, x, initial, solver)
    monkeypatch.setattr("timeloom.solve.tangents.MOST_COPIED", 1)
    one_by_one = zoo.solve(net, x, initial, solver)
    assert zoo.difference(one_by_one.outputs, at_once.outputs) < 1e-13
    assert one_by_one.report.iterations == at_once.report.iterations
