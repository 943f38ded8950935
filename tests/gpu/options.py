"""Dropout inside the recurrence, and torch.func's transforms."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, stack_module_state, vmap

import timeloom as tl
from tests.gpu.checks import Check
from timeloom.solvers import Shooting

KINDS = ("GRU", "LSTM", "RNN")
DROPPED: tuple[dict[str, Any], ...] = ({"weight_dropout": 0.3}, {"recurrent_dropout": 0.3}, {"zoneout": 0.2})
CLOSE = 2e-5
"""Relative difference that rounding may make."""


def dropout() -> list[Check]:
    found = []
    for kind, options, batch in product(KINDS, DROPPED, (1, 3)):
        name = f"{kind} {next(iter(options))} B={batch}"
        found.append(Check(name, partial(_one_seed, kind, options, batch)))
    return found


def _one_seed(kind: str, options: dict[str, Any], batch: int, device: str) -> str:
    """Chunks side by side, and one step after the other, of one seed: outputs and gradients."""
    torch.manual_seed(0)
    module = getattr(tl, kind)(5, 16, bidirectional=True, device=device, **options)
    x = torch.randn(96, batch, 5, device=device)

    def run(solver: Any) -> list[Tensor]:
        module.solver = solver
        torch.manual_seed(1)
        y = module(x)[0]
        return [y.detach(), *torch.autograd.grad(y.square().sum(), list(module.parameters()))]

    return _compare(run(Shooting(chunk=16)), run("sequential"))


def transforms() -> list[Check]:
    return [
        Check(f"{kind} {what.__name__[1:]}", partial(what, kind)) for kind in KINDS for what in (_gradients, _models)
    ]


def _loss(module: nn.Module, params: dict[str, Tensor], x: Tensor) -> Tensor:
    return functional_call(module, params, (x,))[0].square().mean()  # type: ignore[no-any-return]


def _gradients(kind: str, device: str) -> str:
    """grad and jvp in float32 on the device, against torch's layer in float64 on a CPU."""
    torch.manual_seed(0)
    ours, theirs = getattr(tl, kind)(4, 16, device=device), getattr(nn, kind)(4, 16).double()
    theirs.load_state_dict({name: value.cpu() for name, value in ours.state_dict().items()})
    x, direction = torch.randn(600, 2, 4, dtype=torch.float64), torch.randn(600, 2, 4, dtype=torch.float64)
    found: list[list[Tensor]] = []
    for module, like in ((ours, torch.zeros(0, device=device)), (theirs, x)):
        params = {name: value.detach() for name, value in module.named_parameters()}
        given, along = x.to(like), direction.to(like)
        grads = grad(partial(_loss, module))(params, given)
        _, tangent = jvp(lambda x, module=module: module(x)[0], (given,), (along,))
        found.append([tangent, *grads.values()])
    return _compare(*found)


def _models(kind: str, device: str) -> str:
    """The gradients of an ensemble, against those of its models one by one."""
    torch.manual_seed(0)
    models = [getattr(tl, kind)(4, 16, device=device) for _ in range(3)]
    params, _ = stack_module_state(models)
    x = torch.randn(600, 2, 4, device=device)
    together = vmap(grad(partial(_loss, models[0])), in_dims=(0, None))(params, x)
    alone = []
    for model in models:
        own = dict(model.named_parameters())
        alone.append(torch.autograd.grad(_loss(model, own, x), list(own.values())))
    return _compare(list(together.values()), [torch.stack(parts) for parts in zip(*alone, strict=True)])


def _compare(found: list[Tensor], expected: list[Tensor]) -> str:
    worst = max(
        float((one.double().cpu() - other.double().cpu()).abs().max() / other.abs().max().clamp(min=1e-12))
        for one, other in zip(found, expected, strict=True)
    )
    if not worst <= CLOSE:
        raise AssertionError(f"off by {worst:.1e} of the largest")
    return f"{worst:.1e}"
