"""`odeint`: the public, differentiable solver of ordinary differential equations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from timeloom.distributed.context import on_this_rank
from timeloom.ode.adjoint import OnTape
from timeloom.ode.advance import TWICE_DIFFERENTIABLE, as_cell
from timeloom.ode.field import Field, Function
from timeloom.ode.steps import STEPS, Step
from timeloom.ode.trajectory import Problem, solve_trajectory
from timeloom.options import check_choice
from timeloom.report import ConvergenceError, SolveReport
from timeloom.solvers.base import Solver, resolve
from timeloom.solvers.newton import DEER
from timeloom.torch_state.eager import eager
from timeloom.torch_state.transforms import refuse_transforms
from timeloom.unroll import unroll


@eager
def odeint(
    f: Function,
    y0: Tensor,
    t: Tensor,
    solver: str | Solver = "deer",
    step: str = "rk4",
    *,
    guess: Tensor | None = None,
    record: Callable[[SolveReport], None] | None = None,
) -> Tensor:
    """Solve `dy/dt = f(t, y)` from `y(t[0]) = y0`, one step between neighbouring times; differentiable.

    f: a function or nn.Module `f(t, y) -> dy/dt`, batched over rows: t `(N, 1)`, y and dy/dt `(N, n)`. Rows are points
        of all times and sequences, and must not depend on each other.
    y0: first point, `(..., n)`, with any batch dimensions in front.
    t: times, `(T + 1,)`, increasing; steps need not be equal.
    solver: `deer` or `DEER()` (Newton's method on the whole trajectory; of its options `tol`, `max_iters` and
        `on_divergence="raise"`), `sequential`, or any other solver of `timeloom.unroll`.
    step: what connects neighbouring points. `rk4` (order 4), `implicit-midpoint` (order 2; stiff or Hamiltonian
        equations), `hermite-simpson` (order 4, stiff), or `deer` (the linearised equation solved exactly in every
        interval; order 2, exact for linear equations).
    guess: for Newton's method, a trajectory to start from, of the result's shape, such as the last one in training.
    record: called with the report of the solve, and again once it holds the backward pass.
    Returns y at all times, `(T + 1, ..., n)`, with gradients for y0, t and whatever f holds. A sequence is NaN from the
    first step whose equation could not be solved, or after which it is infinite.
    """
    if torch.is_inference_mode_enabled():  # Jacobians need a tape
        with torch.inference_mode(False), torch.no_grad():
            return odeint(f, _normal(y0), _normal(t), solver, step, guess=_normal(guess), record=record)
    check_choice("step", step, tuple(STEPS))
    if not (STEPS[step].explicit and resolve(solver).on_tape):
        refuse_transforms(f"odeint(solver={solver!r}, step={step!r})", TWICE_DIFFERENTIABLE)
    _check(f, y0, t)
    newton = _newton_of(solver)
    _check_guess(guess, y0, t, solver, newton)
    t = t.to(y0.dtype)
    rows = y0.reshape(-1, y0.shape[-1])
    note = record or (lambda _: None)
    field = Field(f)
    if len(t) == 1:
        note(SolveReport.sequential(0, "no steps"))
        return y0.unsqueeze(0)
    if newton is not None:
        start = None if guess is None else guess.detach().reshape(len(t), *rows.shape)
        y = _newton(newton, field, rows, t, STEPS[step], start, note)
    else:
        times = torch.stack([t[:-1], t[1:]], -1).unsqueeze(1).expand(-1, len(rows), 2)
        with on_this_rank():  # ranks do not share an ODE's time
            states, report = unroll(as_cell(STEPS[step], field), rows, times, solver)
        note(report)
        assert isinstance(states, Tensor)
        y = torch.cat([rows.unsqueeze(0), states])
    return y.reshape(len(t), *y0.shape)


def _newton_of(solver: str | Solver) -> DEER | None:
    """The options of Newton's method on the whole trajectory, if `solver` is that; None for what `unroll` runs."""
    resolved = resolve(solver)
    if type(resolved) is not DEER:
        return None
    for name in ("precision", "adjoint", "adjoint_levels", "on_divergence"):
        if getattr(resolved, name) not in (getattr(DEER, name), "raise"):
            raise ValueError(
                f"odeint has no {name}={getattr(resolved, name)!r}: its Newton's method on a trajectory takes tol, "
                "max_iters and on_divergence='raise' of DEER's options. Leave it out, or run the step as a cell by "
                "timeloom.unroll"
            )
    return resolved


