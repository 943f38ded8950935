"""`torch.func` transforms and forward-mode differentiation, which cannot trace the loop of a solve.

The modules support them another way (`timeloom.solve.functional`).
"""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

WHERE = "inside torch.func transforms and forward-mode differentiation"


def transformed() -> bool:
    """Whether a transform is active around this call."""
    return bool(torch._C._are_functorch_transforms_active()) or forward_ad._current_level >= 0


def transforms_work() -> bool:
    """Whether torch.func can be used here: inside the operators of a compiled graph it cannot."""
    return not torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.FuncTorchBatched)


def refuse_transforms(name: str, instead: str) -> None:
    """Raise where `name` would be transformed, and say what to use instead."""
    if transformed():
        raise RuntimeError(f"{name} does not run {WHERE}: use {instead}")
