"""Guesses, warm starts, precision, memory and bad input of the Newton family."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import zoo
from test_newton import FAMILY, sweeps
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

import timeloom as tl
from timeloom import buffers as memory
from timeloom.cells import GRUCell
from timeloom.solvers import DEER, ELK, Auto, Jacobi, Picard, QuasiDEER, QuasiELK, Shooting, Solver

pytestmark = pytest.mark.usefixtures("one_thread")


# ---- guesses -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("solver", [*FAMILY.values(), Shooting(chunk=8), Auto()], ids=lambda s: type(s).__name__)
def test_a_guess_saves_sweeps_and_changes_nothing_else(solver: Solver) -> None:
    generator = torch.Generator().manual_seed(0)
    w = 0.7 * torch.randn(5, 5, generator=generator, dtype=torch.float64)
    xs = torch.randn(100, 2, 5, generator=generator, dtype=torch.float64)
    h0 = torch.randn(2, 5, generator=generator, dtype=torch.float64)

    def cell(h: Tensor, x: Tensor) -> Tensor:
        return 0.3 * h + 0.7 * torch.tanh(h @ w.t() + x)

    expected, _ = tl.unroll(cell, h0, xs, solver="sequential")
    near = expected + 1e-4 * torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    solver = replace(solver, tol=1e-12, max_iters=100)
    cold, without = tl.unroll(cell, h0, xs, solver=solver)
    warm, report = tl.unroll(cell, h0, xs, solver=solver, guess=near)
    exact, at_once = tl.unroll(cell, h0, xs, solver=solver, guess=expected)
    for states in (cold, warm, exact):
        torch.testing.assert_close(states, expected, rtol=1e-9, atol=1e-9)
    assert at_once.iterations == 1
    assert report.converged
    if isinstance(solver, DEER | ELK | QuasiELK):
        assert report.iterations < without.iterations
    if report.warmup or without.warmup:
        assert report.warmup == 0, "a guess takes the place of the warm-up"


def test_gradients_do_not_see_the_guess() -> None:
    net = zoo.network("gru")
    x, initial = zoo.data(net, 40, 2)
    cell = zoo.ModuleCell(4).double()
    guess = torch.randn(40, 2, 4, dtype=torch.float64, requires_grad=True)
    grads = []
    for given in (None, guess):
        states, _ = tl.unroll(cell, initial, x, solver="deer", guess=given)
        grads.append(torch.autograd.grad(states.square().sum(), [x, initial, *cell.parameters()]))
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)
    assert guess.grad is None


def test_states_of_several_parts() -> None:
    net = zoo.network("function of tuple")
    x, initial = zoo.data(net, 30, 2)
    generic = net.recurrence(x, initial).cell
    states, report = tl.unroll(generic.function, generic.unpack(initial), x, solver="deer")
    assert report.iterations > 2
    again, report = tl.unroll(generic.function, generic.unpack(initial), x, solver="deer", guess=states)
    assert report.iterations == 1
    for one, other in zip(states, again, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("batch_first", [False, True])
def test_guesses_of_modules_have_the_shape_of_outputs(batch_first: bool) -> None:
    torch.manual_seed(0)
    gru = tl.GRU(3, 4, batch_first=batch_first, solver=DEER(tol=1e-6))
    x = torch.randn(30, 30, 3)  # steps and batch that could be mistaken for one another
    y, _ = gru(x)
    assert gru.reports[0].iterations > 2
    gru(x, guess=y)
    assert gru.reports[0].iterations == 1
    gru(x, guess=y.transpose(0, 1).contiguous())
    assert gru.reports[0].iterations > 1
    y, _ = gru(x[:, 0])
    gru(x[:, 0], guess=y)
    assert gru.reports[0].iterations == 1


def test_an_lstm_is_guessed_with_its_cells() -> None:
    torch.manual_seed(0)
    lstm = tl.LSTM(3, 4, solver=DEER(tol=1e-6))
    x = torch.randn(50, 2, 3)
    cells, state = [], None
    for step in x:
        _, state = nn.LSTM.forward(lstm, step.unsqueeze(0), state)
        cells.append(state[1][0])
    y, _ = lstm(x)
    lstm(x, guess=(y, torch.stack(cells)))
    assert lstm.reports[0].iterations == 1


def test_bad_guesses_are_named() -> None:
    cell, h0, xs = zoo.ModuleCell(4), torch.zeros(2, 4), torch.randn(10, 2, 3)
    with pytest.raises(ValueError, match=r"guess has shape \(9, 2, 4\), expected \(10, 2, 4\): the states after every"):
        tl.unroll(cell, h0, xs, solver="deer", guess=torch.zeros(9, 2, 4))
    with pytest.raises(TypeError, match=r"guess must be a tensor of shape \(10, 2, 4\), or a batch of .*; got tuple"):
        tl.unroll(cell, h0, xs, solver="deer", guess=(torch.zeros(10, 2, 4),))
    with pytest.raises(ValueError, match="guess holds values that are not finite"):
        tl.unroll(cell, h0, xs, solver="deer", guess=torch.full((10, 2, 4), torch.nan))
    with pytest.raises(ValueError, match="guess is for 3 samples, the batch has 2 sequences"):
        tl.unroll(cell, h0, xs, solver="deer", guess=tl.WarmStarts().of([1, 2, 3]))
    with pytest.raises(TypeError, match=r"a tuple of tensors of shapes \(10, 2, 4\), \(10, 2, 4\).*got Tensor"):
        tl.LSTM(3, 4, solver="deer")(xs, guess=torch.zeros(10, 2, 4))
    with pytest.raises(ValueError, match=r"this call has 4 layers and directions: use timeloom.WarmStarts"):
        tl.GRU(3, 4, num_layers=2, bidirectional=True, solver="deer")(xs, guess=torch.zeros(10, 2, 8))


@pytest.mark.parametrize("solver", ["sequential", "auto", "deer"])
def test_bad_guesses_are_named_by_torchs_own_layer_too(solver: str) -> None:
    gru, xs = tl.GRU(3, 4, batch_first=True, solver=solver), torch.randn(2, 5, 3)
    for _ in range(2):
        gru(xs)
        with pytest.raises(ValueError, match=r"guess has shape \(5, 2, 4\), expected \(2, 5, 4\)"):
            gru(xs, guess=torch.zeros(5, 2, 4))
        with pytest.raises(ValueError, match="guess is for 3 samples, the batch has 2 sequences"):
            gru(xs, guess=tl.WarmStarts().of([1, 2, 3]))
        packed = pack_sequence([torch.randn(5, 3), torch.randn(2, 3)])
        with pytest.raises(ValueError, match="guess is for 3 samples, the batch has 2 sequences"):
            gru(packed, guess=tl.WarmStarts().of([1, 2, 3]))
    gru(xs, guess=torch.zeros(2, 5, 4))
    gru(packed, guess=tl.WarmStarts().of([1, 2]))
    gru(xs[0], guess=torch.zeros(5, 4))


def test_a_guess_may_be_large() -> None:
    gru, xs = tl.GRU(3, 4, solver="deer"), torch.randn(10, 2, 3)
    y, _ = gru(xs, guess=torch.full((10, 2, 4), 3e38))
    torch.testing.assert_close(y, nn.GRU.forward(gru, xs)[0], rtol=1e-4, atol=1e-6)


# ---- the store -----------------------------------------------------------------------------------------------------


def test_samples_begin_where_they_ended() -> None:
    torch.manual_seed(0)
    lstm = tl.LSTM(3, 4, num_layers=2, bidirectional=True, solver=DEER(tol=1e-6))
    store, x = tl.WarmStarts(), torch.randn(60, 5, 3)
    cold, _ = lstm(x, guess=store.of(torch.arange(5)))
    assert all(report.iterations > 2 for report in lstm.reports)
    assert len(store) == 5
    assert 3 in store
    assert 7 not in store
    assert store.nbytes == 4 * 5 * 60 * 8 * 4
    order = torch.tensor([4, 0, 3])
    warm, _ = lstm(x[:, order], guess=store.of(order))
    assert all(report.iterations == 1 for report in lstm.reports)
    torch.testing.assert_close(warm, cold[:, order], rtol=1e-4, atol=1e-6)
    store.clear()
    assert len(store) == 0


def test_samples_not_seen_before_begin_as_usual() -> None:
    torch.manual_seed(0)
    gru = tl.GRU(3, 4, solver="deer")
    store, x = tl.WarmStarts(), torch.randn(60, 3, 3)
    gru(x[:, :1], guess=store.of(["a"]))
    y, _ = gru(x, guess=store.of(["a", "b", "c"]))
    torch.testing.assert_close(y, nn.GRU.forward(gru, x)[0], rtol=1e-4, atol=1e-6)
    assert len(store) == 3


def test_kept_states_of_another_length_or_model_do_no_harm() -> None:
    torch.manual_seed(0)
    store, x = tl.WarmStarts(dtype=torch.float16, device="cpu"), torch.randn(60, 2, 3)
    for width, steps in ((4, 60), (4, 30), (4, 50), (6, 60)):
        gru = tl.GRU(3, width, solver="deer")
        y, _ = gru(x[:steps], guess=store.of([0, 1]))
        torch.testing.assert_close(y, nn.GRU.forward(gru, x[:steps])[0], rtol=1e-4, atol=1e-6)
        assert store.load(0, 0).dtype == torch.float16
        assert store.load(0, 0).shape == (steps, width)


def test_packed_and_ragged_sequences_find_their_own() -> None:
    torch.manual_seed(0)
    gru = tl.GRU(3, 4, bidirectional=True, solver=DEER(tol=1e-6))
    store = tl.WarmStarts()
    sequences = [torch.randn(steps, 3) for steps in (20, 60, 40)]
    for _ in range(2):
        gru(pack_sequence(sequences, enforce_sorted=False), guess=store.of([20, 60, 40]))
    assert all(report.iterations == 1 for report in gru.reports)
    assert all(store.load(steps, 0).shape == (steps, 4) for steps in (20, 60, 40))
    padded = nn.utils.rnn.pad_sequence(sequences)
    gru(padded, lengths=torch.tensor([20, 60, 40]), guess=store.of([20, 60, 40]))
    assert all(report.iterations == 1 for report in gru.reports)


def test_training_with_a_store_needs_fewer_sweeps() -> None:
    def train(store: tl.WarmStarts | None) -> tuple[list[float], list[int]]:
        torch.manual_seed(0)
        gru, head = tl.GRU(2, 6, solver="deer"), nn.Linear(6, 1)
        x = torch.randn(200, 4, 2)
        target = x.cumsum(0)[..., :1].sin()
        optimizer = torch.optim.Adam([*gru.parameters(), *head.parameters()], 1e-3)
        losses, counts = [], []
        for _ in range(6):
            for batch in ([0, 1], [2, 3]):
                y, _ = gru(x[:, batch], guess=None if store is None else store.of(batch))
                loss = (head(y) - target[:, batch]).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                counts.append(gru.reports[0].iterations)
        return losses, counts

    (cold, many), (warm, few) = train(None), train(tl.WarmStarts())
    assert warm == pytest.approx(cold, rel=1e-4)
    assert sum(few[2:]) < sum(many[2:])


def test_what_a_narrow_dtype_cannot_hold_is_not_kept() -> None:
    store = tl.WarmStarts(dtype=torch.float16)
    xs, h0 = torch.randn(40, 2, 3, dtype=torch.float64), torch.zeros(2, 3, dtype=torch.float64)

    def cell(h: Tensor, x: Tensor) -> Tensor:
        return 0.9 * h + 1e5 * torch.tanh(1e-5 * h + x)

    for _ in range(2):
        _, report = tl.unroll(cell, h0, xs, solver=DEER(), guess=store.of([0, 1]))
        assert not report.fell_back
    assert len(store) == 0


def test_what_is_not_finite_is_not_kept() -> None:
    gru, store = tl.GRU(3, 4, solver="deer"), tl.WarmStarts()
    x = torch.randn(20, 2, 3)
    x[5, 0] = torch.nan
    gru(x, guess=store.of([0, 1]))
    assert 0 not in store
    assert 1 in store


def test_bad_samples_are_named() -> None:
    store = tl.WarmStarts()
    with pytest.raises(ValueError, match="samples must be distinct"):
        store.of([1, 1])
    with pytest.raises(ValueError, match=r"samples must have shape \(B,\).*got \(2, 2\)"):
        store.of(torch.zeros(2, 2))
    with pytest.raises(TypeError, match="floating-point"):
        tl.WarmStarts(dtype=torch.int64)


# ---- precision -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("solver", [DEER, QuasiDEER])
@pytest.mark.parametrize(("dtype", "precision"), [(torch.float32, "bfloat16"), (torch.float64, "float32")])
def test_rounded_corrections_reach_the_same_states(dtype: torch.dtype, precision: str, solver: type[DEER]) -> None:
    for name in ("gru", "lstm", "function"):
        net = zoo.network(name, n=4, dtype=dtype)
        x, initial = zoo.data(net, 150, 2, dtype=dtype)
        full, rounded = (zoo.solve(net, x, initial, solver(precision=p)) for p in ("full", precision))
        grads = [zoo.gradients(net, x, initial, s.outputs, s.final) for s in (full, rounded)]
        close = 2e-5 if dtype == torch.float32 else 1e-12
        assert zoo.difference(rounded.outputs, full.outputs) < close
        for key in grads[0]:
            assert zoo.difference(grads[1][key], grads[0][key]) < close, key
        assert not rounded.report.fell_back
        assert rounded.report.iterations <= full.report.iterations + 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("solver", FAMILY)
def test_states_in_half_precision(solver: str, dtype: torch.dtype) -> None:
    w = torch.randn(3, 3, generator=torch.Generator().manual_seed(0)).to(dtype) / 3
    xs, h0 = torch.randn(30, 2, 3, generator=torch.Generator().manual_seed(1)).to(dtype), torch.zeros(2, 3, dtype=dtype)
    h0.requires_grad_()
    results = []
    for name in (solver, "sequential"):
        states, report = tl.unroll(lambda h, x: torch.tanh(h @ w + x), h0, xs, solver=name)
        assert report.converged
        results.append((states.detach(), torch.autograd.grad(states[0].sum(), h0)[0]))
    close = 16 * torch.finfo(dtype).eps
    for given, expected in zip(*results, strict=True):
        assert given.dtype == dtype
        assert zoo.difference(given, expected) < close


def test_tf32_needs_a_gpu() -> None:
    with pytest.raises(ValueError, match="precision='tf32' is for CUDA devices, the inputs are on cpu"):
        tl.GRU(3, 4, solver=DEER(precision="tf32"))(torch.randn(10, 2, 3))
    with pytest.raises(ValueError, match="precision must be one of 'full', 'float32', 'tf32', 'bfloat16'; got 'fp8'"):
        DEER(precision="fp8")


# ---- memory --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("solver", [DEER(), ELK(), QuasiDEER(), QuasiELK()], ids=lambda s: s.name)
def test_little_memory_changes_the_layout_and_not_the_result(solver: Solver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of a few steps, of one step, and of one sequence at a time."""
    net = zoo.network("gru", n=6)
    x, initial = zoo.data(net, 40, 5)
    solver = replace(solver, tol=1e-12)  # how many sweeps it takes from there to rounding is a matter of rounding
    whole = zoo.solve(net, x, initial, solver)
    expected = zoo.gradients(net, x, initial, whole.outputs, whole.final)
    rows: list[int] = []
    jacobian = GRUCell.jacobian
    monkeypatch.setattr(GRUCell, "jacobian", lambda *args: rows.append(len(args[1])) or jacobian(*args))
    for room, most in ((100_000, 200), (15_000, 10), (1, 1)):
        monkeypatch.setattr(memory, "CACHED", room)
        rows.clear()
        solution = zoo.solve(net, x, initial, solver)
        given = zoo.gradients(net, x, initial, solution.outputs, solution.final)
        assert solution.report.iterations == whole.report.iterations
        assert zoo.difference(solution.outputs, whole.outputs) < 1e-14
        for name in expected:
            assert zoo.difference(given[name], expected[name]) < 1e-13, name
        assert 0 < max(rows) <= most


