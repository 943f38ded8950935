"""The boxes of multigrid one by one: levels, coarse steps, relaxation, restriction, and the options to choose them."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import zoo
from torch import Tensor, nn
from torch.func import jacrev, vmap

import timeloom as tl
from timeloom.cells.coarse import Frozen, UsersOwn
from timeloom.kernels import ReferenceSweeper
from timeloom.mgrit.cycle import Hierarchy, coarse_levels
from timeloom.mgrit.grid import COARSEST, Coarsening, fit, steps_of
from timeloom.mgrit.propagators import Adjoint, Forward
from timeloom.mgrit.relax import Level, c_relax, f_relax, relax, residual, serial
from timeloom.mgrit.restrict import correct, restrict
from timeloom.problem import Recurrence
from timeloom.solvers import MGRIT

pytestmark = pytest.mark.usefixtures("one_thread")


# ---- levels ---------------------------------------------------------------------------------------------------------


def test_steps_of_every_level() -> None:
    """38 points of 4-step chunks of 149 steps; 37 steps between them, then 9 of 4 (one left over), then 2."""
    assert steps_of(149, (4, 4, 4)) == [149, 37, 9, 2]
    assert steps_of(4, (4,)) == [4, 0]
    assert steps_of(5, (4,)) == [5, 1]


@pytest.mark.parametrize("steps", [5, 100, 10_000, 1_000_000])
def test_automatic_levels_grow_like_the_logarithm(steps: int) -> None:
    factors = fit(steps, None, 4, lambda: 0)
    assert set(factors) <= {4}
    counts = steps_of(steps, factors)
    assert counts[-1] <= COARSEST
    assert all(count > COARSEST for count in counts[1:-1])


def test_the_first_factor_is_the_chunk_where_none_is_given() -> None:
    assert fit(65536, None, None, lambda: 64) == (64, 4, 4, 4)
    assert fit(65536, 3, None, lambda: 64) == (64, 4)


@pytest.mark.parametrize(
    ("steps", "levels", "coarsening", "used"),
    [(100, 9, 4, (4, 4, 4)), (20, None, (4, 4, 4), (4, 4)), (4, 2, 4, ()), (1, 3, 4, ()), (50, None, 64, ())],
)
def test_what_does_not_fit_is_fitted_with_a_warning(steps: int, levels: Any, coarsening: Any, used: Any) -> None:
    with pytest.warns(UserWarning, match=rf"MGRIT\(.*\) does not fit {steps} steps: used ") as caught:
        assert fit(steps, levels, coarsening, lambda: 1) == used
    words = f"{len(used) + 1} levels, coarsened by {', '.join(map(str, used))}" if used else "a sequential run"
    assert words in str(caught[0].message)


def test_automatic_levels_fit_any_length_without_a_word() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for steps in range(1, 40):
            fit(steps, None, None, lambda: 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"levels": 1}, "levels must be at least 2"),
        ({"levels": 2.5}, "levels must be a whole number"),
        ({"coarsening": 1}, "coarsening must be a whole number ≥ 2 or None, got 1"),
        ({"coarsening": (4, 0)}, "every factor of coarsening must be a whole number ≥ 2"),
        ({"coarsening": ()}, "coarsening must name a factor"),
        ({"coarsening": (4, 4), "levels": 4}, r"coarsening=\(4, 4\) makes 3 levels, and levels=4 were asked for"),
        ({"relaxation": "FC"}, "relaxation must be 'F', 'FCF'"),
        ({"relaxation": ("FCF", "C")}, "relaxation must be 'F', 'FCF'"),
        ({"relaxation": ()}, "empty tuple"),
        ({"weight": 0.0}, "weight must be a number between 0 and 2, got 0.0"),
        ({"cycle": "W"}, "cycle must be one of 'V', 'F'; got 'W'"),
        ({"guess": "zero"}, "guess must be one of 'warmup', 'nested', 'initial'; got 'zero'"),
        ({"cycles": 0}, "cycles must be a whole number"),
        ({"backward_cycles": -1}, "backward_cycles must be a whole number"),
        ({"coarse": "smooth"}, "coarse must be one of 'frozen', 'implicit'; got 'smooth'"),
        ({"coarse_inputs": "last"}, "coarse_inputs must be one of 'mean', 'inject'; got 'last'"),
        ({"check_gradient_every": 0}, "check_gradient_every must be a whole number"),
        ({"gradient_tolerance": 0.1}, "gradient_tolerance needs check_gradient_every"),
        ({"tol": -1.0}, "tol must be a positive number"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MGRIT(**options)


def test_implicit_steps_are_refused_where_there_are_none() -> None:
    net = zoo.network("lstm")
    x, initial = zoo.data(net, 20, 2)
    with pytest.raises(ValueError, match=r"coarse='implicit' is for cells with an update gate .* this is a LSTMCell"):
        zoo.solve(net, x, initial, MGRIT(coarsening=4, coarse="implicit"))
    with pytest.raises(ValueError, match="coarse='implicit'"):
        tl.LSTM(2, 3, solver=MGRIT.paper())(torch.randn(500, 1, 2))


# ---- coarse steps ---------------------------------------------------------------------------------------------------


def points(name: str, regime: str = "gate+4", intervals: int = 3, batch: int = 2) -> tuple[Recurrence, Tensor, Tensor]:
    """A network with states `(K, B, S)` and inputs `(K, B, ·)` to take coarse steps at."""
    net = zoo.network(name, regime)
    x, _ = zoo.data(net, intervals, batch)
    state = 0.5 * torch.randn(
        intervals, batch, net.size, generator=torch.Generator().manual_seed(5), dtype=torch.float64
    )
    problem = net.recurrence(x.detach(), state[0])
    cell = problem.cell.with_weights(tuple(weight.detach() for weight in problem.cell.weights))
    return Recurrence(cell, problem.u.detach(), problem.initial), state, problem.u.detach()


KINDS = [(name, "frozen") for name in zoo.ZOO] + [("gru", "implicit"), ("implicit gru", "implicit")]


@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_a_coarse_step_over_one_step_is_the_step(name: str, kind: str) -> None:
    problem, state, u = points(name)
    flat, inputs = state.flatten(0, 1), u.flatten(0, 1)
    coarse = problem.cell.coarse(kind).step(flat, inputs, torch.ones(len(flat), 1, dtype=torch.float64))
    step = problem.cell.step(flat, inputs).detach()
    if (name, kind) == ("gru", "implicit"):
        assert not torch.allclose(coarse, step), "an implicit step of a GRU is another network even then"
    else:
        torch.testing.assert_close(coarse.detach(), step, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", ["gru", "implicit gru", "lstm", "elementwise"])
def test_a_frozen_step_is_exact_where_gates_stand_still(name: str) -> None:
    """Without recurrent weights and with inputs that do not change, seven steps are one frozen step over seven."""
    problem, state, u = points(name)
    cell = problem.cell
    if cell.weights:
        cell = cell.with_weights(tuple(torch.zeros_like(weight) for weight in cell.weights))
    else:
        cell = type(cell)(lambda h, x: 0.9 * h + 0.2 * x[:, :1], state[0], (zoo.INPUTS,))
    flat, inputs, span = state.flatten(0, 1), u.flatten(0, 1), torch.full((6, 1), 7.0, dtype=torch.float64)
    expected = flat
    for _ in range(7):
        expected = cell.step(expected, inputs)
    torch.testing.assert_close(cell.coarse("frozen").step(flat, inputs, span), expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(("name", "kind"), [*KINDS, ("function", "own")])
def test_transposed_derivatives_of_coarse_steps_are_autograds(name: str, kind: str) -> None:
    """A frozen step whose decay is read off a Jacobian holds that decay still, so there the derivative does too."""
    problem, state, u = points(name)
    span = torch.tensor([3.0, 1.0, 5.0], dtype=torch.float64).view(3, 1, 1).expand(3, 2, 1)

    def own(h: Tensor, x: Tensor, span: Tensor) -> Tensor:
        return torch.tanh(h * span - h.flip(-1))

    coarse = problem.cell.coarse(kind) if kind != "own" else UsersOwn(problem.cell, own)
    grad = torch.randn(3, 2, state.shape[-1], generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    decays = problem.cell.decay(state.flatten(0, 1), u.flatten(0, 1)).detach().view_as(state)

    def held(s: Tensor, u: Tensor, span: Tensor, decay: Tensor) -> Tensor:
        if kind == "own" or type(coarse) is not Frozen:
            return coarse.step(s[None], u[None], span[None])[0]
        total = sum(decay**k * (k < span) for k in range(5))
        return decay**span * s + total * (problem.cell.step(s[None], u[None])[0] - decay * s)

    flat = (state.flatten(0, 1), u.flatten(0, 1), span.flatten(0, 1), decays.flatten(0, 1))
    jacobian = vmap(jacrev(held))(*flat).detach()
    expected = (grad.flatten(0, 1).unsqueeze(1) @ jacobian).squeeze(1).view_as(grad)
    pull = coarse.linearise(state, u, span)
    torch.testing.assert_close(pull(slice(0, 3), grad), expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(pull(slice(1, 3, 2), grad[1:3:2]), expected[1:3:2], rtol=1e-10, atol=1e-12)


def test_spans_inputs_and_resets_of_coarse_intervals() -> None:
    """23 steps in chunks of 4, two chunks to an interval of level 2; the last chunk leads nowhere."""
    net = zoo.network("rnn tanh", n=3)
    x, initial = zoo.data(net, 23, 2)
    problem = net.recurrence(x.detach(), initial.detach())
    resets = torch.zeros(23, 2, dtype=torch.bool)
    resets[5, 1] = True
    problem = Recurrence(problem.cell, problem.u.detach(), problem.initial, None, resets)
    one, two = Forward.of(problem, Coarsening((4, 2), "frozen", "mean"))
    assert one.span.flatten().tolist() == [4.0] * 10
    assert two.span.flatten().tolist() == [8.0] * 4
    torch.testing.assert_close(one.inputs[1], problem.u[4:8].mean(0))
    torch.testing.assert_close(two.inputs[1], problem.u[8:16].mean(0))
    assert one.resets.squeeze(-1).nonzero().tolist() == [[1, 1]]
    assert two.resets.squeeze(-1).nonzero().tolist() == [[0, 1]]
    _, two = Forward.of(problem, Coarsening((4, 2), "frozen", "inject"))
    torch.testing.assert_close(two.inputs[1], problem.u[8])
    states = [torch.randn(24, 2, 3, dtype=torch.float64)]
    anchors = torch.tensor([[True, True]] + [[False, False]] * 5)
    coarsening = Coarsening((4, 2), "frozen", "inject")
    one, two = Adjoint.of(problem, states, torch.ones(23, 2, 3, dtype=torch.float64), initial, anchors, coarsening)
    assert one.span.flatten().tolist() == [3.0] * 2 + [4.0] * 8, "the ragged chunk is the first one backward in time"
    torch.testing.assert_close(two.state[1], states[0][8])
    torch.testing.assert_close(two.inputs[1], problem.u[8])
    assert two.incoming[0].unique().tolist() == [7.0]


# ---- relaxation, restriction, cycles --------------------------------------------------------------------------------


class Linear:
    """`Φ(i, u) = a[i] u`, which counts its calls."""

    def __init__(self, a: Tensor) -> None:
        self.a, self.span, self.calls = a, torch.ones_like(a), 0

    def __call__(self, at: slice, state: Tensor) -> Tensor:
        self.calls += 1
        return self.a[at] * state

    def source(self) -> None:
        return None


def level(steps: int, factor: int, sweeps: int = 0, seed: int = 0) -> Level:
    generator = torch.Generator().manual_seed(seed)
    a, u, f = (torch.rand(steps + k, 2, 3, generator=generator, dtype=torch.float64) for k in (0, 1, 1))
    return Level(Linear(a), steps, factor, sweeps, u, f)


def solved(one: Level) -> Tensor:
    state, states = one.u[0], [one.u[0]]
    for i in range(one.steps):
        state = one.propagate.a[i] * state + one.f[i + 1]  # type: ignore[attr-defined]
        states.append(state)
    return torch.stack(states)


@pytest.mark.parametrize("steps", [4, 9, 10, 11, 12])
def test_relaxation_makes_what_it_should_exact(steps: int) -> None:
    """F: every F-point fits its predecessor. C: every C-point does. FCF: nothing is missing on the first interval."""
    one = level(steps, 4)
    f_relax(one)
    fits = one.u[1:] - (one.propagate(slice(0, steps), one.u[:-1]) + one.f[1:])
    is_c = torch.arange(1, steps + 1) % 4 == 0
    assert float(fits[~is_c].abs().max()) < 1e-15
    torch.testing.assert_close(residual(one), -fits[is_c])
    before = one.u.clone()
    c_relax(one, 0.5)
    torch.testing.assert_close(one.u[4::4], before[4::4] - 0.5 * fits[is_c])
    again = level(steps, 4, sweeps=1)
    relax(again, 1.0)
    torch.testing.assert_close(again.u[: min(8, steps + 1)], solved(again)[: min(8, steps + 1)])
    serial(one)
    torch.testing.assert_close(one.u, solved(one))


def test_relaxation_has_no_loop_over_intervals() -> None:
    """Factor − 1 batched evaluations, whatever the number of intervals."""
    for steps in (9, 999):
        one = level(steps, 4)
        f_relax(one)
        assert one.propagate.calls == 3  # type: ignore[attr-defined]


def test_nothing_missing_is_nothing_corrected() -> None:
    one, two = level(21, 4), level(5, 1, seed=1)
    one.u = solved(one)
    before = restrict(one.u[::4].clone(), residual(one), two)
    serial(two)
    torch.testing.assert_close(two.u, before)
    correct(one, two, before)
    torch.testing.assert_close(one.u, solved(one))


def test_a_level_whose_coarse_step_is_exact_is_solved_in_one_cycle() -> None:
    one = level(22, 4)
    f_relax(one)
    products = torch.stack([one.propagate.a[4 * i : 4 * i + 4].prod(0) for i in range(5)])  # type: ignore[attr-defined]
    two = Level(Linear(products), 5, 1, 0, torch.zeros(6, 2, 3).double(), torch.zeros(6, 2, 3).double())
    before = restrict(one.u[::4].clone(), residual(one), two)
    serial(two)
    correct(one, two, before)
    torch.testing.assert_close(one.u, solved(one))


def test_f_cycles_visit_coarse_levels_more_often() -> None:
    calls = {}
    for kind in ("V", "F"):
        a = [torch.full((steps, 1, 1), 0.5, dtype=torch.float64) for steps in (64, 16, 4)]
        propagators, like = [Linear(one) for one in a], torch.zeros(65, 1, 1, dtype=torch.float64)
        levels = coarse_levels(propagators, (4, 4), (1, 1, 1), like)
        hierarchy = Hierarchy(levels, 1.0, kind, lambda missing: float(missing.abs().max()))
        hierarchy.correction(torch.zeros(65, 1, 1, dtype=torch.float64), torch.ones(65, 1, 1, dtype=torch.float64))
        calls[kind] = [one.propagate.calls for one in hierarchy.levels]  # type: ignore[attr-defined]
        assert len(hierarchy.leave()) == 2
    assert calls["F"][1] > 2 * calls["V"][1]
    assert calls["F"][2] > 2 * calls["V"][2]


def test_two_levels_with_f_relaxation_are_parareal() -> None:
    """`s[c+1] = F(s[c]) + G(new s[c]) − G(s[c])`, by hand."""
    net = zoo.network("gru", "gate+4")
    x, initial = (value.detach() for value in zoo.data(net, 24, 2))
    problem = net.recurrence(x, initial)
    cell, u = problem.cell.with_weights(tuple(weight.detach() for weight in problem.cell.weights)), problem.u.detach()
    span = torch.full((2, 1), 6.0, dtype=torch.float64)

    def coarse(c: int, state: Tensor) -> Tensor:
        return cell.coarse("frozen").step(state, u[6 * c : 6 * c + 6].mean(0), span)

    def fine(c: int, state: Tensor) -> Tensor:
        for t in range(6 * c, 6 * c + 6):
            state = cell.step(state, u[t])
        return state

    starts = [initial]
    for c in range(3):
        starts.append(coarse(c, starts[-1]))
    for _ in range(2):
        following = [initial]
        for c in range(3):
            following.append(fine(c, starts[c]) + coarse(c, following[-1]) - coarse(c, starts[c]))
        starts = following
    ends = torch.stack([fine(c, starts[c]) for c in range(3)])
    largest = torch.maximum(ends.abs(), torch.stack(starts[1:]).abs()).amax(-1, keepdim=True)
    scale = largest.clamp(min=0.1)
    solver = MGRIT(coarsening=6, relaxation="F", guess="nested", max_iters=2, on_divergence="ignore")
    report = zoo.solve(net, x, initial, solver).report
    assert report.iterations == 2
    expected = float(((ends - torch.stack(starts[1:])).abs() / scale).max())
    assert report.residuals[1] == pytest.approx(expected, rel=1e-9)


def test_a_cycle_is_two_sweeps_whatever_the_number_of_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    sweeps: list[int] = []
    forward = ReferenceSweeper.forward

    def counted(self: ReferenceSweeper, segments: Any, *rest: Any) -> Any:
        sweeps.append(len(segments))
        return forward(self, segments, *rest)

    monkeypatch.setattr(ReferenceSweeper, "forward", counted)
    net = zoo.network("gru", "gate+4")
    for chunks in (4, 40):
        x, initial = zoo.data(net, 4 * chunks, 2)
        sweeps.clear()
        report = zoo.solve(
            net, x, initial, MGRIT(coarsening=4, cycles=1, guess="initial", on_divergence="ignore")
        ).report
        assert report.iterations == 1
        assert sweeps[0] == 2 * chunks
        assert len(sweeps) == 4, "F, then C F, then the correction and F, then C F to end with"


# ---- a coarse step of one's own -----------------------------------------------------------------------------------


def leaky(h: Tensor, x: Tensor) -> Tensor:
    return 0.98 * h + 0.02 * torch.tanh(x + 0.5 * h.flip(-1))


def test_a_coarse_step_of_ones_own() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 2, 4, generator=generator, dtype=torch.float64).requires_grad_()
    h0 = torch.zeros(2, 4, dtype=torch.float64).requires_grad_()
    spans = set()

    def own(h: Tensor, x: Tensor, span: Tensor) -> Tensor:
        spans.update(span.flatten().tolist())
        kept = 0.98**span
        return kept * h + (1 - kept) * torch.tanh(x + 0.5 * h.flip(-1))

    states, report = tl.unroll(leaky, h0, x, MGRIT(levels=3, coarsening=4, coarse=own))
    truth, _ = tl.unroll(leaky, h0, x, "sequential")
    torch.testing.assert_close(states, truth, rtol=1e-12, atol=1e-13)
    given, expected = (torch.autograd.grad(out.sin().sum(), (x, h0)) for out in (states, truth))
    torch.testing.assert_close(given, expected, rtol=1e-11, atol=1e-13)
    assert {4.0, 16.0} <= spans
    assert not report.fell_back
    assert "your own coarse steps" in report.reason


def test_a_coarse_step_of_ones_own_is_called_alike_in_every_call() -> None:
    """Once a cell has run enough steps it is compiled, and kernels know states and inputs of another form."""
    seen = set[tuple[torch.dtype, int]]()

    def own(state: tuple[Tensor, Tensor], x: Tensor, span: Tensor) -> tuple[Tensor, Tensor]:
        h, c = state
        seen.add((h.dtype, x.shape[1]))
        kept = 0.98**span
        return kept * h + (1 - kept) * torch.tanh(c), kept * c + (1 - kept) * (x[:, :4] + h)

    class Cell(nn.Module):
        def forward(self, state: tuple[Tensor, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
            h, c = state
            return 0.98 * h + 0.02 * torch.tanh(c), 0.98 * c + 0.02 * (x[:, :4] + h)

    cell, x, h0 = Cell(), torch.randn(200, 2, 5), (torch.zeros(2, 4), torch.zeros(2, 4))
    truth, _ = tl.unroll(cell, h0, x, "sequential")
    for _ in range(5):
        states, report = tl.unroll(cell, h0, x, MGRIT(coarsening=4, coarse=own, guess="initial"))
        torch.testing.assert_close(states, truth, rtol=0, atol=1e-5)
    assert seen == {(torch.float32, 5)}
    assert "not fused: the coarse step is written for the cell's own states and inputs" in report.reason


def test_a_cell_that_mixes_rows_is_refused_beside_a_coarse_step_of_ones_own() -> None:
    with pytest.raises(ValueError, match="a cell must treat rows independently"):
        tl.unroll(
            lambda h, x: 0.5 * h + 0.1 * x.softmax(0), torch.zeros(3, 4), torch.randn(64, 3, 4),
            MGRIT(coarsening=4, coarse=lambda h, x, span: h),
        )  # fmt: skip


def test_a_tuple_as_state_comes_to_ones_own_step_as_a_tuple() -> None:
    def cell(state: tuple[Tensor, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        position, speed = state
        return position + 0.1 * speed, 0.9 * speed + x

    def own(state: tuple[Tensor, Tensor], x: Tensor, span: Tensor) -> tuple[Tensor, Tensor]:
        position, speed = state
        return position + 0.1 * span * speed, 0.9**span * speed + x

    x = torch.randn(60, 2, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    h0 = (torch.zeros(2, 1, dtype=torch.float64), torch.ones(2, 1, dtype=torch.float64))
    states, report = tl.unroll(cell, h0, x, MGRIT(coarsening=5, coarse=own))
    truth, _ = tl.unroll(cell, h0, x, "sequential")
    torch.testing.assert_close(states, truth, rtol=1e-11, atol=1e-12)
    assert report.solver.startswith("mgrit")


@pytest.mark.parametrize(
    ("own", "error", "message"),
    [
        (lambda h, x, span: h[:, :2], ValueError, r"the coarse step returned a state of shape \[\(.*, 2\)\]"),
        (lambda h, x, span: (h, h), TypeError, "the coarse step returned tuple, expected a tensor"),
        (lambda h, x, span: None, TypeError, "the coarse step returned NoneType"),
    ],
)
def test_a_coarse_step_of_the_wrong_shape_is_named(own: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        tl.unroll(leaky, torch.zeros(2, 4), torch.randn(64, 2, 4), MGRIT(coarsening=4, coarse=own))


def test_a_wrong_coarse_step_for_a_module_is_named() -> None:
    gru = tl.GRU(2, 3, solver=MGRIT(coarsening=4, guess="initial", coarse=lambda h, x, span: h.sum()))
    with pytest.raises(ValueError, match=r"the coarse step returned \(\), expected a state of shape"):
        gru(torch.randn(40, 2, 2))


def test_tokens_have_no_mean() -> None:
    """Whole numbers as inputs: the coarse step reads the first of its interval."""
    table = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def cell(h: Tensor, x: Tensor) -> Tensor:
        return 0.9 * h + table[x.squeeze(-1)]

    tokens = torch.randint(0, 5, (50, 2, 1), generator=torch.Generator().manual_seed(1))
    h0 = torch.zeros(2, 3, dtype=torch.float64)
    states, report = tl.unroll(cell, h0, tokens, MGRIT(levels=3, coarsening=3))
    truth, _ = tl.unroll(cell, h0, tokens, "sequential")
    torch.testing.assert_close(states, truth, rtol=1e-12, atol=1e-12)
    assert not report.fell_back
