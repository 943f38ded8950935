"""`odeint` against closed forms, torchdiffeq and its own sequential run: values, orders, gradients, bad input."""

from __future__ import annotations

import math

import pytest
import torch
import torchdiffeq
from torch import Tensor, nn
from torch.autograd import gradcheck
from zoo import difference

import timeloom as tl
from timeloom.ode import advance, trajectory
from timeloom.ode.exponential import matrix_exp
from timeloom.ode.field import Field
from timeloom.ode.steps import STEPS
from timeloom.ode.steps.base import exact_transfers
from timeloom.solvers import DEER, Shooting

pytestmark = pytest.mark.usefixtures("one_thread")

ORDERS = {name: step.order for name, step in STEPS.items()}
EXACT = torch.float64


class Network(nn.Module):
    """A small neural ODE that looks at the time too."""

    def __init__(self, n: int = 3, width: int = 8, dtype: torch.dtype = EXACT) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(n + 1, width), nn.Tanh(), nn.Linear(width, n)).to(dtype)

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return self.net(torch.cat([y, torch.sin(2 * t).expand(*y.shape[:-1], 1)], -1))


def network(n: int = 3, dtype: torch.dtype = EXACT, scale: float = 1.0) -> Network:
    """With weights from a seed, times `scale`."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        made = Network(n, dtype=dtype)
        for parameter in made.parameters():
            parameter *= scale
        return made


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=EXACT)


def times(steps: int, end: float) -> Tensor:
    """From 0 to end in unequal steps."""
    return end * torch.linspace(0, 1, steps + 1, dtype=EXACT) ** 1.2


def kepler(t: Tensor, y: Tensor) -> Tensor:
    q, p = y[..., :2], y[..., 2:]
    return torch.cat([p, -q / q.norm(dim=-1, keepdim=True) ** 3], -1)


def lorenz(t: Tensor, y: Tensor) -> Tensor:
    a, b, c = y.unbind(-1)
    return torch.stack([10 * (b - a), a * (28 - c) - b, a * b - 8 / 3 * c], -1)


def van_der_pol(t: Tensor, y: Tensor) -> Tensor:
    a, b = y.unbind(-1)
    return torch.stack([b, 10 * (1 - a * a) * b - a], -1)


def solve(f: object, y0: Tensor, t: Tensor, **options: object) -> tuple[Tensor, tl.SolveReport]:
    reports: list[tl.SolveReport] = []
    return tl.odeint(f, y0, t, record=reports.append, **options), reports[0]


def gradients(f: object, y: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """Of a loss that weighs all points, by these leaves and the parameters of f."""
    parameters = list(f.parameters()) if isinstance(f, nn.Module) else []
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(2), dtype=EXACT).to(y.dtype)
    return list(torch.autograd.grad((y * weights).sum(), [*leaves, *parameters]))


PROBLEMS = {
    "network": (network(), draw(2, 3), times(50, 4.0)),
    "network, one step": (network(), draw(2, 3), times(1, 0.3)),
    "network, two steps": (network(), draw(1, 3), times(2, 0.3)),
    "network, coarse": (network(), draw(2, 3), times(7, 6.0)),
    "network ×4": (network(scale=4.0), draw(2, 3), times(33, 0.7)),
    "network ×8": (network(scale=8.0), draw(3, 3), times(33, 0.2)),
    "orbit": (kepler, torch.tensor([[1.0, 0, 0, 1.2]], dtype=EXACT), times(43, 7.0)),
    "stiff": (van_der_pol, torch.tensor([[2.0, 0.0], [-1.0, 1.0]], dtype=EXACT), times(47, 1.0)),
    "chaos": (lorenz, torch.tensor([[1.0, 1.0, 1.0]], dtype=EXACT), times(41, 0.7)),
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("problem", PROBLEMS)
def test_it_is_the_sequential_run(problem: str, step: str) -> None:
    """The points and all gradients, those of the times too."""
    f, y0, t = PROBLEMS[problem]
    results = []
    for solver in ("deer", "sequential"):
        y0, t = (tensor.detach().clone().requires_grad_() for tensor in (y0, t))
        y, report = solve(f, y0, t, solver=solver, step=step)
        results.append([y, *gradients(f, y, [y0, t])])
        assert report.converged
        if solver == "deer":
            assert report.residuals[-1] <= report.tolerance
            assert report.backward.converged
            assert report.backward.residuals[-1] <= report.backward.tolerance
    for given, expected in zip(*results, strict=True):
        assert difference(given, expected) < 1e-10


@pytest.mark.parametrize("step", STEPS)
def test_converges_to_torchdiffeq_with_the_order_of_the_step(step: str) -> None:
    f, y0 = network(), draw(4, 3)
    t = times(20, 4.0)

    def scalar(time: Tensor, y: Tensor) -> Tensor:
        return f(time.expand(len(y), 1), y)

    truth = torchdiffeq.odeint(scalar, y0, t, method="dopri8", rtol=1e-12, atol=1e-13, options={"step_t": t})
    errors = []
    for finer in (2, 4):
        fine = torch.cat([torch.lerp(t[:-1], t[1:], k / finer) for k in range(finer)]).sort().values
        y = tl.odeint(f, y0, torch.cat([fine, t[-1:]]), step=step)
        errors.append(difference(y[::finer], truth))
    assert errors[1] < 1e-3
    assert abs(math.log2(errors[0] / errors[1]) - ORDERS[step]) < 0.35


@pytest.mark.parametrize("step", STEPS)
def test_gradients_approach_torchdiffeqs(step: str) -> None:
    f, y0 = network(), draw(2, 3).requires_grad_()
    t = torch.linspace(0, 3, 401, dtype=EXACT)
    given = gradients(f, tl.odeint(f, y0, t, step=step)[::100], [y0])
    truth = torchdiffeq.odeint(lambda time, y: f(time.expand(len(y), 1), y), y0, t[::100], rtol=1e-11, atol=1e-12)
    for one, other in zip(given, gradients(f, truth, [y0]), strict=True):
        assert difference(one, other) < (1e-8 if ORDERS[step] == 4 else 1e-4)


@pytest.mark.parametrize("step", STEPS)
def test_gradcheck(step: str) -> None:
    f = network(2)
    parameters = [parameter.detach().clone().requires_grad_() for parameter in f.parameters()]
    names = [name for name, _ in f.named_parameters()]

    def run(y0: Tensor, t: Tensor, *values: Tensor) -> Tensor:
        def field(time: Tensor, y: Tensor) -> Tensor:
            return torch.func.functional_call(f, dict(zip(names, values, strict=True)), (time, y))

        return tl.odeint(field, y0, t, step=step)

    assert gradcheck(run, (draw(2, 2).requires_grad_(), times(6, 2.0).requires_grad_(), *parameters), fast_mode=True)


def test_the_linearised_step_is_exact_for_linear_equations() -> None:
    """Whatever the step, and where the matrix has no inverse."""
    matrix = torch.tensor([[0.0, 2.0, 0.0], [-2.0, -0.3, 0.0], [0.0, 0.0, 0.0]], dtype=EXACT)
    push = torch.tensor([0.3, -0.1, 0.5], dtype=EXACT)
    y0, t = draw(2, 3), times(5, 20.0)
    y = tl.odeint(lambda time, y: y @ matrix.t() + push, y0, t, step="deer")
    block = torch.zeros(4, 4, dtype=EXACT)
    block[:3, :3], block[:3, 3] = matrix, push
    exact = torch.stack([(torch.cat([y0, torch.ones(2, 1)], 1) @ (s * block).matrix_exp().t())[:, :3] for s in t])
    assert difference(y, exact) < 1e-12


def test_implicit_midpoint_keeps_quadratic_invariants() -> None:
    """Angular momentum of an orbit, to rounding, with steps as coarse as these."""
    y = tl.odeint(kepler, torch.tensor([1.0, 0, 0, 1.1], dtype=EXACT), times(200, 40.0), step="implicit-midpoint")
    momentum = y[:, 0] * y[:, 3] - y[:, 1] * y[:, 2]
    assert float((momentum - 1.1).abs().max()) < 1e-12


@pytest.mark.parametrize("step", ["implicit-midpoint", "hermite-simpson", "deer"])
def test_steps_for_stiff_equations_stay_stable(step: str) -> None:
    """A slow solution beside a decay 1e4 times faster than the steps: a Runge–Kutta step would explode."""
    rates = torch.tensor([-1e6, -1.0], dtype=EXACT)
    t = torch.linspace(0, 1, 101, dtype=EXACT)

    def f(time: Tensor, y: Tensor) -> Tensor:
        return rates * (y - torch.cos(time)) - torch.sin(time)

    y, report = solve(f, torch.ones(2, dtype=EXACT), t, step=step)
    assert not y.requires_grad
    assert report.converged
    assert not report.fell_back
    # the linearised step holds what pushes the solution constant over a step: half a step late in the stiff limit
    assert float((y - torch.cos(t).unsqueeze(-1)).abs().max()) < (6e-3 if step == "deer" else 1e-4)


def test_shapes_follow_y0() -> None:
    f, t = network(), times(9, 1.0)
    y0 = draw(2, 5, 3)
    y = tl.odeint(f, y0, t)
    assert y.shape == (10, 2, 5, 3)
    assert torch.equal(y[0], y0)
    assert difference(tl.odeint(f, y0[1, 2], t), y[:, 1, 2]) < 1e-13
    assert torch.equal(tl.odeint(f, y0, t[:1]), y0.unsqueeze(0))


def test_one_time_alone_still_has_gradients_and_a_report() -> None:
    y0 = draw(2, 3).requires_grad_()
    y, report = solve(network(), y0, times(1, 1.0)[:1])
    y.sum().backward()
    assert torch.equal(y0.grad, torch.ones_like(y0))
    assert report.converged


@pytest.mark.parametrize("solver", ["shooting", "auto", Shooting(chunk=7, correction="newton", warmup=0)], ids=str)
@pytest.mark.parametrize("step", ["rk4", "implicit-midpoint"])
def test_solvers_of_unroll(solver: object, step: str) -> None:
    f = network()
    results = []
    for way in (solver, "sequential"):
        y0, t = draw(2, 3).requires_grad_(), times(40, 3.0).requires_grad_()
        y = tl.odeint(f, y0, t, solver=way, step=step)
        results.append([y, *gradients(f, y, [y0, t])])
    for given, expected in zip(*results, strict=True):
        assert difference(given, expected) < 1e-12


@pytest.mark.parametrize("step", STEPS)
def test_float32(step: str) -> None:
    """As close to float64 as rounding allows, over many steps."""
    t = torch.linspace(0, 5, 2001)
    exact = tl.odeint(network(), draw(2, 3).float().double(), t.double(), step=step)
    f = network(dtype=torch.float32)
    y0 = draw(2, 3).float().requires_grad_()
    y, report = solve(f, y0, t, step=step)
    y.sum().backward()
    assert y.dtype == torch.float32
    assert report.converged
    assert report.backward.converged
    assert difference(y.double(), exact) < 2e-6


def test_misses_too_small_to_see_do_not_add_up() -> None:
    """A guess that drifts off a solution at rest: each step misses by less than rounding, all together by 1e-4."""
    y0, t = torch.tensor([1.0, 1e-3]), torch.arange(2001.0)
    guess = y0 + torch.stack([torch.zeros_like(t), 5e-8 * t], -1)
    for step in STEPS:
        y = tl.odeint(lambda time, y: torch.zeros_like(y), y0, t, step=step, guess=guess)
        assert float((y - y0).abs().max()) < 1e-9


def test_a_guess_saves_newton_steps_and_changes_nothing() -> None:
    f, y0, t = PROBLEMS["orbit"]
    y, cold = solve(f, y0, t)
    again, warm = solve(f, y0, t, guess=y)
    assert warm.iterations < cold.iterations
    assert difference(again, y) < 1e-13
    useless, _ = solve(f, y0, t, guess=torch.full_like(y, torch.nan))
    assert difference(useless, y) < 1e-13


def test_chaos_is_solved_in_windows() -> None:
    """Over 12 time units a change grows a millionfold: no Newton step from afar survives that at once."""
    y0, t = torch.tensor([[1.0, 1.0, 1.0]], dtype=EXACT), torch.linspace(0, 12, 1201, dtype=EXACT)
    y, report = solve(lorenz, y0, t)
    assert report.converged
    assert "windows" in report.reason
    assert difference(y[:601], tl.odeint(lorenz, y0, t[:601], solver="sequential")) < 1e-9


def test_long_trajectories_are_solved_within_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    f, y0, t = PROBLEMS["network"]
    results = []
    for most in (trajectory.MOST_ELEMENTS, 12 * 18):
        monkeypatch.setattr(trajectory, "MOST_ELEMENTS", most)
        y0, t = (tensor.detach().clone().requires_grad_() for tensor in (y0, t))
        y, report = solve(f, y0, t)
        results.append([y, *gradients(f, y, [y0, t])])
        assert report.converged
        assert report.backward.converged
    assert "windows" in report.reason
    for given, expected in zip(*results, strict=True):
        assert difference(given, expected) < 1e-13


def test_a_solution_that_blows_up_says_so() -> None:
    """y' = y² from 1 is infinite at time 1."""
    y, report = solve(lambda t, y: y.square(), torch.ones(1, dtype=EXACT), torch.linspace(0, 3, 101, dtype=EXACT))
    assert not report.converged
    last = int(report.reason.split("not finite after step ")[1])
    assert bool(y[last].isfinite().all())
    assert not bool(y[last + 1 :].isfinite().any())
    assert 33 <= last < 50  # a Runge–Kutta run gets past the pole by a few steps
    assert abs(float(y[20, 0]) - 1 / (1 - 0.6)) < 1e-3


