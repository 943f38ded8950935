"""Multiple shooting against the plain loop in float64: states, gradients, and reports that tell the truth."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import zoo
from torch import Tensor

import timeloom as tl
from timeloom.cells import GenericCell
from timeloom.kernels import ReferenceSweeper
from timeloom.kernels.cpu import build
from timeloom.solve.plan import MOST_SWEEPS
from timeloom.solve.tolerance import ADJOINT_TOLERANCE, TOLERANCE
from timeloom.solvers import Shooting

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS, BATCH = 17, 3
CHUNKS = (1, 3, 7, 16, STEPS)
"""Single steps, ragged in three ways, and one chunk."""
CORRECTIONS = ("none", "diag", "newton", "auto")


def accuracy(regime: str) -> float:
    """What rounding may come to over a run in float64; the strongest weights make some networks chaotic."""
    return {"weights×8": 1e-7, "weights×4": 1e-9}.get(regime, 1e-11)


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize(("name", "regime"), zoo.cases())
def test_states_and_gradients_are_the_plain_loops(name: str, regime: str, correction: str) -> None:
    net = zoo.network(name, regime)
    x, initial = zoo.data(net, STEPS, BATCH)
    for chunk in CHUNKS:
        solution = zoo.check_against_truth(
            net, x, initial, Shooting(chunk=chunk, correction=correction), accuracy(regime)
        )
        report = solution.report
        assert report.converged
        assert report.backward is not None
        assert report.backward.converged


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("name", zoo.ZOO)
def test_lengths_and_resets(name: str, correction: str) -> None:
    """Sequences of no step, of one, of some and of all; states put back to the initial one, at chunk edges too."""
    net = zoo.network(name)
    x, initial = zoo.data(net, STEPS, 5)
    lengths, resets = zoo.marks(STEPS)
    for chunk in (1, 3, STEPS):
        solver = Shooting(chunk=chunk, correction=correction)
        zoo.check_against_truth(net, x, initial, solver, 1e-11, lengths=lengths, resets=resets)
        zoo.check_against_truth(net, x, initial, solver, 1e-11, lengths=lengths)
        zoo.check_against_truth(net, x, initial, solver, 1e-11, resets=resets)


@pytest.mark.parametrize("warmup", [0, 1, 5, 1000])
def test_warmup_guesses_and_changes_nothing_else(warmup: int) -> None:
    net = zoo.network("gru")
    x, initial = zoo.data(net, 40, 2)
    report = zoo.check_against_truth(net, x, initial, Shooting(chunk=8, warmup=warmup), 1e-12).report
    assert report.warmup == min(warmup, 8)


def test_a_longer_warmup_guesses_better() -> None:
    net = zoo.network("gru")
    x, initial = zoo.data(net, 64, 2)
    first = [zoo.solve(net, x, initial, Shooting(chunk=16, warmup=w)).report.residuals[0] for w in (0, 4, 8, 16)]
    assert first == sorted(first, reverse=True)
    assert first[-1] < 0.05 * first[0]


# ---- reports ----------------------------------------------------------------------------------------------------


def test_a_report_tells_what_happened() -> None:
    net = zoo.network("gru", "gate+4")
    x, initial = zoo.data(net, 64, 2)
    solution = zoo.solve(net, x, initial, Shooting(chunk=8, correction="diag"))
    report = solution.report
    assert report.backward is None
    solution.outputs.sum().backward()
    assert solution.report is report, "the report a caller holds is the one that is completed"
    for one, tolerance in ((report, TOLERANCE), (report.backward, ADJOINT_TOLERANCE)):
        assert one.solver == "shooting[diag]"
        assert one.chunk == 8
        assert one.iterations == len(one.residuals) > 2
        assert one.tolerance == tolerance[torch.float64]
        assert one.residuals[-1] <= one.tolerance < one.residuals[-2]
        assert one.converged
        assert not one.fell_back
        assert one.contraction == one.residuals[-1] / one.residuals[-2]
        assert one.warmup == 8
    text = str(report)
    assert "shooting[diag], chunk 8" in text
    assert "converged" in text
    assert "backward: shooting[diag]" in text


def test_residuals_are_the_jumps_between_chunks() -> None:
    """Without a warm-up, every chunk starts from the initial state: the first residual can be computed by hand."""
    net = zoo.network("rnn tanh")
    x, initial = zoo.data(net, 12, 2)
    report = zoo.solve(net, x, initial, Shooting(chunk=4, warmup=0, correction="none")).report
    x, initial = x.detach(), initial.detach()
    with torch.no_grad():
        ends = torch.stack([zoo.truth(net, x[t : t + 4], initial)[1] for t in (0, 4, 8)])
    jumps = (ends[:-1] - initial).abs().amax(-1)
    scale = torch.maximum(ends[:-1].abs().amax(-1), initial.abs().amax(-1)).cummax(0).values
    assert report.residuals[0] == pytest.approx(float((jumps / scale).max()), rel=1e-12)


def test_one_chunk_is_the_sequential_run() -> None:
    net = zoo.network("lstm")
    x, initial = zoo.data(net, 9, 2)
    for chunk in (9, 50):
        report = zoo.check_against_truth(net, x, initial, Shooting(chunk=chunk), 1e-13).report
        assert (report.solver, report.chunk, report.iterations, report.residuals) == ("sequential", 9, 1, ())
        assert report.converged
        assert not report.fell_back
        assert report.contraction is None


def test_a_looser_tolerance_is_met_and_saves_sweeps() -> None:
    net = zoo.network("gru", "gate+4")
    x, initial = zoo.data(net, 128, 2)
    strict = zoo.solve(net, x, initial, Shooting(chunk=8, correction="diag")).report
    for tol in (1e-2, 1e-5, 1e-8):
        solution = zoo.solve(net, x, initial, Shooting(chunk=8, correction="diag", tol=tol))
        solution.outputs.sum().backward()
        for report in (solution.report, solution.report.backward):
            assert report.tolerance == tol
            assert report.converged
            assert not report.fell_back
            assert report.residuals[-1] <= tol < report.residuals[0]
            assert report.error_estimate <= 10 * tol, "jumps add up over a long memory: they go on until that is small"
        assert solution.report.iterations < strict.iterations
        states, _ = zoo.truth(net, x, initial)
        error = zoo.difference(solution.outputs, states)
        assert 1e-13 < error < 30 * tol


def integrator(width: int = 3) -> zoo.Network:
    """`h⁺ = h + x`: it never forgets, so jumps travel one chunk a sweep and nothing contracts."""

    def cell(h: Tensor, x: Tensor) -> Tensor:
        return h + x

    def recurrence(x: Tensor, initial: Tensor) -> zoo.Recurrence:
        return zoo.Recurrence(GenericCell(cell, initial, (width,)), x, initial)

    return zoo.Network((width,), {}, recurrence, cell)


def integrator_data(steps: int, batch: int = 2, width: int = 3) -> tuple[Tensor, Tensor]:
    """Whole numbers, so that sums are exact whatever their order."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(1, 4, (steps, batch, width), generator=generator).double()
    return x.requires_grad_(), torch.ones(batch, width, dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize("chunks", [2, 3, 4, 5])
def test_exact_after_at_most_as_many_sweeps_as_chunks(chunks: int) -> None:
    """The integrator needs all of them, forward and backward; a chaotic network cannot need more."""
    net = integrator()
    x, initial = integrator_data(4 * chunks)
    report = zoo.check_against_truth(
        net, x, initial, Shooting(chunk=4, correction="none", warmup=0), 1e-15, "outputs"
    ).report
    assert report.iterations == chunks
    assert report.residuals[-1] == 0
    assert report.backward.iterations == chunks
    assert not report.fell_back
    assert not report.backward.fell_back
    for name in ("gru", "lstm", "rnn tanh", "function"):
        net = zoo.network(name, "weights×8", n=8)
        x, initial = zoo.data(net, 8 * chunks, BATCH)
        for correction in CORRECTIONS:
            report = zoo.solve(net, x, initial, Shooting(chunk=8, correction=correction)).report
            assert report.iterations <= chunks, (name, correction)
            assert report.converged
            assert not report.fell_back


@pytest.mark.parametrize("correction", ["diag", "newton"])
def test_an_exact_transfer_needs_two_sweeps(correction: str) -> None:
    """Newton's method on a linear problem, forward; the adjoint problem is linear for every network."""
    x, initial = integrator_data(40)
    report = zoo.check_against_truth(
        integrator(), x, initial, Shooting(chunk=4, correction=correction, warmup=0), 1e-14
    ).report
    assert report.iterations == 2
    assert report.backward.iterations == 2
    if correction == "newton":
        for name, regime in zoo.cases(("gru", "lstm projected", "function of tuple")):
            net = zoo.network(name, regime)
            x, initial = zoo.data(net, 20, BATCH)
            solver = Shooting(chunk=4, correction=correction, tol=1e-9)
            report = zoo.check_against_truth(net, x, initial, solver, 1e-6).report
            assert report.backward.iterations <= 2


def test_auto_takes_the_decay_where_there_is_one_and_newton_where_that_is_slow() -> None:
    x, initial = zoo.data(net := zoo.network("gru"), 512, 2)
    assert zoo.solve(net, x, initial, Shooting(chunk=64, warmup=8)).report.solver == "shooting[none]"
    net = zoo.network("elementwise", "gate+4")
    assert zoo.solve(net, x, initial, Shooting(chunk=8, warmup=0)).report.solver == "shooting[diag]"
    net = zoo.network("lstm", "gate+4")
    x, initial = zoo.data(net, 96, 2)
    report = zoo.solve(net, x, initial, Shooting(chunk=8, warmup=0)).report
    assert report.solver == "shooting[newton]"
    assert report.converged
    assert not report.fell_back


def test_long_memory_needs_corrections() -> None:
    """Sweeps of the update gate at +4: many with none, fewer through the decay, fewest by Newton."""
    net = zoo.network("gru", "gate+4", n=8)
    x, initial = zoo.data(net, 512, 1)
    sweeps = {}
    for correction in ("none", "diag", "newton"):
        report = zoo.solve(net, x, initial, Shooting(chunk=16, correction=correction, tol=1e-6)).report
        assert report.converged
        sweeps[correction] = report.iterations
    assert sweeps["newton"] < sweeps["diag"] < sweeps["none"]


# ---- giving up --------------------------------------------------------------------------------------------------


def test_max_iters_is_kept_and_said() -> None:
    x, initial = integrator_data(24)
    for limit in (1, 2, 3):
        solver = Shooting(chunk=4, correction="none", warmup=0, max_iters=limit)
        report = zoo.check_against_truth(integrator(), x, initial, solver, 1e-15).report
        for one in (report, report.backward):
            assert one.iterations == len(one.residuals) == limit
            assert one.fell_back
            assert one.converged
            assert f"max_iters={limit}" in one.reason
            assert "fell back to sequential" in str(one)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_what_flowed_into_resets_is_counted_once(dtype: torch.dtype) -> None:
    """The sequential run goes over resets that the sweeps before it have already seen, from wrong gradients."""
    net = zoo.network("gru", "gate+6", dtype=dtype)
    x, initial = zoo.data(net, 24, 2, dtype=dtype)
    resets = torch.zeros(24, 2, dtype=torch.bool)
    resets[2, 0] = resets[10, 0] = resets[15, 1] = True
    solver = Shooting(chunk=4, correction="none", warmup=0, max_iters=1)
    close = 1e-11 if dtype == torch.float64 else 1e-4
    report = zoo.check_against_truth(net, x, initial, solver, close, resets=resets).report
    assert report.backward.fell_back


def test_what_flowed_into_resets_may_have_overflowed_before() -> None:
    """A nilpotent network, whose diagonal says that it explodes: the corrections overflow, the gradients must not."""
    net = zoo.network("rnn tanh", n=2, dtype=torch.float32)
    with torch.no_grad():
        net.parameters["weight_hh_l0"].copy_(torch.tensor([[20.0, -40.0], [10.0, -20.0]]))
        for name in ("weight_ih_l0", "bias_ih_l0", "bias_hh_l0"):
            net.parameters[name].zero_()
    x, initial = zoo.data(net, 400, 1, dtype=torch.float32)
    initial = torch.zeros_like(initial).requires_grad_()
    resets = torch.zeros(400, 1, dtype=torch.bool)
    resets[366] = True
    solver = Shooting(chunk=4, correction="diag", warmup=0)
    zoo.check_against_truth(net, x, initial, solver, 1e-5, "outputs", resets=resets)


def test_sweeps_that_do_not_contract_are_given_up_early() -> None:
    x, initial = integrator_data(400)
    report = zoo.check_against_truth(integrator(), x, initial, Shooting(chunk=4, correction="none"), 1e-15).report
    assert report.fell_back
    assert report.iterations < 10
    assert "did not halve the residual" in report.reason
    assert report.residuals[-1] > report.tolerance


def test_never_more_than_the_most_sweeps() -> None:
    """A network that contracts too slowly to finish and too fast to be given up."""
    net = zoo.network("gru")
    x, initial = zoo.data(net, 120, 1)
    solver = Shooting(chunk=1, correction="none", warmup=0)
    report = zoo.check_against_truth(net, x, initial, solver, 1e-11).report
    assert report.iterations == MOST_SWEEPS
    assert f"max_iters={MOST_SWEEPS}" in report.reason


def test_ignore_returns_what_there_is_and_says_so() -> None:
    """After two sweeps the first two chunks are exact, and the later ones are not."""
    net = integrator()
    x, initial = integrator_data(24)
    solver = Shooting(chunk=4, correction="none", warmup=0, max_iters=2, on_divergence="ignore")
    solution = zoo.solve(net, x, initial, solver)
    report = solution.report
    assert not report.converged
    assert not report.fell_back
    assert "NOT converged" in str(report)
    states, _ = zoo.truth(net, x, initial)
    assert torch.equal(solution.outputs[:8], states[:8])
    assert not torch.equal(solution.outputs[8:], states[8:])
    given = zoo.gradients(net, x, initial, solution.outputs, solution.final)
    expected = zoo.gradients(net, x, initial, *zoo.truth(net, x, initial))
    assert report.backward is not None
    assert not report.backward.converged
    assert torch.equal(given["x"][-8:], expected["x"][-8:])
    assert not torch.equal(given["x"][:-8], expected["x"][:-8])


def test_raise_carries_the_report() -> None:
    x, initial = integrator_data(24)
    solver = Shooting(chunk=4, correction="none", warmup=0, max_iters=3, on_divergence="raise")
    with pytest.raises(tl.ConvergenceError, match="3 sweeps of 4-step chunks") as caught:
        zoo.solve(integrator(), x, initial, solver)
    report = caught.value.report
    assert report.iterations == 3
    assert not report.converged
    assert not report.fell_back
    assert "max_iters" in str(caught.value)
    assert isinstance(caught.value, RuntimeError)
    copied = pickle.loads(pickle.dumps(caught.value))
    assert type(copied) is tl.ConvergenceError
    assert copied.report == report
    assert str(copied) == str(caught.value)


def test_raise_in_the_backward_pass() -> None:
    """With no inputs the integrator stands still: its states are guessed at once, its gradients are not."""
    x, initial = integrator_data(24)
    x = torch.zeros_like(x).requires_grad_()
    solver = Shooting(chunk=4, correction="none", warmup=0, max_iters=3, on_divergence="raise")
    solution = zoo.solve(integrator(), x, initial, solver)
    assert solution.report.converged
    assert solution.report.iterations == 1
    with pytest.raises(tl.ConvergenceError) as caught:
        solution.outputs.sum().backward()
    assert caught.value.report.iterations == 3
    assert solution.report.backward == caught.value.report
    zoo.check_against_truth(integrator(), x, initial, replace(solver, on_divergence="sequential"), 1e-15)
    zoo.check_against_truth(integrator(), x, initial, replace(solver, adjoint="sequential"), 1e-15)


def test_raise_says_nothing_when_all_is_well() -> None:
    net = zoo.network("gru")
    x, initial = zoo.data(net, 40, 2)
    zoo.check_against_truth(net, x, initial, Shooting(chunk=8, on_divergence="raise"), 1e-12)


# ---- work that is saved -----------------------------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[list[tuple[int, int, int]]]]:
    """Rows `(sequence, begin, end)` of every sweep that was kept, by direction; warm-ups are left out."""
    seen: dict[str, list[list[tuple[int, int, int]]]] = {"forward": [], "adjoint": []}

    def watch(direction: str, kept: Callable[..., bool]) -> Callable[..., Any]:
        original = getattr(ReferenceSweeper, direction)

        def watched(self: ReferenceSweeper, segments: Any, *args: Any, **options: Any) -> Any:
            if kept(*args):
                columns = (segments.sequence, segments.begin, segments.end)
                seen[direction].append(list(zip(*(column.tolist() for column in columns), strict=True)))
            return original(self, segments, *args, **options)

        return watched

    monkeypatch.setattr(ReferenceSweeper, "forward", watch("forward", lambda _, states=None, *rest: states is not None))
    monkeypatch.setattr(
        ReferenceSweeper, "adjoint", watch("adjoint", lambda _, data, *rest: data.gate_grads is not None)
    )
    return seen


def test_the_exact_prefix_is_kept(calls: dict[str, list[list[tuple[int, int, int]]]]) -> None:
    """Two sweeps make two chunks exact: the sequential run begins at the third, and at the third last going back."""
    x, initial = integrator_data(24, batch=1)
    solver = Shooting(chunk=4, correction="none", warmup=0, max_iters=2)
    zoo.check_against_truth(integrator(), x, initial, solver, 1e-15, "outputs")
    assert [len(rows) for rows in calls["forward"]] == [6, 5, 1]
    assert calls["forward"][-1] == [(0, 8, 24)]
    assert [len(rows) for rows in calls["adjoint"]] == [6, 5, 1]
    assert calls["adjoint"][-1] == [(0, 0, 16)]


def test_chunks_that_fit_are_not_run_again(calls: dict[str, list[list[tuple[int, int, int]]]]) -> None:
    x, initial = integrator_data(20, batch=1)
    zoo.solve(integrator(), x, initial, Shooting(chunk=4, correction="none", warmup=0))
    assert [[begin for _, begin, _ in rows] for rows in calls["forward"]] == [
        [0, 4, 8, 12, 16],
        [4, 8, 12, 16],
        [8, 12, 16],
        [12, 16],
        [16],
    ]


def keeper(x: Tensor) -> zoo.Network:
    """`h⁺ = k h + (1 − k) tanh(x₁)`, where the input x₀ says how much is kept: hard and easy sequences in one batch."""

    def cell(h: Tensor, x: Tensor) -> Tensor:
        keep = x[:, :1]
        return keep * h + (1 - keep) * torch.tanh(x[:, 1:])

    def recurrence(x: Tensor, initial: Tensor) -> zoo.Recurrence:
        return zoo.Recurrence(GenericCell(cell, initial, x.shape[2:]), x, initial)

    return zoo.Network((x.shape[-1] - 1,), {}, recurrence, cell)


@pytest.mark.parametrize("correction", ["none", "diag"])
def test_only_the_hard_sequence_is_run_again(
    calls: dict[str, list[list[tuple[int, int, int]]]], correction: str
) -> None:
    """Not the easy ones, whose jumps are just below the tolerance; and the spoiled one only once, in the end."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 6, 4, generator=generator, dtype=torch.float64)
    x[..., 0] = 0.16
    x[:, 2, 0] = 0.7
    x[30, 4, 1] = torch.nan
    x.requires_grad_()
    initial = torch.zeros(6, 3, dtype=torch.float64).requires_grad_()
    solver = Shooting(chunk=8, correction=correction, warmup=8, tol=1e-6, max_iters=3, on_divergence="ignore")
    solution = zoo.solve(keeper(x), x, initial, solver)
    solution.outputs[:, [0, 1, 2, 3, 5]].sum().backward()
    for direction in ("forward", "adjoint"):
        first, *again = calls[direction]
        assert len(first) == 6 * 8
        assert again, direction
        run_again = [{sequence for sequence, _, _ in rows} for rows in again]
        if direction == "forward":  # backward, no gradient reaches it
            assert run_again.pop() == {4}
        assert run_again == [{2}] * len(run_again) != [], direction


def test_corrected_starts_stay_in_the_box(monkeypatch: pytest.MonkeyPatch) -> None:
    """Newton's corrections of a chaotic network point far outside; no state there is a state of the network."""
    seen, original = [], ReferenceSweeper.forward

    def watched(self: ReferenceSweeper, segments: Any, starts: Tensor, *args: Any, **options: Any) -> Any:
        seen.append(float(starts.abs().max()))
        return original(self, segments, starts, *args, **options)

    monkeypatch.setattr(ReferenceSweeper, "forward", watched)
    net = zoo.network("gru", "weights×8", n=8)
    x, initial = zoo.data(net, 64, BATCH)
    initial = initial.detach().clamp(-1, 1)
    zoo.solve(net, x, initial, Shooting(chunk=8, correction="newton"))
    assert len(seen) > 3
    assert max(seen) <= 1


def test_empty_chunks_of_short_sequences_are_not_run(calls: dict[str, list[list[tuple[int, int, int]]]]) -> None:
    net = zoo.network("gru")
    x, initial = zoo.data(net, 20, 3)
    zoo.check_against_truth(net, x, initial, Shooting(chunk=5, warmup=0), 1e-12, lengths=torch.tensor([20, 0, 6]))
    for direction in ("forward", "adjoint"):
        for rows in calls[direction]:
            assert all(begin < end for _, begin, end in rows)
        assert {sequence for sequence, _, _ in calls[direction][0]} == {0, 2}


# ---- values that are not finite ---------------------------------------------------------------------------------


def same_pattern(given: Tensor, expected: Tensor, close: float) -> None:
    assert torch.equal(given.isfinite(), expected.isfinite())
    finite = expected.isfinite()
    assert zoo.difference(given[finite], expected[finite]) < close


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", zoo.ZOO)
def test_inputs_that_are_not_finite(name: str, value: float, dtype: torch.dtype) -> None:
    """One sequence is spoiled from the middle on; its beginning, the other sequences and their gradients are not."""
    net = zoo.network(name, dtype=dtype)
    x, initial = zoo.data(net, 40, 3, dtype=dtype)
    with torch.no_grad():
        x[21, 1, 0] = value
    for solver in (Shooting(chunk=8), Shooting(chunk=3, correction="newton"), Shooting(chunk=8, correction="none")):
        states, final = zoo.truth(net, x, initial)
        solution = zoo.solve(net, x, initial, solver)
        same_pattern(solution.outputs, states[..., : solution.outputs.shape[-1]], 1e-5)
        assert bool(solution.outputs[:21].isfinite().all())
        assert bool(solution.outputs[:, [0, 2]].isfinite().all())
        same_pattern(solution.final, final, 1e-5)
        assert solution.report.iterations <= 14
        assert solution.report.converged
        given = zoo.gradients(net, x, initial, solution.outputs, solution.final)
        expected = zoo.gradients(net, x, initial, states[..., : solution.outputs.shape[-1]], final)
        same_pattern(given["x"][:, [0, 2]], expected["x"][:, [0, 2]], 1e-4)
        assert solution.report.backward.iterations <= 14


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", zoo.HAND_WRITTEN)
def test_weights_that_are_not_finite(name: str, value: float) -> None:
    for weight in ("weight_hh_l0", "bias_ih_l0"):
        net = zoo.network(name)
        with torch.no_grad():
            net.parameters[weight].flatten()[1] = value
        x, initial = zoo.data(net, 30, 2)
        states, final = zoo.truth(net, x, initial)
        solution = zoo.solve(net, x, initial, Shooting(chunk=7))
        same_pattern(solution.outputs, states[..., : solution.outputs.shape[-1]], 1e-11)
        same_pattern(solution.final, final, 1e-11)
        assert solution.report.iterations <= 8
        zoo.gradients(net, x, initial, solution.outputs, solution.final)


def test_an_initial_state_that_is_not_finite() -> None:
    for name in zoo.ZOO:
        net = zoo.network(name)
        x, initial = zoo.data(net, 20, 2)
        with torch.no_grad():
            initial[1, 0] = torch.nan
        states, _ = zoo.truth(net, x, initial)
        solution = zoo.solve(net, x, initial, Shooting(chunk=4))
        same_pattern(solution.outputs, states[..., : solution.outputs.shape[-1]], 1e-11)


@pytest.mark.parametrize("policy", ["raise", "ignore"])
def test_spoiled_values_end_by_every_policy(policy: Any) -> None:
    net = zoo.network("gru")
    x, initial = zoo.data(net, 40, 2)
    with torch.no_grad():
        x[20, 0] = torch.nan
    solver = Shooting(chunk=8, on_divergence=policy)
    if policy == "raise":
        with pytest.raises(tl.ConvergenceError):
            zoo.solve(net, x, initial, solver)
        return
    report = zoo.solve(net, x, initial, solver).report
    assert not report.converged
    assert report.residuals[-1] == torch.inf
    assert "not finite" in report.reason


def test_states_that_overflow_are_torchs() -> None:
    """A relu network that explodes past float32's range, to Inf and then NaN."""
    net = zoo.network("rnn relu", "weights×8", n=8, dtype=torch.float32)
    x, initial = zoo.data(net, 120, 2, dtype=torch.float32)
    states, _ = zoo.truth(net, x, initial)
    assert not bool(states[-1].isfinite().all())
    solution = zoo.solve(net, x, initial, Shooting(chunk=8))
    assert torch.equal(solution.outputs.isfinite().all(-1), states.isfinite().all(-1))
    for sequence in range(2):
        overflow = int(states[:, sequence].isfinite().all(-1).long().sum())
        for t in range(overflow):
            assert zoo.difference(solution.outputs[t, sequence], states[t, sequence]) < 1e-3


# ---- float32 ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", zoo.KERNELS)
def test_growing_states_are_measured_where_they_are(name: str) -> None:
    """A jump that is nothing beside the last state may be all of an early one: each state is right for its size."""
    net = zoo.network(name, "weights×8", n=16)
    x, initial = zoo.data(net, 48, 2)
    expected, _ = zoo.truth(net, x, initial)
    single = zoo.network(name, "weights×8", n=16, dtype=torch.float32)
    for mine, truth in zip(single.parameters.values(), net.parameters.values(), strict=True):
        mine.data.copy_(truth.data)
    plain, _ = zoo.truth(single, x.detach().float(), initial.detach().float())
    solution = zoo.solve(single, x.detach().float(), initial.detach().float(), Shooting(chunk=8))
    for t in range(48):
        outputs = expected[t][..., : net.parts[0]]
        torchs = zoo.difference(plain[t][..., : net.parts[0]].double(), outputs)
        assert zoo.difference(solution.outputs[t].double(), outputs) < max(30 * torchs, 1e-5), t


def mean_error(given: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Root of the mean squared error of each result, relative to its size.

    The initial state's gradient may have vanished on the way: its error is relative to the loss's own gradient, 1.
    """
    return {
        name: float((given[name].double() - value).square().mean().sqrt())
        / max(float(value.square().mean().sqrt()), 1.0 if name.startswith("initial") else 1e-30)
        for name, value in expected.items()
    }


def results(net: zoo.Network, x: Tensor, initial: Tensor, outputs: Tensor, final: Tensor) -> dict[str, Tensor]:
    """Outputs, and all gradients of a loss on them and of one on the last state."""
    found = {"outputs": outputs.detach()}
    for loss in ("outputs", "last"):
        grads = zoo.gradients(net, x, initial, outputs, final, loss, more=loss == "outputs")
        found |= {f"{key} by {loss}": grad for key, grad in grads.items()}
    return found


@pytest.mark.parametrize(("name", "regime"), zoo.cases(zoo.HAND_WRITTEN))
def test_float32_is_at_most_twice_as_far_from_float64_as_torch(name: str, regime: str) -> None:
    """With the default tolerances, on the same weights: states and all gradients, over a few seeds."""
    steps = {"weights×2": 96, "weights×4": 32, "weights×8": 24}.get(regime, 256)
    errors: list[dict[str, list[float]]] = [{}, {}]
    for seed in range(6):
        nets = [zoo.network(name, regime, n=12, seed=seed, dtype=dtype) for dtype in (torch.float64, torch.float32)]
        for wide, narrow in zip(nets[0].parameters.values(), nets[1].parameters.values(), strict=True):
            wide.data.copy_(narrow.data)
        x, initial = zoo.data(nets[1], steps, 2, seed=seed + 10, dtype=torch.float32)
        x64, initial64 = x.detach().double().requires_grad_(), initial.detach().double().requires_grad_()
        states, final = zoo.truth(nets[0], x64, initial64)
        outputs = states[..., : nets[0].parts[0]]
        expected = results(nets[0], x64, initial64, outputs, final)
        plain, plain_final = zoo.truth(nets[1], x, initial)
        plain = plain[..., : nets[0].parts[0]]
        solution = zoo.solve(nets[1], x, initial, Shooting(chunk={256: 32, 96: 16}.get(steps, 8)))
        for kind, (one, last) in enumerate(((plain, plain_final), (solution.outputs, solution.final))):
            for key, error in mean_error(results(nets[1], x, initial, one, last), expected).items():
                errors[kind].setdefault(key, []).append(error)
    eps = torch.finfo(torch.float32).eps
    for key in errors[0]:
        noise = eps if key.startswith("initial") else eps / 4
        torchs, ours = (geometric_mean([max(noise, error) for error in kind[key]]) for kind in errors)
        allowed = 3 if regime in ("weights×4", "weights×8") else 2  # chaos makes one rounding or another count more
        assert ours <= allowed * torchs, f"{key}: {ours:.1e} against torch's {torchs:.1e}"


def geometric_mean(errors: list[float]) -> float:
    """What is typical of errors of which now and then one is large, in ours as in torch's."""
    return math.exp(sum(math.log(error) for error in errors) / len(errors))


def test_kernels_and_reference_agree_on_a_whole_solve(monkeypatch: pytest.MonkeyPatch) -> None:
    if build.unavailable() is not None:
        pytest.skip("no C kernels")
    for name in zoo.KERNELS:
        net = zoo.network(name, n=20, dtype=torch.float32)
        x, initial = zoo.data(net, 100, 3, dtype=torch.float32)
        lengths = torch.tensor([100, 37, 64])
        resets = torch.rand(100, 3, generator=torch.Generator().manual_seed(0)) < 0.05
        results = []
        for off in (False, True):
            if off:
                monkeypatch.setattr(build, "unavailable", lambda: "switched off by the test")
            solution = zoo.solve(net, x, initial, Shooting(chunk=13), lengths, resets)
            grads = zoo.gradients(net, x, initial, solution.outputs, solution.final)
            results.append({"outputs": solution.outputs, "final": solution.final, **grads})
        monkeypatch.undo()
        for key, value in results[0].items():
            assert zoo.difference(value, results[1][key]) < 2e-5, (name, key)


# ---- options ----------------------------------------------------------------------------------------------------


def test_options_are_checked() -> None:
    for options, message in (
        (
            {"correction": "quasi"},
            "correction must be one of 'auto', 'none', 'diag', 'secant', 'lowrank', 'newton'; got 'quasi'",
        ),
        ({"chunk": 0}, "chunk must be a whole number ≥ 1 or None, got 0"),
        ({"chunk": 2.5}, "chunk must be a whole number"),
        ({"chunk": True}, "chunk must be a whole number"),
        ({"warmup": -1}, "warmup must be a whole number"),
        ({"max_iters": 0}, "max_iters must be a whole number ≥ 1 or None, got 0"),
        ({"tol": 0.0}, "tol must be a positive number or None, got 0.0"),
        ({"tol": float("nan")}, "tol must be a positive number"),
        ({"adjoint": "scan-ish"}, "adjoint must be one of 'same', 'scan', .*'sequential'; got 'scan-ish'"),
        ({"on_divergence": "pray"}, "on_divergence must be one of 'sequential', 'raise', 'ignore'; got 'pray'"),
    ):
        with pytest.raises(ValueError, match=message):
            Shooting(**options)
    with pytest.raises(AttributeError):
        Shooting().chunk = 3  # type: ignore[misc]


def test_the_chunk_is_chosen_where_none_is_given() -> None:
    net = zoo.network("gru")
    x, initial = zoo.data(net, 600, 1)
    report = zoo.check_against_truth(net, x, initial, Shooting(), 1e-11).report
    assert 1 < report.chunk < 600


def test_no_sequences_at_all() -> None:
    net = zoo.network("gru")
    x, initial = zoo.data(net, 10, 0)
    solution = zoo.solve(net, x, initial, Shooting(chunk=3))
    assert solution.outputs.shape == (10, 0, 4)
    assert solution.report.converged
    solution.outputs.sum().backward()


@pytest.mark.parametrize("size", [1e2, 1e6])
def test_a_large_beginning_hides_no_later_error(size: float) -> None:
    """Jumps are measured against the states beside them, not against a start that has long been forgotten."""

    def cell(h: Tensor, x: Tensor) -> Tensor:
        return 0.5 * h + x

    xs, h0 = torch.randn(600, 2, 3), torch.full((2, 3), size)
    state, expected = h0.double(), []
    for x in xs.double():
        state = cell(state, x)
        expected.append(state)
    for _ in range(4):  # the warm-up is learned on the way
        states, report = tl.unroll(cell, h0, xs, solver="auto")
        assert report.converged
        assert float((states.double() - torch.stack(expected))[100:].abs().max()) < 1e-5


@pytest.mark.parametrize("correction", ["none", "diag", "newton"])
def test_a_solve_that_needs_no_correction_is_told_as_what_was_asked_for(correction: str) -> None:
    gru = tl.GRU(4, 8, solver=Shooting(correction=correction, chunk=64))
    gru(torch.randn(1000, 1, 4))[0].sum().backward()
    report = gru.reports[0]
    assert report.iterations == 1
    assert report.solver == report.backward.solver == f"shooting[{correction}]"