# ---- Hutchinson's estimate -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gru", "function of tuple"])
def test_the_estimated_diagonal_goes_to_the_diagonal(name: str) -> None:
    net = zoo.network(name)
    x, initial = zoo.data(net, 1, 3)
    problem = net.recurrence(x.detach(), initial.detach())
    cell, u = problem.cell, problem.u[0].detach()
    cell = cell.with_weights(tuple(weight.detach() for weight in cell.weights))
    exact = cell.jacobian(problem.initial, u).diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(cell.diagonal(problem.initial, u), exact)
    errors = [float((cell.estimated_diagonal(problem.initial, u, k) - exact).abs().mean()) for k in (4, 64, 1024)]
    assert errors[2] < 0.5 * errors[1] < 0.25 * errors[0]
    again = cell.estimated_diagonal(problem.initial, u, 4)
    assert torch.equal(again, cell.estimated_diagonal(problem.initial, u, 4)), "the same draws on every call"


def test_an_estimate_is_good_enough_to_converge() -> None:
    def cell(h: Tensor, x: Tensor) -> Tensor:
        return 0.5 * torch.tanh(h.flip(-1) + h + x)

    xs, h0 = torch.randn(30, 1, 12, dtype=torch.float64), torch.zeros(1, 12, dtype=torch.float64)
    with torch.no_grad():
        _, exact = tl.unroll(cell, h0, xs, solver=QuasiDEER())
        _, estimated = tl.unroll(cell, h0, xs, solver=QuasiDEER(probes=4))
    for report in (exact, estimated):
        assert report.converged
        assert not report.fell_back
    assert estimated.iterations <= exact.iterations + 8