def test_a_name_and_an_object_are_the_same_solver() -> None:
    f, y0, t = PROBLEMS["orbit"]
    y, report = solve(f, y0, t)
    by_object, same = solve(f, y0, t, solver=DEER())
    assert torch.equal(y, by_object)
    assert (same.solver, same.residuals) == (report.solver, report.residuals)
    assert torch.equal(y, tl.odeint(f, y0, t, guess=y, solver=DEER(tol=1.0)))
    rough, few = solve(f, y0, t, solver=DEER(tol=1e-3))
    assert few.tolerance == 1e-3
    assert few.iterations < report.iterations
    assert 0 < difference(rough, y) < 1e-2
    with pytest.raises(tl.ConvergenceError, match="deer"):
        tl.odeint(f, y0, t, solver=DEER(max_iters=1, on_divergence="raise"))
    for option in ({"precision": "bfloat16"}, {"adjoint": "sequential"}, {"on_divergence": "ignore"}):
        with pytest.raises(ValueError, match=f"odeint has no {next(iter(option))}="):
            tl.odeint(f, y0, t, solver=DEER(**option))


def test_newton_falls_back_to_the_plain_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no Newton step is allowed, every step is run after the other, and the result is the same."""
    monkeypatch.setattr(trajectory, "MOST_ITERS", 0)
    f, y0, t = PROBLEMS["orbit"]
    for step in ("rk4", "implicit-midpoint"):
        y, report = solve(f, y0, t, step=step)
        assert report.fell_back
        assert report.converged
        assert "one after the other" in report.reason
        assert difference(y, tl.odeint(f, y0, t, solver="sequential", step=step)) < 1e-12


@pytest.mark.parametrize("step", STEPS)
def test_transfers_are_near_the_exact_ones(step: str) -> None:
    """And nearer with smaller steps: what they leave out is O(h²) or smaller."""
    field, errors = Field(network()), []
    for steps in (8, 16):
        t = torch.linspace(0, 1, steps + 1, dtype=EXACT).view(-1, 1, 1)
        y = tl.odeint(network(), draw(2, 3), t.flatten(), step=step).detach()
        with torch.no_grad():
            own = STEPS[step].evaluate(field, t, y).transfers()
            exact = exact_transfers(STEPS[step], field, t, y)
        errors.append(difference(own.across, exact.across))
    assert errors[1] < 1e-2
    assert errors[1] <= max(0.3 * errors[0], 1e-15)


def test_the_exponential() -> None:
    for size in (0.0, 1e-8, 1e-2, 0.3, 1.0, 5.0, 40.0):
        matrices = size * draw(6, 3, 4, 4)
        matrices = (matrices - matrices.mT) / 2 + size * 0.01 * draw(6, 3, 4, 4)
        assert difference(matrix_exp(matrices), torch.linalg.matrix_exp(matrices)) < 1e-12
        alone = torch.stack([matrix_exp(matrix) for matrix in matrices.flatten(0, 1)]).view_as(matrices)
        assert difference(alone, matrix_exp(matrices)) < 1e-15
    assert gradcheck(matrix_exp, (draw(2, 3, 3).requires_grad_(),))
    assert not bool(matrix_exp(torch.full((2, 2), torch.inf)).isfinite().all())


def test_what_f_holds_gets_gradients_and_nothing_else_does() -> None:
    y0, t = draw(2, 3), times(10, 1.0)
    f = network()
    for parameter in f.net[0].parameters():
        parameter.requires_grad_(False)
    tl.odeint(f, y0, t).sum().backward()
    assert f.net[0].weight.grad is None
    assert f.net[2].weight.grad is not None
    assert y0.grad is None
    with torch.no_grad():
        assert not tl.odeint(f, y0, t).requires_grad


def test_inference_mode() -> None:
    f, y0, t = PROBLEMS["network"]
    expected = tl.odeint(f, y0, t)
    with torch.inference_mode():
        for given in (y0, y0.clone()):
            for solver in ("deer", "sequential"):
                assert difference(tl.odeint(f, given, t + 0, solver), expected) < 1e-13
            assert difference(tl.odeint(f, given, t, guess=expected + 0), expected) < 1e-13


def test_a_field_without_parameters_or_states() -> None:
    """A constant field: no derivative by y anywhere."""
    t = times(10, 2.0).requires_grad_()
    for step in STEPS:
        y0 = draw(2, 3).requires_grad_()
        y = tl.odeint(lambda time, y: torch.ones_like(y), y0, t, step=step)
        assert difference(y, y0 + t.view(-1, 1, 1)) < 1e-14
        y[-1].sum().backward()
        assert torch.equal(y0.grad, torch.ones_like(y0))


def test_second_order_gradients_are_refused_and_the_sequential_run_has_them() -> None:
    f, t = network(), times(10, 1.0)
    y0 = draw(2, 3).requires_grad_()
    (slope,) = torch.autograd.grad(tl.odeint(f, y0, t, solver="sequential").square().sum(), y0, create_graph=True)
    assert slope.requires_grad
    with pytest.raises(RuntimeError, match="solver='sequential'"):
        torch.autograd.grad(tl.odeint(f, y0, t).square().sum(), y0, create_graph=True)


def test_bad_times() -> None:
    f, y0 = network(), draw(2, 3)
    with pytest.raises(ValueError, match=r"t must increase, but t\[1\] = 1 is followed by t\[2\] = 0.5.*s = -t"):
        tl.odeint(f, y0, torch.tensor([0.0, 1.0, 0.5], dtype=EXACT))
    with pytest.raises(ValueError, match="t must increase"):
        tl.odeint(f, y0, torch.tensor([0.0, 1.0, 1.0], dtype=EXACT))
    with pytest.raises(ValueError, match=r"t must increase.*float32"):
        tl.odeint(network(dtype=torch.float32), y0.float(), torch.tensor([1.0, 1.0 + 1e-12], dtype=EXACT))
    with pytest.raises(ValueError, match="finite"):
        tl.odeint(f, y0, torch.tensor([0.0, torch.nan], dtype=EXACT))
    with pytest.raises(ValueError, match=r"vector of times, got shape \(2, 1\)"):
        tl.odeint(f, y0, torch.zeros(2, 1))
    with pytest.raises(ValueError, match=r"got shape \(0,\)"):
        tl.odeint(f, y0, torch.zeros(0))
    with pytest.raises(TypeError, match="t must be a Tensor, got list"):
        tl.odeint(f, y0, [0.0, 1.0])


def test_bad_fields_states_and_options() -> None:
    f, y0, t = network(), draw(2, 3), times(5, 1.0)
    with pytest.raises(TypeError, match="f must be a function"):
        tl.odeint(3, y0, t)
    with pytest.raises(ValueError, match=r"returned shape \(.*, 1\) for y of shape"):
        tl.odeint(lambda time, y: y[:, :1], y0, t)
    with pytest.raises(TypeError, match=r"returned torch.float32 for y of torch.float64"):
        tl.odeint(lambda time, y: y.float(), y0, t)
    with pytest.raises(TypeError, match="returned tuple, expected a tensor"):
        tl.odeint(lambda time, y: (y,), y0, t)
    with pytest.raises(TypeError, match=r"y0 must be float32 or float64, got torch.float16"):
        tl.odeint(f, y0.half(), t)
    with pytest.raises(TypeError, match="y0 must be a Tensor, got tuple"):
        tl.odeint(f, (y0,), t)
    with pytest.raises(ValueError, match="y0 must be finite"):
        tl.odeint(f, y0 / 0, t)
    with pytest.raises(ValueError, match=r"y0 must have shape"):
        tl.odeint(f, y0[:0], t)
    with pytest.raises(ValueError, match=r"step must be one of 'rk4', 'implicit-midpoint'.*got 'euler'"):
        tl.odeint(f, y0, t, step="euler")
    with pytest.raises(ValueError, match="solver must be one of"):
        tl.odeint(f, y0, t, solver="magic")
    with pytest.raises(ValueError, match=r"guess has shape \(5, 2, 3\), expected \(6, 2, 3\)"):
        tl.odeint(f, y0, t, guess=draw(5, 2, 3))
    with pytest.raises(ValueError, match=r"guess is torch.float32"):
        tl.odeint(f, y0, t, guess=draw(6, 2, 3).float())
    with pytest.raises(ValueError, match="guess= is for solver='deer'"):
        tl.odeint(f, y0, t, guess=draw(6, 2, 3), solver="sequential")
    with pytest.raises(TypeError, match="guess must be a Tensor"):
        tl.odeint(f, y0, t, guess=3)


@pytest.mark.parametrize("solver", ["sequential", "deer"])
@pytest.mark.parametrize(("stiffness", "start", "length"), [(20.0, 3.0, 4.0), (100.0, 10.0, 2.0)])
def test_implicit_steps_from_far_away_are_solved(solver: str, stiffness: float, start: float, length: float) -> None:
    """Newton's method alone overshoots here; the equation has exactly one solution."""
    t = torch.linspace(0, length, 9, dtype=torch.float64)

    def f(t: Tensor, y: Tensor) -> Tensor:
        return -stiffness * torch.atan(y)

    y = tl.odeint(f, torch.tensor([start], dtype=torch.float64), t, solver, "implicit-midpoint")
    middle = (y[1:] + y[:-1]) / 2
    miss = y[1:] - y[:-1] - (t[1:] - t[:-1]).unsqueeze(-1) * f(t, middle)
    assert float(miss.abs().max()) < 1e-10


