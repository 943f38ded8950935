"""torch.func's transforms."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, stack_module_state, vmap

import timeloom as tl
from tests.gpu.checks import Check
from tests.gpu.dropout import compare

KINDS = ("GRU", "LSTM", "RNN")


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
    return compare(*found)


def _models(kind: str, device: str) -> str:
    """Gradients of an ensemble, against those of its models one by one."""
    torch.manual_seed(0)
    models = [getattr(tl, kind)(4, 16, device=device) for _ in range(3)]
    params, _ = stack_module_state(models)
    x = torch.randn(600, 2, 4, device=device)
    together = vmap(grad(partial(_loss, models[0])), in_dims=(0, None))(params, x)
    alone = []
    with torch.backends.cudnn.flags(allow_tf32=False):  # torch's own layer may run few steps
        for model in models:
            own = dict(model.named_parameters())
            alone.append(torch.autograd.grad(_loss(model, own, x), list(own.values())))
    return compare(list(together.values()), [torch.stack(parts) for parts in zip(*alone, strict=True)])
