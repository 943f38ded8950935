"""The error to first order, of links that amplify: what jumps mean for the starts behind them, by small changes of all
starts that are swept beside them until they tell the same twice.

What links did to the last moves tells little there: these went other ways than the error does, or were too large for a
network to be linear. The error `ε[p] = J[p−1] ε[p−1] + jump[p]` needs J along itself alone, so its direction at every
link is mapped, and from what that shows follows a better one. Sweeps by differences cost as much as others; no
iteration of the solve itself would tell more.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from timeloom.solve.lowrank import Basis
from timeloom.solve.residual import certificate
from timeloom.solve.tangents import Map

MOST = 6
"""Times that all links are asked."""
SETTLED = 0.1
"""Part of the error by which it may still change. Where few links have jumps, the others are found one by one."""


def first_order_error(
    map_by: Map, jumps: Tensor, decay: Tensor, guess: Tensor, images: Tensor, relative: Callable[[Tensor], Tensor]
) -> float:
    """The largest relative error of a start, of links between which there are these jumps; where it has not settled,
    by how much it may be off is added.

    guess: `(C, B, S)`, the error by what is known so far; images: `(C, B, S)`, a change of each link's end that was
    seen, the way in which errors are likely to arrive at the next; relative: `(C, B)`, the size of changes of starts.
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
    """Directions `(C, B, S, K)` of length one; those of no length as they are."""
    sizes: Tensor = torch.linalg.vector_norm(directions, dim=-2, keepdim=True)
    return directions / sizes.clamp(min=torch.finfo(sizes.dtype).tiny)