# ---- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("solver", ["deer", "quasi-deer", "elk", "quasi-elk"])
def test_a_jacobian_that_is_not_finite_is_named(solver: str) -> None:
    """The square root has no derivative at zero, where this cell's second sequence is at its third step."""
    xs = torch.rand(10, 2, 1, dtype=torch.float64) + 1
    xs[1, 1] = 0

    def cell(h: Tensor, x: Tensor) -> Tensor:
        return torch.sqrt(h.abs()) * x

    with pytest.raises(ValueError, match=r"Jacobian is not finite at step 2 of sequence 1.*'jacobi', 'picard' or 'seq"):
        tl.unroll(cell, torch.ones(2, 1, dtype=torch.float64), xs, solver=solver)
    results = []
    for without in ("sequential", "jacobi", "picard"):
        h0 = torch.ones(2, 1, dtype=torch.float64, requires_grad=True)
        states, _ = tl.unroll(cell, h0, xs, solver=without)
        states.sum().backward()
        results.append((states.detach(), h0.grad))
    for states, grad in results[1:]:
        torch.testing.assert_close(states, results[0][0])
        torch.testing.assert_close(grad[0], results[0][1][0])
        assert not bool(grad[1].isfinite()), "as autograd finds"
    assert not bool(results[0][1][1].isfinite())


