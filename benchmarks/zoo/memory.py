"""How long the zoo's networks remember, and the sweeps that each correction takes for them."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

import timeloom as tl
from timeloom.inspection.memory import memory_of, recurrences
from timeloom.solve.plan import Correction
from timeloom.solvers import Shooting

CORRECTIONS: tuple[Correction, ...] = ("none", "diag", "secant", "lowrank", "newton")
DENSE_UP_TO = 64
"""Units up to which dense transfers are tried."""
MOST = 60
"""Sweeps after which a correction counts as too slow."""


def remembered(layer: Any, x: Tensor) -> dict[str, Any]:
    """Largest Lyapunov exponent and memory length of a layer on x `(T, B, D)`."""
    memory = memory_of(next(recurrences(layer, x)), tolerance=1e-6)
    return {"exponent": memory.exponent, "memory": memory.steps}


def sweeps(layer: Any, x: Tensor, chunk: int, tol: float, seed: int = 2) -> dict[str, Any]:
    """Sweeps forward and backward by correction, from a warm-up of one chunk; None if there were too many.

    Also the milliseconds of both passes in the second of two calls.
    """
    found: dict[str, Any] = {}
    kind = getattr(tl, type(layer).__name__)
    for correction in CORRECTIONS:
        if correction == "newton" and layer.hidden_size > DENSE_UP_TO:
            continue
        solver = Shooting(chunk=chunk, warmup=chunk, correction=correction, tol=tol, max_iters=MOST)
        own = kind(layer.input_size, layer.hidden_size, solver=solver).to(x.device)
        own.load_state_dict(layer.state_dict())
        for _ in range(2):
            given = x.detach().requires_grad_()
            began = time.perf_counter()
            y = own(given)[0]
            pull = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed)).to(y)
            y.backward(pull)
            if x.is_cuda:
                torch.cuda.synchronize(x.device)
            spent = 1e3 * (time.perf_counter() - began)
        forward, backward = own.reports[0], own.reports[0].backward
        counts = [None if one.fell_back else one.iterations for one in (forward, backward)]
        found[correction] = {"forward": counts[0], "backward": counts[1], "ms": spent}
    return found


def told(found: dict[str, Any]) -> dict[str, str]:
    """Sweeps by correction as `forward/backward`; `–` if there were too many."""
    return {
        name: "/".join("–" if count is None else str(count) for count in (one["forward"], one["backward"]))
        for name, one in found.items()
    }
