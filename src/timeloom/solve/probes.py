"""The first-order error of starts for links that amplify: small changes of all starts are swept along the error itself.

Gains from the last moves say little about such links: these moves had other directions than the error, or were too
large for the network to be linear. The error `ε[p] = J[p−1] ε[p−1] + jump[p]` needs J along itself alone. So the
estimated direction of the error at every link is mapped by the link, which gives a better estimate, until it settles.
Such a sweep costs as much as one of the solve, and shows more about the error.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from timeloom.solve.lowrank import Basis
from timeloom.solve.residual import certificate
from timeloom.solve.tangents import Map

MOST = 6
"""Largest number of sweeps along the error."""
SETTLED = 0.1
"""Relative change at which the error counts as settled. Behind links with jumps, it is found one link per sweep."""


def first_order_error(
    map_by: Map, jumps: Tensor, decay: Tensor, guess: Tensor, images: Tensor, relative: Callable[[Tensor], Tensor]
) -> float:
    """The largest relative error of a start, given the jumps between links; plus its last change if it has not settled.

    guess: the present estimate of the error, `(C, B, S)`.
    images: an observed change of each link's end, `(C, B, S)`: the direction in which errors probably reach the next.
    relative: maps changes of starts to their relative sizes `(C, B)`.
    """
    basis = Basis(decay, 2 * MOST)
    error, changed, any_size = guess, torch.inf, decay.new_zeros(decay.shape[:-1])
    for _ in range(MOST):
        arriving = torch.cat([torch.zeros_like(images[:1]), images[:-1]])
        columns = _units(torch.stack([error, arriving], -1))
        mapped = map_by(columns).nan_to_num(posinf=0, neginf=0)
        for column, image in zip(columns.unbind(-1), mapped.unbind(-1), strict=True):
            basis.add(column, image, any_size)
        following = basis.over(decay).carry(jumps)
        changed, size = float(certificate(relative(following - error))), float(certificate(relative(following)))
        if changed <= SETTLED * size:
            return size
        error, images = following, mapped[..., 1]
    return size + changed


def _units(directions: Tensor) -> Tensor:
    """Directions `(C, B, S, K)` scaled to length one; zeros stay zeros."""
    sizes: Tensor = torch.linalg.vector_norm(directions, dim=-2, keepdim=True)
    return directions / sizes.clamp(min=torch.finfo(sizes.dtype).tiny)