@pytest.mark.parametrize("solver", ["quasi-deer", "quasi-elk"])
def test_a_jacobian_that_overflows_where_iterates_have_run_away_is_no_fault_of_the_cell(solver: str) -> None:
    """The diagonal of these weights amplifies, their square is zero; derivatives overflow from 7e12 on."""
    weights = torch.tensor([[3.0, -3.0], [3.0, -3.0]])

    def cell(h: Tensor, x: Tensor) -> Tensor:
        return h @ weights.T + torch.tanh((1 + h.pow(4)).sqrt()) + x

    h0, xs = torch.zeros(1, 2), torch.randn(60, 1, 2)
    states, report = tl.unroll(cell, h0, xs, solver=solver)
    assert report.fell_back
    expected, _ = tl.unroll(cell, h0, xs, solver="sequential")
    torch.testing.assert_close(states, expected)


def test_values_that_are_not_finite_go_through_as_in_torch() -> None:
    torch.manual_seed(0)
    x = torch.randn(30, 2, 3)
    x[7, 1] = torch.nan
    for solver in FAMILY:
        gru = tl.GRU(3, 4, solver=solver)
        y, _ = gru(x)
        torch.testing.assert_close(y, nn.GRU.forward(gru, x)[0], equal_nan=True, rtol=1e-4, atol=1e-5)


