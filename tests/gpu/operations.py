"""Scans, differential equations and chains against plain torch in float64, and plain torch in the same dtype."""

from __future__ import annotations

from functools import partial
from itertools import pairwise, product
from typing import Any

import torch
from torch import Tensor, nn

import timeloom as tl
from benchmarks.fuzz.judge import shrunk
from tests.gpu.checks import Check, as_good_as_torch

LENGTHS = (1, 2, 33, 257, 2049)
SCANS = {"diagonal": (1, 3, 64, 300), "block": (1, 5, 33), "dense": (1, 3, 8, 16, 20)}
"""Widths of the state for each structure of the transfers."""


def scans() -> list[Check]:
    found = []
    for (structure, widths), steps in product(SCANS.items(), LENGTHS):
        for index, n in enumerate(widths):
            reverse = (index + steps) % 2 == 1
            if structure != "diagonal" and steps > 257:
                continue
            name = f"{structure} n={n} T={steps}{' reversed' if reverse else ''}"
            found.append(Check(f"{name} float32", partial(_scan, structure, n, steps, reverse, torch.float32)))
    for dtype, structure in product((torch.float64, torch.float16, torch.bfloat16, torch.complex64), SCANS):
        if dtype in (torch.float16, torch.bfloat16) and structure != "diagonal":
            continue
        found.append(Check(f"{structure} n=5 T=257 {dtype}", partial(_scan, structure, 5, 257, False, dtype)))
    return found


def _scan(structure: str, n: int, steps: int, reverse: bool, dtype: torch.dtype, device: str) -> str:
    torch.manual_seed(0)
    batch, exact = 3, torch.complex128 if dtype.is_complex else torch.float64
    shape = {"diagonal": (n,), "block": (2, 2, n), "dense": (n, n)}[structure]
    state = (2, n) if structure == "block" else (n,)
    a = torch.randn(steps, batch, *shape, dtype=exact) * (0.9 if structure == "diagonal" else 0.5 / len(shape[:-1]))
    a = a / max(1.0, n**0.5 / 2) if structure == "dense" else a.clamp(-1, 1) if not dtype.is_complex else a / 2
    b, h0 = torch.randn(steps, batch, *state, dtype=exact), torch.randn(batch, *state, dtype=exact)
    given = [part.to(dtype).to(exact) for part in (a, b, h0)]
    upstream = torch.randn(steps, batch, *state, dtype=exact).to(device)

    def run(kind: Any, scan: Any) -> dict[str, Tensor]:
        leaves = [part.to(device, kind).requires_grad_() for part in given]
        h = scan(*leaves)
        h.backward(upstream.to(kind))
        grads = zip(("a", "b", "h0"), leaves, strict=True)
        found = {"h": h, **{f"grad {name}": leaf.grad for name, leaf in grads if leaf.grad is not None}}
        return {name: torch.view_as_real(v) if v.is_complex() else v for name, v in found.items()}

    loop = partial(_loop, structure=structure, reverse=reverse)
    kernel = partial(tl.linear_scan, reverse=reverse, structure=structure)
    return as_good_as_torch(run(dtype, kernel), run(dtype, loop), run(exact, loop))


def _loop(a: Tensor, b: Tensor, h: Tensor, structure: str, reverse: bool) -> Tensor:
    states: list[Tensor] = []
    pairs = list(zip(a.unbind(), b.unbind(), strict=True))
    for transfer, source in reversed(pairs) if reverse else pairs:
        if structure == "diagonal":
            h = transfer * h + source
        elif structure == "dense":
            h = (transfer @ h.unsqueeze(-1)).squeeze(-1) + source
        else:
            h = (transfer * h.unsqueeze(-3)).sum(-2) + source
        states.append(h)
    return torch.stack(states[::-1] if reverse else states)


class _Field(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(n + 1, 16), nn.Tanh(), nn.Linear(16, n))

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        out: Tensor = self.net(torch.cat([y, torch.sin(2 * t).expand(*y.shape[:-1], 1)], -1))
        return out


def odes() -> list[Check]:
    found = []
    for dtype, solver, steps in product(
        (torch.float32, torch.float64), ("deer", "sequential", "shooting"), (1, 64, 500)
    ):
        name = f"rk4 {solver} T={steps} {dtype}"
        found.append(Check(name, partial(_ode, solver, steps, dtype)))
    for step in ("implicit-midpoint", "hermite-simpson", "deer"):
        found.append(Check(f"{step} near the fine solution", partial(_fine, step)))
    return found