def _newton(
    solver: DEER,
    field: Field,
    y0: Tensor,
    t: Tensor,
    step: Step,
    guess: Tensor | None,
    note: Callable[[SolveReport], None],
) -> Tensor:
    times = t.view(-1, 1, 1)
    problem = Problem(step, field, times.detach(), y0.detach(), solver.tol, solver.max_iters)
    with torch.no_grad():
        y, report = solve_trajectory(problem, guess)
    if solver.on_divergence == "raise" and not _by_newton(report):
        raise ConvergenceError(report)
    note(report)
    if not _needs_grad(field, y0, times, y):
        return y

    def add_backward(backward: SolveReport) -> None:
        object.__setattr__(report, "backward", backward)  # filled in later: the user may hold this report already
        note(report)

    result: Tensor = OnTape.apply(problem, y, add_backward, step.evaluate(field, times, y).residual, y0)
    return result


def _by_newton(report: SolveReport) -> bool:
    """Whether Newton's method met the tolerance, with no steps run sequentially."""
    return report.converged and not report.fell_back


def _normal(value: Any) -> Any:
    """A copy that a tape may hold, of a tensor made in inference mode."""
    return value.clone() if isinstance(value, Tensor) else value


def _needs_grad(field: Field, y0: Tensor, times: Tensor, y: Tensor) -> bool:
    """Whether anything requires gradients; whether f holds such tensors shows in its values at all times."""
    if not torch.is_grad_enabled():
        return False
    return y0.requires_grad or times.requires_grad or field(times, y).requires_grad


def _check(f: Any, y0: Any, t: Any) -> None:
    if not callable(f):
        raise TypeError(f"f must be a function or module f(t, y) -> dy/dt, got {type(f).__name__}")
    for name, value in (("y0", y0), ("t", t)):
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a Tensor, got {type(value).__name__}")
    if y0.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"y0 must be float32 or float64, got {y0.dtype}")
    if y0.dim() < 1 or y0.numel() == 0:
        raise ValueError(f"y0 must have shape (..., n) and hold values, got {tuple(y0.shape)}")
    if t.dim() != 1 or len(t) == 0:
        raise ValueError(f"t must be a vector of times, got shape {tuple(t.shape)}")
    if t.device != y0.device:
        raise ValueError(f"t is on {t.device}, y0 on {y0.device}: they must agree")
    if not bool(y0.isfinite().all()):
        raise ValueError("y0 must be finite, got inf or nan in it")
    _check_increasing(t.detach().to(y0.dtype))


def _check_increasing(t: Tensor) -> None:
    bad = (~(t[1:] > t[:-1])).nonzero().flatten()
    if not bool(t.isfinite().all()):
        raise ValueError("t must be finite, got inf or nan in it")
    if len(bad):
        i = int(bad[0])
        raise ValueError(
            f"t must increase, but t[{i}] = {float(t[i]):.6g} is followed by t[{i + 1}] = {float(t[i + 1]):.6g} (in "
            f"{t.dtype}). To go back in time, solve dy/ds = -f(-s, y) over s = -t."
        )


def _check_guess(guess: Any, y0: Tensor, t: Tensor, solver: str | Solver, newton: DEER | None) -> None:
    if guess is None:
        return
    if newton is None:
        raise ValueError(f"guess= is for solver='deer', got solver={solver!r}: leave it out")
    if not isinstance(guess, Tensor):
        raise TypeError(f"guess must be a Tensor, got {type(guess).__name__}")
    if guess.shape != (len(t), *y0.shape):
        raise ValueError(f"guess has shape {tuple(guess.shape)}, expected {(len(t), *y0.shape)}: a point for each time")
    if (guess.dtype, guess.device) != (y0.dtype, y0.device):
        raise ValueError(f"guess is {guess.dtype} on {guess.device}, y0 {y0.dtype} on {y0.device}: they must agree")