def test_structures_and_probes_are_checked() -> None:
    with pytest.raises(ValueError, match="structure must be one of 'auto', 'diagonal', 'block'; got 'dense'"):
        QuasiDEER(structure="dense")
    with pytest.raises(ValueError, match="probes must be a whole number ≥ 1 or None, got 0"):
        QuasiELK(probes=0)
    with pytest.raises(ValueError, match="probes estimate a diagonal"):
        QuasiDEER(structure="block", probes=1)
    with pytest.raises(ValueError, match=r"structure='block' is for cells with one h and one c.*widths \(4,\)"):
        tl.GRU(3, 4, solver=QuasiDEER(structure="block"))(torch.randn(10, 2, 3))
    with pytest.raises(
        ValueError, match=r"solver must be one of .*'deer', 'quasi-deer', 'elk', 'quasi-elk', 'picard', "
    ):
        tl.GRU(3, 4, solver="newton")


@pytest.mark.parametrize("solver", ["deer", "quasi-deer", "elk", "quasi-elk", "picard"])
def test_corrections_that_overflow_are_told(solver: str) -> None:
    h0, xs = torch.full((1, 1), 0.3, dtype=torch.float64), torch.zeros(300, 1, 1, dtype=torch.float64)
    states, report = tl.unroll(lambda h, x: h * h - 1.5 + x, h0, xs, solver=solver)
    assert report.residuals[-1] == torch.inf
    assert "the values are not finite" in report.reason
    assert report.fell_back
    before = torch.cat([h0.unsqueeze(0), states[:-1]])  # the map is chaotic: held step by step against the equation
    torch.testing.assert_close(states, before * before - 1.5 + xs, rtol=0.0, atol=1e-15)


def test_giving_up_is_reported_and_raised_when_asked() -> None:
    net = zoo.network("rnn tanh", "weights×8", n=8)
    x, initial = zoo.data(net, 100, 1)
    with pytest.raises(tl.ConvergenceError, match=r"the jacobi solver did not converge.*solver='shooting' or 'elk'"):
        zoo.solve(net, x, initial, Jacobi(max_iters=3, on_divergence="raise"))
    ignored = zoo.solve(net, x, initial, Picard(max_iters=3, on_divergence="ignore")).report
    assert not ignored.converged
    assert ignored.iterations == 3
    fallen = zoo.solve(net, x, initial, Picard()).report
    assert fallen.fell_back
    assert fallen.converged
    assert "20 sweeps did not halve the residual" in fallen.reason


def test_a_limit_that_is_given_is_the_only_one() -> None:
    net = zoo.network("rnn tanh", "weights×8", n=8)
    x, initial = zoo.data(net, 60, 1)
    assert sweeps(net, x, initial, Jacobi(max_iters=60)) == 60