def _rk4(f: Any, y: Tensor, t: Tensor) -> Tensor:
    points = [y]
    for begin, end in pairwise(t.unbind()):
        dt = end - begin
        row = begin.reshape(1, 1)
        k1 = f(row, y)
        k2 = f(row + dt / 2, y + dt / 2 * k1)
        k3 = f(row + dt / 2, y + dt / 2 * k2)
        k4 = f(row + dt, y + dt * k3)
        y = y + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        points.append(y)
    return torch.stack(points)


def _ode_run(solve: Any, field: nn.Module, y0: Tensor, t: Tensor, upstream: Tensor) -> dict[str, Tensor]:
    field.zero_grad()
    y0 = y0.detach().clone().requires_grad_()
    y = solve(field, y0, t)
    y.backward(upstream.to(y.dtype))
    found = {"y": y, "grad y0": y0.grad}
    return found | {f"grad {name}": part.grad.clone() for name, part in field.named_parameters()}


def _ode(solver: str, steps: int, dtype: torch.dtype, device: str) -> str:
    torch.manual_seed(0)
    field = _Field(4).to(device, dtype)
    exact = _Field(4).to(device, torch.float64)
    exact.load_state_dict(field.state_dict())
    y0 = torch.randn(3, 4).to(device, dtype)
    t = (2 * torch.linspace(0, 1, steps + 1, dtype=torch.float64) ** 1.2).to(device, dtype)
    upstream = torch.randn(steps + 1, 3, 4, dtype=torch.float64).to(device) / (steps + 1) ** 0.5
    own = _ode_run(partial(tl.odeint, solver=solver), field, y0, t, upstream)
    truth = _ode_run(_rk4, exact, y0.double(), t.double(), upstream)
    if dtype == torch.float64:  # torch's loop would be its own truth
        theirs = shrunk(_ode_run(_rk4, field.float(), y0.float(), t.float(), upstream), truth)
    else:
        theirs = _ode_run(_rk4, field, y0, t, upstream)
    return as_good_as_torch(own, theirs, truth)


def _fine(step: str, device: str) -> str:
    """The error shrinks with the order of the step when the steps are halved."""
    torch.manual_seed(0)
    field = _Field(3).to(device, torch.float64)
    y0 = torch.randn(2, 3, dtype=torch.float64).to(device)
    with torch.no_grad():
        right = _rk4(field, y0, torch.linspace(0, 1, 4001, dtype=torch.float64).to(device))[-1]
    errors = []
    for steps in (32, 64):
        t = torch.linspace(0, 1, steps + 1, dtype=torch.float64).to(device)
        with torch.no_grad():
            errors.append(float((tl.odeint(field, y0, t, step=step)[-1] - right).abs().max()))
    order = 4 if step == "hermite-simpson" else 2
    if not errors[1] < max(errors[0] / 2 ** (order - 0.5), 1e-11):
        raise AssertionError(f"errors {errors[0]:.1e} and {errors[1]:.1e} do not shrink by order {order}")
    return f"{errors[0]:.1e}, then {errors[1]:.1e}"


def chains() -> list[Check]:
    return [
        Check(f"{kind}, levels {levels}", partial(_chain, kind, levels))
        for kind, levels in product(("dense", "convolutions"), (None, 0, 2))
    ]


def _chain(kind: str, levels: int | None, device: str) -> str:
    torch.manual_seed(0)
    dense: list[nn.Module] = [nn.Linear(20, 33), nn.Tanh(), nn.Linear(33, 33), nn.ReLU(), nn.Linear(33, 5)]
    images: list[nn.Module] = [nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 3, 3), nn.Tanh()]
    images += [nn.Flatten(), nn.Linear(12, 5)]
    model = nn.Sequential(*(dense if kind == "dense" else images)).to(device)
    x = torch.randn(*((7, 20) if kind == "dense" else (3, 2, 8, 8))).to(device)

    def run(model: nn.Module, x: Tensor, backward: Any) -> dict[str, Tensor]:
        model.zero_grad()
        x = x.detach().clone().requires_grad_()
        value = backward(model, x)
        grads = {f"grad {name}": part.grad.clone() for name, part in model.named_parameters()}
        return {"loss": value.detach(), "grad x": x.grad, **grads}

    def plain(model: nn.Module, x: Tensor) -> Tensor:
        value = _loss(model(x))
        value.backward()
        return value

    own = run(model, x, lambda model, x: tl.chain_backward(model, x, _loss, levels))
    theirs, exact = run(model, x, plain), run(model.double(), x.double(), plain)
    return as_good_as_torch(own, theirs, exact)


def _loss(y: Tensor) -> Tensor:
    return y.sin().square().mean()