def test_an_equation_without_a_solution_gives_nan() -> None:
    """y₁ = y₀ + h (1 + m²), m the middle: no real solution for large steps. Nothing is made up."""
    t = torch.tensor([0.0, 0.1, 5.0, 5.1], dtype=torch.float64)
    for solver in ("sequential", "deer"):
        y = tl.odeint(lambda t, y: 1 + y * y, torch.zeros(1, dtype=torch.float64), t, solver, "implicit-midpoint")
        assert bool(y[:2].isfinite().all())
        assert bool(y[2:].isnan().all())


def test_a_sequence_that_blows_up_leaves_the_others_alone() -> None:
    y0 = torch.tensor([[1.0], [-1.0], [-2.0]], dtype=torch.float64)
    t, reports = torch.linspace(0, 2, 201, dtype=torch.float64), []
    y = tl.odeint(lambda t, y: y * y, y0, t, record=reports.append)
    alone = tl.odeint(lambda t, y: y * y, y0[1:], t)
    assert difference(y[:, 1:], alone) < 1e-12
    assert not bool(y[-1, 0].isfinite())
    assert not reports[0].converged
    assert "NOT converged" in str(reports[0])


@pytest.mark.parametrize("solver", ["deer", "sequential"])
@pytest.mark.parametrize("step", STEPS)
def test_a_sequence_at_a_pole_does_not_hold_up_the_others(step: str, solver: str) -> None:
    """y' = y² from 1 has its pole at t = 1, where some steps have no solution and others a huge one."""
    t = torch.linspace(0, 1, 101, dtype=EXACT)

    def run(*starts: float) -> tuple[Tensor, Tensor]:
        y0 = torch.tensor(starts, dtype=EXACT).unsqueeze(-1).requires_grad_()
        y = tl.odeint(lambda t, y: y * y, y0, t, solver, step)[:, -2:]
        return y.detach(), torch.autograd.grad(y[-1].sum(), y0)[0][-2:]

    (y, grad), (y_alone, grad_alone) = run(1.0, -1.0, 0.3), run(-1.0, 0.3)
    assert difference(y, y_alone) < 1e-13
    assert difference(grad, grad_alone) < 1e-13


