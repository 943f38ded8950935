"""Dropout inside the recurrence: reproducible by seed, kernels with masks, calls that are only replays."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

import timeloom as tl
from tests.gpu.checks import Check, Unfit
from timeloom.solve.inputs import Inputs
from timeloom.solvers import Shooting

KINDS = ("GRU", "LSTM", "RNN")
DROPPED: tuple[dict[str, Any], ...] = ({"weight_dropout": 0.3}, {"recurrent_dropout": 0.3}, {"zoneout": 0.2})
BOTH = {"recurrent_dropout": 0.3, "zoneout": 0.2}
CLOSE, SUMMED = 2e-5, 1e-4
"""Relative difference that counts as rounding, for outputs and for sums over hundreds of steps."""
CALLS = 60
"""Most calls until plans have settled and both passes are recorded."""


def dropout() -> list[Check]:
    found = []
    for kind, options, batch in product(KINDS, DROPPED, (1, 3)):
        name = f"{kind} {next(iter(options))} B={batch}"
        found.append(Check(name, partial(_one_seed, kind, options, batch)))
    sizes = ((2, 20), (40, 33), (3, 150), (40, 150))
    for kind, options, (batch, units) in product(KINDS, (*DROPPED[1:], BOTH), sizes):
        name = f"{kind} {' '.join(options)} B={batch} n={units} against float64"
        found.append(Check(name, partial(_against_float64, kind, options, batch, units)))
    for kind, options, batch in product(KINDS, (*DROPPED, BOTH), (1, 4)):
        found.append(Check(f"{kind} {' '.join(options)} B={batch} replayed", partial(_replayed, kind, options, batch)))
    return found


def _one_seed(kind: str, options: dict[str, Any], batch: int, device: str) -> str:
    """Outputs and gradients in parallel chunks and step by step, from the same seed."""
    torch.manual_seed(0)
    module = getattr(tl, kind)(5, 16, bidirectional=True, device=device, **options)
    x = torch.randn(96, batch, 5, device=device)

    def run(solver: Any) -> list[Tensor]:
        module.solver = solver
        torch.manual_seed(1)
        y = module(x)[0]
        return [y.detach(), *torch.autograd.grad(y.square().sum(), list(module.parameters()))]

    with torch.backends.cudnn.flags(allow_tf32=False):  # torch's own layer may run one step after the other
        return compare(run(Shooting(chunk=16)), run("sequential"))


def _against_float64(kind: str, options: dict[str, Any], batch: int, units: int, device: str) -> str:
    """Kernels for single rows, tiles, several blocks per row and a launch per step, against the plain loop."""
    torch.manual_seed(0)
    module = getattr(tl, kind)(5, units, device=device, solver=Shooting(chunk=16), **options)
    x = torch.randn(96, batch, 5, device=device, requires_grad=True)
    with torch.backends.cudnn.flags(allow_tf32=False):
        torch.manual_seed(1)
        found = _results(module, x, module(x)[0])
    torch.manual_seed(1)
    return compare(found, _results(module, x, _by_loop(module, x)), SUMMED)


def _results(module: Any, x: Tensor, y: Tensor) -> list[Tensor]:
    pull = torch.randn(y.shape, device="cpu", generator=torch.Generator("cpu").manual_seed(2)).to(y)
    return [y.detach(), *torch.autograd.grad(y, [x, *module.parameters()], pull)]


def _by_loop(module: Any, x: Tensor) -> Tensor:
    """One layer in float64, with the masks that a call in float32 draws."""
    widths = [module.hidden_size] * (2 if module.mode == "LSTM" else 1)
    shown, weights = module._with_masks(x, module._present_weights()[0], widths)
    initial = x.new_zeros(x.shape[1], sum(widths), dtype=torch.float64)
    cast: list[Any] = [None if weight is None else weight.double() for weight in weights]
    inputs = Inputs._make([shown.double(), initial, *cast, None, None])
    return module._solve_of(0, {}).on_tape(inputs, lambda _: None, "a check")[0]  # type: ignore[no-any-return]


def _replayed(kind: str, options: dict[str, Any], batch: int, device: str) -> str:
    """Masks differ from call to call, and weights change in place; the last call must match that of a new module."""
    if device == "cpu":
        raise Unfit("CUDA graphs need a GPU")
    torch.manual_seed(0)
    module = getattr(tl, kind)(5, 32, device=device, **options)
    for call in range(CALLS):
        x = torch.randn(8192, batch, 5, device=device, requires_grad=True)
        _results(module, x, module(x)[0])
        if module._steady and call > CALLS // 3:
            break
        with torch.no_grad():
            for weight in module.parameters():
                weight.add_(1e-3 * torch.randn_like(weight))
    if not module._steady:
        raise AssertionError(f"not by replays alone after {CALLS} calls: {module.reports[0]}")
    torch.manual_seed(3)
    found = _results(module, x, module(x)[0])
    again = getattr(tl, kind)(5, 32, device=device, **options)
    again.load_state_dict(module.state_dict())
    torch.manual_seed(3)
    return compare(found, _results(again, x, again(x)[0]), SUMMED)


def compare(found: list[Tensor], expected: list[Tensor], close: float = CLOSE) -> str:
    worst = max(
        float((one.double().cpu() - other.double().cpu()).abs().max() / other.abs().max().clamp(min=1e-12))
        for one, other in zip(found, expected, strict=True)
    )
    if not worst <= close:
        raise AssertionError(f"off by {worst:.1e} of the largest")
    return f"{worst:.1e}"