def test_a_step_that_has_no_solution_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Near a pole ever shorter parts of this step have a solution, thousands of them."""
    attempts: list[bool] = []
    fit = advance.fit
    monkeypatch.setattr(advance, "fit", lambda *args: attempts.append(True) or fit(*args))
    t = 0.005 * torch.arange(6, dtype=EXACT)
    y = tl.odeint(lambda t, y: y * y, torch.full((1,), 100.0, dtype=EXACT), t, "sequential", "deer")
    assert bool(y[-1].isnan())
    assert len(attempts) < 200


def test_what_f_holds_may_act_late() -> None:
    rate = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    t = torch.linspace(0, 1, 101, dtype=torch.float64)

    def f(t: Tensor, y: Tensor) -> Tensor:
        late = t > 0.5
        return -y + torch.where(late, rate * y, 0 * y) if bool(late.any()) else -y

    grads = []
    for solver in ("deer", "sequential"):
        rate.grad = None
        tl.odeint(f, torch.ones(1, 1, dtype=torch.float64), t, solver)[-1].sum().backward()
        grads.append(rate.grad)
    assert difference(*grads) < 1e-10


@pytest.mark.parametrize("step", [name for name, step in STEPS.items() if not step.explicit])
def test_second_order_gradients_of_implicit_steps_are_refused(step: str) -> None:
    y0 = torch.ones(1, 1, dtype=torch.float64, requires_grad=True)
    y = tl.odeint(lambda t, y: y.sin(), y0, torch.linspace(0, 1, 11, dtype=torch.float64), "sequential", step)
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        torch.autograd.grad(y[-1].sum(), y0, create_graph=True)
